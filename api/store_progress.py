"""A progress bar on standard error for what may take long; nothing at all where that is no terminal."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvalet.store.inspect_walk import Tick


@contextmanager
def progress(what: str, total: int) -> Iterator[Tick]:
    """The given function moves the bar by one of ``total``; any thread may call it. The bar goes when the work is over."""
    if not sys.stderr.isatty() or total < 1 or importlib.util.find_spec("rich") is None:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
