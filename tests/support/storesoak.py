"""A long life on a bad disk: ``python tests/support/storesoak.py --minutes 10``; 5 % of all system calls fail, in every way.

One directory. Sessions are spilled, restored, touched, pinned, evicted and recorded at random; every few seconds the store
ends, cleanly or by kill -9 (then it lived in a child process), and is opened again. Payloads and records are functions of
the key, so whatever is served can be checked. It must end with nothing wrong served, no defect counted, ledger equal to the
disk, and descriptors, threads and memory as they were.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # for PYTHONSAFEPATH=1

from kvalet.store import chores
from kvalet.store.faults import RandomFaults
from kvalet.store.ids import ChunkMeta
from kvalet.store.jobs import ReadResult, RecordResult, WriteResult
from recordkit import RecordRig, record_of
from storekit import BLOCK_BYTES, CHUNK_TOKENS, FILE_BYTES, STRIDE, WAIT_S, payload, slot

SESSIONS, CHUNKS, TAIL = 24, 6, 5
CAP_FILES = 120
"""Less than all sessions' files: eviction always goes on."""
IN_FLIGHT = 12
RATE = 0.05
LONG_LIVED_MB = 24.0
"""What memory may grow by between the first and the last third of the lives: allocators breathe."""
FAULTY = {"probe_every_s": 0.02, "breaker_window_s": 0.2, "breaker_open_s": 0.05, "yield_s": 0.002, "queue_deadline_s": 5.0}


@dataclass
class Tally:
    """Sums over all lives. ``wrong`` and ``internal`` must stay 0."""

    lives: int = 0
    kills: int = 0
    wrong: int = 0
    internal: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    evicted: int = 0
    fds: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)

    def line(self) -> str:
        good = {name: self.outcomes[f"{name} ok"] for name in ("read", "write", "tail", "record", "recall")}
        refused = sum(n for name, n in self.outcomes.items() if not name.endswith(" ok"))
        return (
            f"{self.lives} lives, {self.kills} killed, good {good}, refused {refused}, evicted {self.evicted}, faults "
            f"{sum(self.struck.values())}, wrong {self.wrong}, internal {self.internal}, fds {self.fds[-1:]}, "
            f"memory {self.memory_mb[-1:]} MB"
        )


class Life:
    """One opening of the store and what is done with it until ``until``."""

    def __init__(self, directory: Path, seed: int, tally: Tally, rate: float = RATE) -> None:
        self.rng = random.Random(seed)
        self.tally = tally
        self.io = RandomFaults(rate, seed)
        chores.IDLE_S = 0.01  # of the janitor: probes come soon
        self.rig = RecordRig(directory, io=self.io, cap_bytes=CAP_FILES * FILE_BYTES, **FAULTY)
        chains = [self.rig.chain(CHUNKS, seed=s) for s in range(SESSIONS)]
        self.chains = [[*c, *self.rig.chain(0, after=c, seed=s, tail=TAIL)] for s, c in enumerate(chains)]
        self.slots = [slot() for _ in range(IN_FLIGHT)]
        self.running: dict[int, tuple[str, Any, memoryview]] = {}
        self.pinned: list[list[Any]] = []

    def run(self, until: float) -> None:
        self.io.arm()
        state = self.rig.store._state
        while time.monotonic() < until:
            for _ in range(self.rng.randrange(1, IN_FLIGHT)):
                self.step()
            while len(self.running) > IN_FLIGHT // 3:
                self.settle()
            with state.lock:  # a tier that is read-only is no use to a soak: wait for its probe
                state.quiet.wait_for(lambda: not state.write_breaker.is_open, 0.2)
        while self.running:
            self.settle()

    def step(self) -> None:
        session = self.rng.randrange(SESSIONS)
        metas = self.chains[session]
        store = self.rig.store
        here = sum(1 for _ in itertools.takewhile(lambda meta: store.has(meta.key), metas))
        choice = self.rng.random()
        if choice < 0.4:
            for meta in metas[here : here + self.rng.randrange(1, 4)]:
                self.start("write", meta, session)
        elif choice < 0.75:
            for meta in metas[:here]:
                self.start("read", meta, session)
        elif choice < 0.8:
            self.start("tail", metas[-1], session)
        elif choice < 0.88:
            self.start("record", metas[:here] or metas[:1], session)
        elif choice < 0.95:
            self.start("recall", metas, session)
        elif choice < 0.97:
            self.pin(metas)
        elif choice < 0.985:
            store.touch([meta.key for meta in metas[:here]])
        elif choice < 0.995 and self.running:
            store.cancel(self.rng.choice(list(self.running)))
        else:
            store.drop_record("a tenant", str(session), "00112233445566aa")

    def pin(self, metas: Sequence[ChunkMeta]) -> None:
        """A few chains at a time, so that there is always something to evict."""
        self.pinned.append([meta.key for meta in metas])
        self.rig.store.pin(self.pinned[-1])
        if len(self.pinned) > 3:
            self.rig.store.unpin(self.pinned.pop(0))

    def start(self, kind: str, what: Any, session: int) -> None:
        if len(self.running) >= IN_FLIGHT:
            self.settle()
        view = self.slots.pop()
        rig, job = self.rig, next(self.rig.jobs)
        self.running[job] = (kind, what, view)
        done, klass = rig.done.put, self.rng.randrange(3)
        if kind == "write":
            view[BLOCK_BYTES : BLOCK_BYTES + what.n_pages * STRIDE] = payload(what)
            rig.store.write(job, what, view, done, klass=klass)
        elif kind == "read":
            rig.store.read(job, what, view, done, session=str(session), klass=klass)
        elif kind == "tail":
            found = rig.store.tails(what.parent)[:4]
            first = what.ordinal * CHUNK_TOKENS
            rig.store.read_tail(
                job, what.parent, what.ordinal, first, what.ids, found, view, done,
                session=str(session), klass=klass, secret=rig.secret,
            )  # fmt: skip
        elif kind == "record":
            rig.store.write_record(job, record_of(what, session=str(session)), done, klass=klass)
        else:
            rig.store.read_record(job, "a tenant", str(session), "00112233445566aa", done)

    def settle(self) -> None:
        result: ReadResult | WriteResult | RecordResult = self.rig.settle()
        kind, what, view = self.running.pop(result.job)
        self.tally.outcomes[f"{kind} {result.reason or 'ok'}"] += 1
        if not result.reason and not self.right(kind, what, view, result):
            self.tally.wrong += 1
        self.slots.append(view)

    def right(self, kind: str, what: Any, view: memoryview, result: Any) -> bool:
        if kind in ("read", "tail"):
            return result.key == what.key and bytes(view[BLOCK_BYTES : BLOCK_BYTES + what.n_pages * STRIDE]) == payload(what)
        if kind == "recall":
            record = result.record
            n = len(record.keys)
            return bool(record.ids == record_of(what[:n]).ids and record.keys == tuple(meta.key for meta in what[:n]))
        return True

    def end(self) -> None:
        """The disk is well again; everything must come to rest, the books must add up."""
        self.io.disarm()
        for keys in self.pinned:
            self.rig.store.unpin(keys)
        self.rig.store.close(WAIT_S)
        state, statistics = self.rig.store._state, self.rig.store.statistics()
        state.books.check()
        left = (statistics.reserved_bytes, statistics.dying_bytes, statistics.unsettled, statistics.writes_in_flight)
        assert left == (0, 0, 0, 0), left
        assert not [thread.name for thread in self.rig.store._threads if thread.is_alive()]
        assert statistics.used_bytes <= statistics.cap_bytes + statistics.stranded_bytes
        self.tally.internal += statistics.internal
        self.tally.evicted += statistics.evicted_files
        self.tally.struck.update(f"{op} {kind}" for (op, kind), n in self.io.struck.items() for _ in range(n))


def examine(directory: Path, tally: Tally) -> None:
    """A clean opening: nothing is left in tmp/, the ledger is the disk byte for byte, whatever is served is right."""
    life = Life(directory, 0, tally, rate=0.0)
    life.rig.quiet()  # what opening itself deletes (older files of records) is gone first
    for metas in life.chains:
        for meta in metas:
            if life.rig.store.has(meta.key):
                life.start("tail" if meta.tail else "read", meta, 0)
    while life.running:
        life.settle()
    life.rig.quiet()
    life.end()


def one_life(directory: Path, seed: int, seconds: float, tally: Tally) -> None:
    life = Life(directory, seed, tally)
    try:
        life.run(time.monotonic() + seconds)
    finally:
        life.end()
    del life
    gc.collect()
    tally.fds.append(len(os.listdir("/proc/self/fd")))
    tally.threads.append(threading.active_count())
    tally.memory_mb.append(memory_mb())


def killed_life(directory: Path, seed: int, seconds: float, tally: Tally) -> None:
    """In a child, ended by kill -9 after about ``seconds``."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", str(directory), "--seed", str(seed)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"open\n"
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
        assert child.wait(WAIT_S) == -signal.SIGKILL, "the child ended by itself"
    tally.kills += 1


def memory_mb() -> float:
    with open("/proc/self/statm", encoding="ascii") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def soak(directory: Path, seed: int, seconds: float, life_s: float, say: Any) -> Tally:
    """Lives of about ``life_s`` until ``seconds`` are over; every third one is killed; after each the disk is examined."""
    tally, rng = Tally(), random.Random(seed)
    end, told = time.monotonic() + seconds, time.monotonic()
    while time.monotonic() < end or tally.lives < 3:
        live = killed_life if tally.lives % 3 == 2 else one_life
        live(directory, rng.randrange(1 << 30), life_s * rng.uniform(0.5, 1.5), tally)
        tally.lives += 1
        examine(directory, tally)
        if time.monotonic() - told >= 10.0 or time.monotonic() >= end:
            told = time.monotonic()
            say(tally.line())
    return tally


def growth(seen: Sequence[float]) -> float:
    """From the first third (without the very first) to the last, each at its lowest: bursts are no leak."""
    third = max(len(seen) // 3, 1)
    return min(seen[-third:]) - min(seen[1 : 1 + third]) if len(seen) > 1 else 0.0


def verdict(tally: Tally) -> list[str]:
    """What is not as it must be; [] is good."""
    faults = [f"{name}: {n}" for name, n in (("wrong", tally.wrong), ("internal", tally.internal)) if n]
    for name, seen, may in (("fds", tally.fds, 0), ("threads", tally.threads, 0), ("memory", tally.memory_mb, LONG_LIVED_MB)):
        if growth(seen) > may:
            faults.append(f"{name} grew by {growth(seen):.0f}: {seen}")
    faults += [
        f"no {name}" for name in ("read ok", "write ok", "tail ok", "record ok", "recall ok") if not tally.outcomes[name]
    ]
    return faults + ([] if tally.struck else ["no fault fired"]) + ([] if tally.evicted else ["nothing was evicted"])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--dir", default=None, help="default: a new temporary directory")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if args.seed is None else args.seed
    if args.child:
        life = Life(Path(args.child), seed, Tally())
        os.write(1, b"open\n")
        life.run(time.monotonic() + 600.0)
        return 1
    logging.disable(logging.CRITICAL)  # every fault is logged, and there are thousands
    with tempfile.TemporaryDirectory(dir=args.dir) as home:
        print(f"seed {seed}", flush=True)
        tally = soak(Path(home) / "store", seed, args.minutes * 60, 3.0, lambda line: print(line, flush=True))
    print(f"faults: {dict(tally.struck.most_common())}")
    print(f"outcomes: {dict(tally.outcomes.most_common())}")
    print(f"memory MB: first {tally.memory_mb[:3]}, last {tally.memory_mb[-3:]}; fds {sorted(set(tally.fds))}")
    faults = verdict(tally)
    print("\n".join(faults) if faults else "soak: good")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
