"""The reference ids of tests/oracles, through the real server over HTTP: alone, together, after spill, after restart."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from serverproc import Server

ORACLE = json.loads((Path(__file__).parent.parent / "oracles" / "smollm2_reference.json").read_text())
CASES: list[dict[str, Any]] = ORACLE["cases"]


def ids_of(reply: dict[str, Any]) -> list[int]:
    ids: list[int] = reply["choices"][0]["token_ids"]
    return ids


def ask(server: Server, case: dict[str, Any], session: str = "") -> dict[str, Any]:
    return server.complete(case["prompt_ids"], 64, session=session)


def test_fp32_equals_the_reference_alone_and_together() -> None:
    with Server("--weights", "fp32", "--pool-tokens", "4096", "--ram-bytes", "0") as server:
        for case in CASES:
            assert ids_of(ask(server, case)) == case["greedy_ids_64_ignoring_eos"]
        with ThreadPoolExecutor(10) as pool:
            replies = list(pool.map(lambda case: ask(server, case), CASES * 2))
        for case, reply in zip(CASES * 2, replies, strict=True):
            assert ids_of(reply) == case["greedy_ids_64_ignoring_eos"]


def test_fp32_equals_the_reference_after_spill_and_restart(tmp_path: Path) -> None:
    """Every case's prompt and answer are spilled by foreign traffic, come back, and come back again after SIGKILL."""
    store = str(tmp_path / "store")
    args = ("--weights", "fp32", "--pool-tokens", "1024", "--ram-bytes", "64MiB", "--store", store)
    filler = [[1000 + 37 * s + (i * 7919) % 40_000 for i in range(700)] for s in range(4)]
    with Server(*args) as server:
        for i, case in enumerate(CASES):
            assert ids_of(ask(server, case, f"s{i}")) == case["greedy_ids_64_ignoring_eos"]
        for ids in filler:
            server.complete(ids, 2)
        for i, case in enumerate(CASES):
            assert ids_of(ask(server, case, f"s{i}")) == case["greedy_ids_64_ignoring_eos"]
        for ids in filler:
            server.complete(ids, 2)
        server.kill()
        server.start()
        for i, case in enumerate(CASES):
            assert ids_of(ask(server, case, f"s{i}")) == case["greedy_ids_64_ignoring_eos"]
