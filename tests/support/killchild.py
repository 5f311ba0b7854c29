"""A process that uses a store and is killed for it: ``python killchild.py DIRECTORY MODE``.

MODE: write, evict, damage, open, record; and two mutants: "hasty" acknowledges before anything is written, "orphans" publishes
the last child first. Prints one line per acknowledged chunk ("ack <hex key>") or record ("rec <chunks>"), flushed before it
goes on, and "end" last.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from damagekit import flip
from kvalet.store.writeboard import Stage, Write, WriteBoard
from recordkit import RecordRig, record_of
from storekit import FILE_BYTES


def say(line: str) -> None:
    os.write(1, line.encode() + b"\n")


def publish_backwards() -> None:
    """The mutant protocol: a write counts as ready although its parent is not durable, and the deepest goes first."""

    def take_ready(board: WriteBoard) -> list[Write]:
        written = [write for write in board.writes() if write.stage is Stage.WRITTEN]
        if any(write.stage in (Stage.QUEUED, Stage.WRITING) for write in board.writes()) or not written:
            return []
        deepest = max(written, key=lambda write: write.meta.ordinal)
        board._to(deepest, Stage.PUBLISHING)
        return [deepest]

    WriteBoard.take_ready = take_ready  # type: ignore[method-assign]
    WriteBoard.has_ready = lambda board: True  # type: ignore[method-assign]
    WriteBoard._parent_durable = lambda board, write: True  # type: ignore[method-assign]


def main(directory: Path, mode: str) -> None:
    cap = 6 * FILE_BYTES if mode == "evict" else 1 << 24
    with RecordRig(directory, cap_bytes=cap, writers=2, committers=1, readers=1, touch_every_s=0.0, free_every_s=1000.0) as rig:
        if mode == "orphans":
            publish_backwards()
        if mode in ("write", "evict", "hasty", "orphans"):
            batches = [rig.chain(2, tail=5), rig.chain(1, seed=1)]
            batches += [rig.chain(3, seed=2)] if mode == "evict" else []
            for metas in batches:
                keys = {rig.submit_write(meta): meta.key for meta in metas}
                for key in keys.values() if mode == "hasty" else ():
                    say(f"ack {key.hex()}")
                for _ in metas:
                    outcome = rig.settle()
                    if not outcome.reason:
                        say(f"ack {keys[outcome.job].hex()}")
                rig.store.touch([meta.key for meta in metas])
        elif mode == "record":
            for n_chunks in (1, 2):  # the second replaces the first
                metas = rig.chain(n_chunks, tail=5)
                rig.write(metas)
                if rig.put(record_of(metas)) == "":
                    say(f"rec {n_chunks}")
        elif mode == "damage":
            meta = rig.chain(2)[1]
            path = rig.path(meta)
            flip(path, FILE_BYTES - 1)
            rig.read(meta)
    say("end")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
