"""Threads and the team of workers that torch's products run on.

libgomp, which torch uses on Linux, gives each thread that starts a parallel region workers of its own, and counts them all.
Once there are more than processors, every barrier goes to sleep at once instead of waiting a moment, and a decode step, with
a barrier per product, takes nearly twice as long (27 ms instead of 15 on two processors). A thread that ends gives its
workers back. So what is computed before the engine thread runs is computed on a thread that ends.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def on_ending_thread(work: Callable[[], T]) -> T:
    """``work()`` on a thread that has ended when this returns; raises what ``work`` raises. Blocks the caller meanwhile."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvalet-prepare") as pool:
        return pool.submit(work).result()
