"""Python's cycle collector, kept off the event loop's back.

A full collection walks every tracked object. The index of the scheduler holds one per page, so with many parked sessions it
takes 100 ms and more, on whatever thread allocates at that moment: mostly that of the loop. The index keeps no cycles once an
entry is removed, so full collections find next to nothing.
"""

from __future__ import annotations

import gc

RARELY = 1_000
"""Collections of the middle generation between two full ones (the default is 10)."""


def calm() -> None:
    """Collect once, exempt what start-up has made, and make full collections rare. For a process that serves; once, when it is
    ready. Young garbage is collected as before."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, RARELY)
