"""P28, P29, P31 through HTTP, with named sessions: whatever lies in the store, answers are those of a server without one."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serverproc import Server
from wholekit import random_ids

COMMON = ("--weights", "fp32", "--pool-tokens", "2048", "--ram-bytes", "0", "--max-rows", "8")
LENGTH = 40
NEW = [1500, 1600, 1700]


def half(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)


def locked(file: Path) -> None:
    file.chmod(0)


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGES: tuple[Callable[[Path], None], ...] = (half, empty, flipped, Path.unlink, locked, folder, fifo)
READABLE = os.geteuid() == 0
"""Whom no mode keeps out reads the locked ones all the same."""


class Agents:
    """Sessions with a history each, and what a server without a store answers to the next prompt."""

    def __init__(self, server: Server, n: int) -> None:
        self.server = server
        self.names = [f"agent {number}" for number in range(n)]
        self.histories = [random_ids(LENGTH, 700 + number) for number in range(n)]

    def first_turns(self) -> None:
        for number, reply in enumerate(self.ask(range(len(self.names)), 4)):
            self.histories[number] += [*reply["choices"][0]["token_ids"], *NEW]

    def ask(self, which: Any, n: int, **fields: Any) -> list[dict[str, Any]]:
        def one(number: int) -> dict[str, Any]:
            return self.server.complete(self.histories[number], n, session=self.names[number], **fields)

        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(one, which))

    def cold(self, number: int) -> list[int]:
        """Another salt sees nothing of what is stored."""
        reply = self.server.complete(self.histories[number], 4, session="cold", cache_salt="nobody's")
        assert reply["kvalet"]["computed_tokens"] == len(self.histories[number])
        return list(reply["choices"][0]["token_ids"])


def files(store: Path, kind: str) -> list[Path]:
    return sorted(path for path in (store / kind).glob("*/*"))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Agents]:
    """A store of 14 sessions, left by SIGTERM."""
    store = tmp_path_factory.mktemp("kv") / "ein Lager für Schlüssel"
    with Server(*COMMON, "--store", str(store)) as server:
        agents = Agents(server, 2 * len(DAMAGES))
        agents.first_turns()
        assert server.terminate() == 0
    assert len(files(store, "r")) == len(files(store, "t")) == len(agents.names)
    return store, agents


def test_damaged_files_cost_recompute_once_and_never_an_answer(stored: tuple[Path, Agents]) -> None:
    """P29: of 14 sessions 7 have a bad record, and 7 a bad tail, each damaged in another way. Every session's next prompt
    comes twice at once, then once more."""
    store, agents = stored
    for kind in ("r", "t"):
        for damage, file in zip(DAMAGES, files(store, kind), strict=False):
            damage(file)
    with Server(*COMMON, "--store", str(store)) as server:
        agents.server = server
        everyone = range(len(agents.names))
        twice = agents.ask([*everyone, *everyone], 4)
        right = [agents.cold(number) for number in everyone]
        assert [reply["choices"][0]["token_ids"] for reply in twice] == [*right, *right]
        price = [
            min(twice[i]["kvalet"]["computed_tokens"], twice[i + len(right)]["kvalet"]["computed_tokens"]) for i in everyone
        ]
        assert sum(n <= len(NEW) + 1 for n in price) >= len(DAMAGES) + READABLE, price
        assert server.metric("kvalet_read_records_total") == len(DAMAGES) + READABLE
        seen = [server.metric(f"kvalet_{name}_total") for name in ("record_read_failures", "disk_refusals")]
        assert seen[0] >= 1
        assert seen[1] >= 1
        again = agents.ask(everyone, 4)
        assert [reply["choices"][0]["token_ids"] for reply in again] == right
        assert seen == [server.metric(f"kvalet_{name}_total") for name in ("record_read_failures", "disk_refusals")]
        assert server.metric("kvalet_turns_ended_total", reason="internal") == 0
        assert "Traceback" not in server.log, server.log[-3000:]
        second_server_is_refused(store)
        assert server.terminate() == 0


def second_server_is_refused(store: Path) -> None:
    """P31: it says so in one sentence and leaves; the first one goes on."""
    second = Server(*COMMON, "--store", str(store))
    try:
        with pytest.raises(AssertionError, match=r"exit 2") as caught:
            second.start()
    finally:
        second.__exit__()
    sentence = next(line for line in str(caught.value).splitlines() if store.name in line)
    assert "use" in sentence, sentence
    assert "Traceback" not in str(caught.value)


def test_another_identity_sees_no_session_and_leaves_the_files_alone(stored: tuple[Path, Agents]) -> None:
    """P28: the same directory under other weights."""
    store, agents = stored
    before = {path: path.stat().st_ino for kind in "rt" for path in files(store, kind)}
    with Server("--weights", "bf16", *COMMON[2:], "--store", str(store)) as server:
        agents.server = server
        reply = agents.ask([0], 4)[0]
        assert reply["kvalet"]["computed_tokens"] == len(agents.histories[0])
        assert reply["choices"][0]["token_ids"] == agents.cold(0)
        assert server.metric("kvalet_read_records_total") == 0
        said = [line for line in server.log.splitlines() if "another identity" in line]
        assert len(said) == 1, server.log
        assert "weights" in said[0] or "numerics" in said[0], said
        server.kill()
    assert before == {path: path.stat().st_ino for kind in "rt" for path in files(store, kind)}
