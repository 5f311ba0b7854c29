"""What stands in a store directory, by names and stat alone: no file is opened.

Everything is listed relative to directory descriptors and no link is followed, so nothing outside the directory is seen.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvalet.store import layout
from kvalet.store.faultwords import STRANGE, explain
from kvalet.store.fileio import DIRECTORY_FLAGS, FileStat
from kvalet.store.inspect_open import PRIVATE, Finding, Place
from kvalet.store.janitor import round_block
from kvalet.store.layout import FileName

_SHARDS = frozenset(layout.SHARDS)
Tick = Callable[[], None]
"""Called after each step of something long, for a progress bar."""


class Found(NamedTuple):
    """A file of ours, by its name. ``file.shard`` is where it stands."""

    file: FileName
    st: FileStat

    @property
    def path(self) -> str:
        return f"{self.file.folder}/{self.file.shard}/{self.file.name}"

    @property
    def n_bytes(self) -> int:
        """As the server's ledger counts it."""
        return round_block(self.st.size)

    @property
    def tag(self) -> str:
        """Tenant tag, from the name; "" where names have none."""
        last = self.file.name.rpartition(".")[2]
        return last if len(last) == 8 else ""


class Loose(NamedTuple):
    """A file of ours in tmp/ or bad/."""

    folder: str
    name: str
    n_bytes: int


@dataclass(slots=True)
class Listing:
    """``files``: what a server would take for its own, in the order of the names. ``loose``: files of ours in tmp/ and bad/.
    ``findings``: everything else, and what is not as it should be."""

    files: list[Found] = field(default_factory=list)
    loose: list[Loose] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def bytes_in(self, folder: str) -> int:
        return sum(one.n_bytes for one in self.loose if one.folder == folder)


def list_store(place: Place, tick: Tick = lambda: None) -> Listing:
    """``tick`` is called once per shard of each folder, 256 times for each of ``layout.SHARDED``. Files that appear or vanish
    meanwhile may or may not be in it. What cannot be listed becomes a finding ("io")."""
    listing = Listing(findings=list(place.findings))
    seen: set[bytes] = set()
    for folder in layout.SHARDED:
        shards = _shards(place, folder, listing) if folder in place.folder_fds else set()
        for shard in layout.SHARDS:
            if shard in shards:
                for name, st in _scan(place, folder, shard, listing):
                    _take_in(place, listing, seen, folder, shard, name, st)
            tick()
    for folder in (layout.TMP, layout.BAD):
        if folder in place.folder_fds:
            _list_loose(place, listing, folder)
    return listing


def _shards(place: Place, folder: str, listing: Listing) -> set[str]:
    found = set()
    try:
        names = sorted(place.io.scan(place.folder_fds[folder]))
    except OSError as error:
        listing.findings.append(Finding(folder, "io", explain(error)))
        return set()
    for name, st in names:
        path = f"{folder}/{name}"
        if name not in _SHARDS:
            listing.findings.append(Finding(path, "foreign", "name"))
        elif not stat.S_ISDIR(st.mode):
            listing.findings.append(Finding(path, "foreign", "not a directory"))
        else:
            found.add(name)
            _look_at_mode(listing, path, st)
    return found


def _scan(place: Place, folder: str, shard: str, listing: Listing) -> Iterator[tuple[str, FileStat]]:
    try:
        fd = place.io.open(shard, DIRECTORY_FLAGS, dir_fd=place.folder_fds[folder])
        try:
            yield from sorted(place.io.scan(fd))
        finally:
            place.close_quietly(fd)
    except FileNotFoundError:
        return
    except OSError as error:
        reason = "foreign" if error.errno in STRANGE else "io"
        listing.findings.append(Finding(f"{folder}/{shard}", reason, explain(error)))


def _take_in(place: Place, listing: Listing, seen: set[bytes], folder: str, shard: str, name: str, st: FileStat) -> None:
    path = f"{folder}/{shard}/{name}"
    file = layout.parse_name(folder, shard, name)
    if file is None:
        misplaced = layout.parse_name(folder, name[:2], name)
        listing.findings.append(Finding(path, "key", "shard") if misplaced else Finding(path, "foreign", "name"))
        return
    strange = strangeness(st, place.owner)
    if strange:
        listing.findings.append(Finding(path, "foreign", strange))
        return
    if st.nlink == 0:  # unlinked between the listing and the stat
        return
    identifier = folder[:1].encode() + file.index_key
    if identifier in seen and folder != layout.RECORDS:  # a record that changes its name is there twice for a moment
        listing.findings.append(Finding(path, "foreign", "a second file of this key"))
        return
    seen.add(identifier)
    _look_at_mode(listing, path, st)
    listing.files.append(Found(file, st))


def names_in(place: Place, folder: str, shard: str) -> set[str]:
    """Names of what may be files of ours in one shard, as they are now; none where it cannot be listed."""
    try:
        fd = place.io.open(shard, DIRECTORY_FLAGS, dir_fd=place.folder_fds[folder])
        try:
            return {name for name, st in place.io.scan(fd) if not strangeness(st, place.owner)}
        finally:
            place.close_quietly(fd)
    except (OSError, KeyError):
        return set()


def strangeness(st: FileStat, owner: int) -> str:
    """Why what stands under a name of ours is not a file that we wrote; "" if it may be. Such things are never touched."""
    if not stat.S_ISREG(st.mode):
        return "not a regular file"
    if st.nlink > 1:
        return "hard link"
    return "" if st.uid == owner else "owner"


def _list_loose(place: Place, listing: Listing, folder: str) -> None:
    is_ours = layout.is_tmp_name if folder == layout.TMP else layout.is_bad_name
    try:
        names = sorted(place.io.scan(place.folder_fds[folder]))
    except OSError as error:
        listing.findings.append(Finding(folder, "io", explain(error)))
        return
    for name, st in names:
        if is_ours(name) and not strangeness(st, place.owner):
            listing.loose.append(Loose(folder, name, round_block(st.size)))
        else:
            listing.findings.append(Finding(f"{folder}/{name}", "foreign", "name" if not is_ours(name) else "not ours"))


def _look_at_mode(listing: Listing, path: str, st: FileStat) -> None:
    if st.mode & PRIVATE:
        listing.findings.append(Finding(path, "mode", f"{stat.S_IMODE(st.mode):04o}"))
