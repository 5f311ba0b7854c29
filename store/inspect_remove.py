"""Deleting planned files, one by one, under the store's lock. What cannot be deleted keeps its ancestors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvalet.store.faultwords import explain
from kvalet.store.fileio import DIRECTORY_FLAGS
from kvalet.store.inspect_gc import Cause, Removal
from kvalet.store.inspect_open import Finding, Place
from kvalet.store.inspect_walk import Tick


@dataclass(slots=True)
class Removed:
    """Files and bytes by cause; ``failed``: what could not be deleted and why; ``kept``: files that stayed because a file
    after them did."""

    files: dict[Cause, int] = field(default_factory=dict)
    n_bytes: dict[Cause, int] = field(default_factory=dict)
    failed: list[Finding] = field(default_factory=list)
    kept: int = 0

    def count(self, removal: Removal) -> None:
        self.files[removal.cause] = self.files.get(removal.cause, 0) + 1
        self.n_bytes[removal.cause] = self.n_bytes.get(removal.cause, 0) + removal.n_bytes


def remove(place: Place, removals: Iterable[Removal], removed: Removed, tick: Tick = lambda: None) -> Removed:
    """In the given order, which is deepest first. ``removed`` is kept up to date, so that it is right also after an
    interrupt. A file that is gone already counts as removed."""
    needed: set[bytes] = set()
    for removal in removals:
        if removal.key and removal.key in needed:
            removed.kept += 1
            needed.add(removal.parent)
        else:
            try:
                _unlink(place, removal)
                removed.count(removal)
            except FileNotFoundError:
                removed.count(removal)
            except OSError as error:
                removed.failed.append(Finding(removal.path, "io", explain(error)))
                needed.add(removal.parent)
        tick()
    return removed


def pretend(removals: Iterable[Removal]) -> Removed:
    """What ``remove`` would count if everything could be deleted."""
    removed = Removed()
    for removal in removals:
        removed.count(removal)
    return removed


def _unlink(place: Place, removal: Removal) -> None:
    folder_fd = place.folder_fds[removal.folder]
    if not removal.shard:
        place.io.unlink(removal.name, dir_fd=folder_fd)
        return
    fd = place.io.open(removal.shard, DIRECTORY_FLAGS, dir_fd=folder_fd)
    try:
        place.io.unlink(removal.name, dir_fd=fd)
    finally:
        place.close_quietly(fd)
