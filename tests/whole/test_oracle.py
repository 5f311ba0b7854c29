"""The reference ids of tests/oracles, through the real server over HTTP: alone, together, after spill, after restart."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from scriptedproc import until
from serverproc import Server

ORACLE = json.loads((Path(__file__).parent.parent / "oracles" / "smollm2_reference.json").read_text())
CASES: list[dict[str, Any]] = ORACLE["cases"]


def ids_of(reply: dict[str, Any]) -> list[int]:
    ids: list[int] = reply["choices"][0]["token_ids"]
    return ids


def ask(server: Server, case: dict[str, Any], session: str = "") -> dict[str, Any]:
    return server.complete(case["prompt_ids"], 64, session=session)


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.long)])
def test_fp32_equals_the_reference_alone_and_together(times: int) -> None:
    """``times``: how often each case is asked at once; twice at full length, and one more of them alone."""
    with Server("--weights", "fp32", "--pool-tokens", "4096", "--ram-bytes", "0") as server:
        for case in CASES[-times:]:  # all of them alone, in parts: below, and in tests/runtime
            assert ids_of(ask(server, case)) == case["greedy_ids_64_ignoring_eos"]
        with ThreadPoolExecutor(10) as pool:
            replies = list(pool.map(lambda case: ask(server, case), CASES * times))
        for case, reply in zip(CASES * times, replies, strict=True):
            assert ids_of(reply) == case["greedy_ids_64_ignoring_eos"]


def go_on(server: Server, start: int, n: int) -> dict[str, int]:
    """Every case's next ``n`` ids behind the first ``start``; tokens by tier."""
    tiers = dict.fromkeys(("resident", "ram", "disk"), 0)
    for i, case in enumerate(CASES):
        greedy = case["greedy_ids_64_ignoring_eos"]
        reply = server.complete([*case["prompt_ids"], *greedy[:start]], n, session=f"s{i}")
        assert ids_of(reply) == greedy[start : start + n], (i, reply["kvalet"])
        for tier in tiers:
            tiers[tier] += reply["kvalet"][f"{tier}_tokens"]
    return tiers


@pytest.mark.parametrize("part", [8, pytest.param(16, marks=pytest.mark.long)])
def test_fp32_equals_the_reference_after_spill_and_restart(tmp_path: Path, part: int) -> None:
    """Every case's answer in four parts (together half of it, or the whole): cold; after foreign traffic has spilled it; after
    more of it and SIGKILL; and once more. What came back from RAM and disk is counted: almost all of every history."""
    args = ("--weights", "fp32", "--pool-tokens", "1024", "--ram-bytes", "24MiB", "--store", str(tmp_path / "store"))
    filler = [[1000 + 37 * s + (i * 7919) % 40_000 for i in range(550)] for s in range(2)]
    most = sum(len(case["prompt_ids"]) for case in CASES)

    def fill() -> None:
        for ids in filler:
            server.complete(ids, 2)
        until("what was spilled is written", lambda: server.metric("kvalet_transfers_in_flight") == 0, 60)

    with Server(*args) as server:
        go_on(server, 0, part)
        fill()
        spilled = go_on(server, part, part)
        assert spilled["ram"] + spilled["disk"] > most // 2, spilled
        fill()
        server.kill()
        server.start()
        restored = go_on(server, 2 * part, part)
        assert restored["resident"] <= 16 * len(CASES), "nothing but what the prompts begin with, shared by the first one"
        assert restored["disk"] > most // 2, restored
        assert go_on(server, 3 * part, part)["resident"] > most
