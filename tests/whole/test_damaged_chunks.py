"""The token half of F-R1: chunk k of n is bad, and the real model answers as if nothing had ever been stored."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvalet.store import header
from kvalet.store.header import Header
from serverproc import Server
from wholekit import random_ids

COMMON = ("--weights", "fp32", "--pool-tokens", "2560", "--ram-bytes", "0", "--max-rows", "4")
CHUNK = 256
BAD = {"good": (), "first": (0,), "last": (1,), "both": (0, 1)}
"""Session -> its bad chunks, of two (and a tail)."""
NEW = [1500, 1600, 1700]


def chunk_files(store: Path) -> dict[tuple[int, tuple[int, ...]], Path]:
    """(ordinal, ids) -> file, as the headers say."""
    found = {}
    for path in (store / "c").glob("*/*"):
        head = header.unpack(memoryview(path.read_bytes()[:4096]))
        assert isinstance(head, Header)
        found[head.ordinal, head.ids] = path
    return found


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096 + 1000] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("names", [("last", "first"), pytest.param(tuple(BAD), marks=pytest.mark.long)], ids=len)
def test_the_chunks_before_the_lowest_bad_one_are_used_and_the_tokens_are_the_cold_ones(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    store = tmp_path / "st"
    prompts = {name: random_ids(2 * CHUNK + 3, 900 + i) for i, name in enumerate(names)}
    with Server(*COMMON, "--store", str(store)) as server:
        for name, prompt in prompts.items():
            prompt += [*server.complete(prompt, 4, session=name)["choices"][0]["token_ids"], *NEW]
        assert server.terminate() == 0
    files = chunk_files(store)
    for name in names:
        for k in BAD[name]:
            flip(files[k, tuple(prompts[name][k * CHUNK : (k + 1) * CHUNK])])
    with Server(*COMMON, "--store", str(store)) as server:
        for name in names:
            bad = BAD[name]
            reply = server.complete(prompts[name], 6, session=name)
            record = reply["kvalet"]
            used = CHUNK * min(bad) if bad else len(prompts[name]) - len(NEW) - 1
            assert (record["disk_tokens"], record["computed_tokens"]) == (used, len(prompts[name]) - used), name
            cold = server.complete(prompts[name], 6, session="cold", cache_salt=name)
            assert cold["kvalet"]["computed_tokens"] == len(prompts[name])
            assert reply["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"], name
