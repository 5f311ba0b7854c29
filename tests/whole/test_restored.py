"""Restored = never spilled, through HTTP, under --deterministic: a tiny pool against one that holds everything."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serverproc import Server

SESSIONS = 4
TURNS = 3
SHARED = [random.Random(7).randrange(1000, 40_000) for _ in range(256)]


def own_ids(session: int, turn: int, least: int = 210) -> list[int]:
    """New prompt tokens of a turn: a "tool result" of odd length, so that boundaries are never aligned."""
    rng = random.Random(1000 * session + turn)
    return [rng.randrange(1000, 40_000) for _ in range(least + 17 * session + 3 * turn)]


def play(server: Server, turns: int, histories: list[list[int]], least: int, first_turn: int = 0) -> list[list[dict[str, Any]]]:
    """Every session's turns, all sessions at once turn by turn; histories grow by what was asked and answered."""
    rounds = []
    for turn in range(first_turn, first_turn + turns):
        for session, history in enumerate(histories):
            history.extend(own_ids(session, turn, least))

        def one(i: int) -> dict[str, Any]:
            return server.complete(histories[i], 12, session=f"agent-{i}")

        with ThreadPoolExecutor(len(histories)) as pool:
            replies = list(pool.map(one, range(len(histories))))
        for history, reply in zip(histories, replies, strict=True):
            history.extend(reply["choices"][0]["token_ids"])
        rounds.append(replies)
    return rounds


def answers(rounds: list[list[dict[str, Any]]]) -> list[list[list[int]]]:
    return [[reply["choices"][0]["token_ids"] for reply in replies] for replies in rounds]


def sums(rounds: list[list[dict[str, Any]]], key: str) -> int:
    return sum(int(reply["kvalet"][key]) for replies in rounds for reply in replies)


@pytest.mark.parametrize(
    ("least", "pool_tokens", "ram"),
    [(110, 1024, "24MB"), pytest.param(210, 1536, "24MB", marks=pytest.mark.long)],
)
def test_restored_equals_never_spilled_and_survives_sigkill(tmp_path: Path, least: int, pool_tokens: int, ram: str) -> None:
    common = ("--weights", "bf16", "--deterministic", "--max-rows", "4")
    with Server(*common, "--pool-tokens", "16384", "--ram-bytes", "0") as server:
        truth_histories = [list(SHARED) for _ in range(SESSIONS)]
        truth = play(server, TURNS + 1, truth_histories, least)
        assert sums(truth, "ram_tokens") == sums(truth, "disk_tokens") == 0

    small = ("--pool-tokens", str(pool_tokens), "--ram-bytes", ram, "--store", str(tmp_path / "st"))
    with Server(*common, *small) as server:
        histories = [list(SHARED) for _ in range(SESSIONS)]
        rounds = play(server, TURNS, histories, least)
        assert answers(rounds) == answers(truth[:TURNS])
        assert sums(rounds, "ram_tokens") > 0, server.log[-2000:]
        assert sums(rounds, "disk_tokens") > 0, server.log[-2000:]
        before_kill = server.metric("kvalet_disk_files")
        server.kill()
        server.start()
        assert before_kill > 0
        last = play(server, 1, histories, least, first_turn=TURNS)
        assert sums(last, "disk_tokens") > 0
        # What was lost with the process is computed again in larger pieces than it was decoded: other bits are legal
        # there (rule 11), so only turns that computed nothing old must agree token for token.
        for reply, true in zip(last[0], truth[TURNS], strict=True):
            record = reply["kvalet"]
            new_tokens = record["computed_tokens"]
            if new_tokens <= len(own_ids(0, TURNS, least)):
                assert reply["choices"][0]["token_ids"] == true["choices"][0]["token_ids"]


def test_shared_prefix_never_evicted_before_the_kill_is_on_disk_after_it(tmp_path: Path) -> None:
    """Disk is closed under ancestors: the prefix was never a victim, yet its chunk is there after SIGKILL."""
    prefix = [random.Random(3).randrange(1000, 40_000) for _ in range(512)]
    with Server("--weights", "bf16", "--pool-tokens", "1536", "--ram-bytes", "12MB", "--store", str(tmp_path / "st")) as server:
        for session in range(6):
            server.complete(prefix + own_ids(session, 0), 4, session=f"s{session}")
        assert server.metric("kvalet_disk_files") > 0
        server.kill()
        server.start()
        reply = server.complete([*prefix, 1, 2, 3], 2)
        assert reply["kvalet"]["disk_tokens"] >= 256, reply["kvalet"]
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= 256
