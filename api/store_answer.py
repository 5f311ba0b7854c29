"""What the commands of ``kvalet store`` share: their options, their exit statuses, and how an answer is shown."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvalet.api.sizes import size_text
from kvalet.store.inspect_open import Finding

GOOD, FOUND, REFUSED, INTERRUPTED = 0, 1, 2, 130
STATUSES = """exit status: 0 good; 1 damage found, nothing matched, or not all could be done; 2 wrong usage, or refused
(no store, another user's, a server has it open); 130 interrupted"""
MAX_SHOWN = 200
"""Characters of a name that are shown: names on disk and in records may be anything."""


class WrongUsage(Exception):
    """One sentence for the person who started the program."""


@dataclass(frozen=True, slots=True)
class Answer:
    """``data``: what --json prints, one object; ``lines``: the same for people."""

    status: int
    data: dict[str, Any]
    lines: Sequence[str]


def parser_of(command: str, description: str, environment: Mapping[str, str] = os.environ) -> argparse.ArgumentParser:
    """With --store and --json, which all commands have."""
    parser = argparse.ArgumentParser(
        f"kvalet store {command}",
        description=description,
        epilog=STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    default = environment.get("KVALET_STORE", "")
    parser.add_argument("--store", metavar="DIR", default=default, help="the store's folder, as for kvalet serve; KVALET_STORE")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """WrongUsage without a store; argparse ends the process itself for other wrong usage (status 2)."""
    asked = parser.parse_args(list(arguments))
    if not asked.store:
        raise WrongUsage("say which store: --store DIR, or KVALET_STORE in the environment")
    return asked


def reading(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """For argparse: a ValueError of ``parse`` says what is wrong."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def show(answer: Answer, *, as_json: bool) -> int:
    """Print it; its status, also when nobody reads to the end."""
    text = json.dumps(answer.data, sort_keys=True) if as_json else "\n".join(answer.lines)
    try:
        print(text, flush=True)
    except BrokenPipeError:
        quiet_output()
    return answer.status


def quiet_output() -> None:
    """Nobody reads standard output any more: the interpreter's last flush must not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def shown(text: str) -> str:
    """A name as one harmless piece of a line: bytes that are no text, control and other unprintable characters are escaped,
    and the middle of a long one is left out."""
    safe = "".join(c if c.isprintable() and c != "\\" else _escaped(c) for c in text)
    return safe if len(safe) <= MAX_SHOWN else f"{safe[: MAX_SHOWN // 2]}...{safe[-MAX_SHOWN // 2 :]}"


def _escaped(c: str) -> str:
    is_byte = "\udc80" <= c <= "\udcff"  # how Python holds a byte of a name that is no UTF-8
    return f"\\x{ord(c) - 0xDC00:02x}" if is_byte else c.encode("unicode_escape").decode()


def when(ns: int) -> str:
    """UTC, to the second; "-" for times outside the calendar."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(ns / 1e9)) if ns > 0 else "-"
    except (OverflowError, ValueError, OSError):
        return "-"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns padded to their widest cell; the last one is not padded."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def finding_data(finding: Finding) -> dict[str, str]:
    return {"path": shown(finding.path), "reason": finding.reason, "field": finding.field}


def finding_line(finding: Finding) -> str:
    return f"{shown(finding.path)}: {finding.reason} ({finding.field})"


def files_text(files: int, n_bytes: int) -> str:
    return f"{files} file{'' if files == 1 else 's'}, {size_text(n_bytes)}"
