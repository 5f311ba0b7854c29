"""A process that uses a store and is killed for it: ``python killchild.py DIRECTORY write|evict|damage|open``.

Prints one line per acknowledged chunk ("ack <hex key>"), flushed before it goes on, and "end" last.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from storekit import FILE_BYTES, Rig


def say(line: str) -> None:
    os.write(1, line.encode() + b"\n")


def main(directory: Path, mode: str) -> None:
    cap = 6 * FILE_BYTES if mode == "evict" else 1 << 24
    with Rig(directory, cap_bytes=cap, writers=2, committers=1, readers=1, touch_every_s=0.0, free_every_s=1000.0) as rig:
        if mode in ("write", "evict"):
            batches = [rig.chain(2, tail=5), rig.chain(1, seed=1)]
            batches += [rig.chain(3, seed=2)] if mode == "evict" else []
            for metas in batches:
                keys = {rig.submit_write(meta): meta.key for meta in metas}
                for _ in metas:
                    outcome = rig.settle()
                    if not outcome.reason:
                        say(f"ack {keys[outcome.job].hex()}")
                rig.store.touch([meta.key for meta in metas])
        elif mode == "damage":
            meta = rig.chain(2)[1]
            path = rig.path(meta)
            path.write_bytes(path.read_bytes()[:-1] + b"?")
            rig.read(meta)
    say("end")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
