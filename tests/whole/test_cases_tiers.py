"""Sessions under pressure on a real server at fp32, where answers can be compared bit for bit: P18, P25, P34, P35."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from serverproc import Server
from wholekit import COMPLETIONS, idle, ids_of, random_ids, refused

PAGE = 16
POOL_TOKENS = 1024
CAPITAL = [504, 3575, 282, 4649, 314]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Pool of 64 pages, a RAM tier of a few chunks, and a disk."""
    store = str(tmp_path_factory.mktemp("store"))
    args = ("--weights", "fp32", "--pool-tokens", str(POOL_TOKENS), "--ram-bytes", "48MiB", "--store", store)
    with Server(*args, "--max-rows", "8") as running:
        yield running
        assert running.metric("kvalet_turns_ended_total", reason="internal") == 0
        assert "Traceback" not in running.log, running.log[-3000:]


def fill(server: Server, seed: int = 0) -> None:
    """Foreign traffic that pushes everything else out of the pool and out of RAM."""
    for index in range(4):
        server.complete(random_ids(900, 9000 + 10 * seed + index), 2)


def cached(reply: dict[str, Any]) -> int:
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("n", [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 8 * PAGE, 513])
def test_a_wholly_cached_prompt(server: Server, n: int) -> None:
    """P25: the same ids with the cache off, cold, resident and spilled; at least one token is computed; later turns hit beyond
    that point. (Below the first whole chunk the disk is asked only for tails that it certainly holds, so there a short prompt
    may be computed again.)"""
    for max_tokens in (1, 16):
        ids = random_ids(n, n * 31 + max_tokens)
        off = ids_of(server.complete(ids, max_tokens, cache_salt=f"off-{n}-{max_tokens}"))
        cold, warm = server.complete(ids, max_tokens), server.complete(ids, max_tokens)
        assert ids_of(cold) == ids_of(warm) == off
        assert cached(warm) <= n - 1
        assert cached(warm) > 0 or n < PAGE
        longer = server.complete([*ids, *off, 5, 6, 7], 1)
        assert cached(longer) >= n // PAGE * PAGE
    fill(server)
    spilled = server.complete(ids, 16)
    assert ids_of(spilled) == off
    assert (
        cached(spilled)
        == spilled["kvalet"]["resident_tokens"] + spilled["kvalet"]["ram_tokens"] + spilled["kvalet"]["disk_tokens"]
    )
    assert cached(spilled) <= n - 1
    assert n < 512 or spilled["kvalet"]["ram_tokens"] + spilled["kvalet"]["disk_tokens"] >= (n - 1) // 256 * 256


def test_a_wholly_cached_prompt_after_a_restart(server: Server) -> None:
    """P25: everything comes from disk; killed once, ended by signal once."""
    for how, n in (("kill", 513), ("end", 512)):
        ids = random_ids(n, 77 + n)
        first = server.complete(ids, 16)
        if how == "kill":
            fill(server, seed=n)
            server.kill()
        else:
            assert server.terminate() == 0
        server.start()
        again = server.complete(ids, 16)
        assert ids_of(again) == ids_of(first)
        assert 0 < cached(again) <= n - 1
        assert again["kvalet"]["disk_tokens"] == cached(again) >= (n - 1) // 256 * 256
        assert again["kvalet"]["computed_tokens"] == n - cached(again)
        longer = server.complete([*ids, *ids_of(first), 5, 6], 1)
        assert cached(longer) >= n // PAGE * PAGE


def sampled(server: Server, seed: int | None, n: int = 32) -> list[int]:
    return ids_of(server.complete(CAPITAL, n, temperature=0.8, **({} if seed is None else {"seed": seed})))


def test_a_seeded_request_says_the_same_in_any_company(server: Server) -> None:
    """P18: alone, with 1 and 7 unseeded neighbours, with a seed-7 neighbour, late; each twice. Unseeded ones differ."""
    alone = sampled(server, 42)
    assert sampled(server, 42) == alone
    for company in ([None], [7], [42] + [None] * 6):
        for _ in range(2):
            with ThreadPoolExecutor(8) as pool:
                others = [pool.submit(sampled, server, seed) for seed in company]
                assert sampled(server, 42) == alone, company
                assert (others[0].result() == alone) is (company[0] == 42), company
    with ThreadPoolExecutor(8) as pool:
        unseeded = list(pool.map(lambda _: tuple(sampled(server, None)), range(5)))
    assert len(set(unseeded)) > 1
    running = server.metric("kvalet_completion_tokens_total")
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(sampled, server, None, 64)
        while server.metric("kvalet_completion_tokens_total") == running and not early.done():
            continue
        assert sampled(server, 42) == alone, "arriving late, in the middle of another's answer"


def test_a_seeded_request_says_the_same_after_a_preemption(server: Server) -> None:
    """P18: two growing turns fill the pool, so that the newest one, which is the seeded one, loses its pages and comes back."""
    n = 120
    alone = sampled(server, 43, n)
    for attempt in range(6):
        with ThreadPoolExecutor(2) as pool:
            growing = [pool.submit(server.complete, random_ids(430 + 8 * attempt, 50 + i + 2 * attempt), 80) for i in range(2)]
            while server.metric("kvalet_turns", state="decoding") < 2 and not any(future.done() for future in growing):
                continue
            reply = server.complete(CAPITAL, n, temperature=0.8, seed=43)
            assert ids_of(reply) == alone, attempt
            assert reply["kvalet"]["preemptions"] <= 5
            if reply["kvalet"]["preemptions"]:
                return
    raise AssertionError("no preemption was forced")


def test_what_can_never_fit_is_refused_and_blocks_nobody(server: Server) -> None:
    """P34: refused at once with the reason, ten short ones behind it are served, and a turn that outgrows the pool ends with
    "length"; meanwhile steps go on (one step computes a whole prompt, so the bound is that of a busy machine)."""
    began = time.monotonic()
    error = refused(server, {"model": server.model, "prompt": random_ids(1500), "max_tokens": 4}, COMPLETIONS)
    assert time.monotonic() - began < 2
    assert "pool" in error["message"]
    stop, longest = threading.Event(), [0.0]

    def watch() -> None:
        while not stop.wait(0.1):
            longest[0] = max(longest[0], server.metric("kvalet_stalled_seconds"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(11) as pool:
            grown = pool.submit(server.complete, random_ids(900, 5), 400)
            short = list(pool.map(lambda i: server.complete(random_ids(40, i), 3), range(10)))
            outgrown = grown.result()
    finally:
        stop.set()
        watcher.join(10)
    assert all(len(ids_of(reply)) == 3 for reply in short)
    assert outgrown["choices"][0]["finish_reason"] == "length"
    assert 100 <= len(ids_of(outgrown)) <= 400
    assert longest[0] < 20.0
    idle(server)


def test_sessions_that_outgrow_the_pool_all_go_on(server: Server) -> None:
    """P35 with the real model, in small (with slow disks and hundreds of turns: tests/sched/test_loop_pressure.py): 8 sessions
    on a pool of 2.2, two of them restored at the same time; tokens grow, preemptions are bounded, everybody ends."""

    def talk(number: int) -> list[int]:
        rng = random.Random(number)
        history = random_ids(300, 700 + number)
        seen = []
        for turn in range(2):
            reply = server.complete(history, 10, session=f"p35-{number}")
            seen.append(int(reply["kvalet"]["preemptions"]))
            history = history + ids_of(reply) + random_ids(rng.randrange(20, 50), 31 * number + turn)
        return seen

    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        preemptions = [n for seen in pool.map(talk, range(8)) for n in seen]
    assert len(preemptions) == 16
    assert max(preemptions) <= 5
    assert server.metric("kvalet_restored_bytes_total") > 0
    assert server.request("/ready")[0] == 200
    assert time.monotonic() - began < 120
    idle(server)
