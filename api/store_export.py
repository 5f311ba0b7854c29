"""``kvalet store export``: one session into a tar file. Changes nothing in the store and runs beside a server."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

from kvalet.api.store_answer import (
    FOUND,
    GOOD,
    Answer,
    WrongUsage,
    files_text,
    finding_data,
    finding_line,
    parsed,
    parser_of,
    quiet_output,
    show,
    shown,
)
from kvalet.api.store_progress import progress
from kvalet.api.store_session import find_session, no_session
from kvalet.store.errors import StoreRefused
from kvalet.store.faultwords import explain
from kvalet.store.inspect_export import Changed, Exported, export, named_files
from kvalet.store.inspect_open import Finding, Place, open_to_look
from kvalet.store.inspect_walk import list_store

EXPORT = """Copy a session into a plain tar: its records (as JSON too, under records/), its chunks and tails, and MANIFEST.json,
the last member, with a SHA-256 of every member and what is missing. The same session in the same state gives the same
bytes. Every file is verified first; one that is refused, or evicted meanwhile, is left out, named, and the status is 1."""
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def command(arguments: Sequence[str]) -> int:
    parser = parser_of("export", EXPORT)
    parser.add_argument("session", metavar="SESSION", help="its name, as in X-Session-ID")
    parser.add_argument("--tenant", metavar="NAME", default="", help="whose session; none = of a server without API keys")
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="must not exist yet; - is standard output")
    asked = parsed(parser, arguments)
    to_stdout = asked.output == "-"
    if to_stdout and asked.json:
        raise WrongUsage("--json needs standard output for itself: give -o a file")
    if to_stdout and sys.stdout.isatty():
        raise WrongUsage("a tar is nothing for a terminal: give -o a file, or redirect")
    with open_to_look(asked.store) as place:
        listing = list_store(place)
        session = find_session(place, listing, asked.tenant, asked.session)
        if not session.own:
            return tell(no_session(place, session), to_stdout, as_json=asked.json)
        files, lost = named_files(session.own, listing.files)
        missing = [Finding(path, "missing", "no such file") for path in lost]
        missing += [Finding(verdict.found.path, verdict.reason, verdict.field) for verdict in session.refused]
        try:
            with output(place, asked.output) as out, progress("exporting", len(files)) as tick:
                done = export(place, session.own, files, out, tick, missing=missing)
        except Changed as error:
            raise StoreRefused(
                f"The file {shown(str(error))} changed, or could not be read, while it was copied; nothing was kept."
            ) from error
        except BrokenPipeError:
            quiet_output()
            return FOUND
        except OSError as error:
            raise StoreRefused(f"The output {shown(asked.output)} cannot be written: {explain(error)}.") from error
        answer = export_answer(place, asked.output, done)
    return tell(answer, to_stdout, as_json=asked.json)


def tell(answer: Answer, to_stdout: bool, *, as_json: bool) -> int:
    """On standard error where standard output is the tar's."""
    if not to_stdout:
        return show(answer, as_json=as_json)
    print("\n".join(answer.lines), file=sys.stderr)
    return answer.status


@contextmanager
def output(place: Place, name: str) -> Iterator[BinaryIO]:
    """A new file, removed again if what is inside the block fails; or standard output. StoreRefused if it cannot be made."""
    if name == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if lies_in(place, os.path.dirname(os.path.abspath(name))):
        raise StoreRefused(f"The output {shown(name)} would lie in the store itself.")
    try:
        fd = os.open(name, CREATE, 0o600)
    except FileExistsError:
        raise StoreRefused(f"The output {shown(name)} is there already.") from None
    except (OSError, ValueError) as error:
        raise StoreRefused(f"The output {shown(name)} cannot be made: {explain(error)}.") from error
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
    except BaseException:
        os.unlink(name)
        raise


def lies_in(place: Place, folder: str) -> bool:
    """Is ``folder`` the store or below it? By inode, so whatever the path is called."""
    root = os.fstat(place.root_fd)
    while True:
        try:
            st = os.stat(folder)
        except (OSError, ValueError):
            return False
        if (st.st_dev, st.st_ino) == (root.st_dev, root.st_ino):
            return True
        folder, last = os.path.dirname(os.path.realpath(folder)), folder
        if folder == last:
            return False


def export_answer(place: Place, name: str, done: Exported) -> Answer:
    data = {
        "store": shown(place.path),
        "output": name,
        "members": len(done.members),
        "bytes": done.n_bytes,
        "missing": [finding_data(finding) for finding in done.missing],
    }
    lines = [f"not exported: {finding_line(finding)}" for finding in done.missing]
    lines.append(f"exported {files_text(len(done.members), done.n_bytes)} to {shown(name)}")
    return Answer(FOUND if done.missing else GOOD, data, lines)
