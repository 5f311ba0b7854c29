"""``kvalet store COMMAND``: looking after a store. Starts fast and needs no torch: each command is imported when asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import cast

from kvalet.api.store_answer import GOOD, INTERRUPTED, REFUSED, STATUSES, WrongUsage
from kvalet.store.errors import StoreError
from kvalet.store.faultwords import explain

COMMANDS = {
    "ls": ("kvalet.api.store_look:ls", "what is in it: bytes by tenant and kind, sessions"),
    "check": ("kvalet.api.store_look:check", "verify it, also beside a running server; changes nothing"),
    "gc": ("kvalet.api.store_change:gc", "delete what is of no use, or down to a size"),
    "rm": ("kvalet.api.store_session:rm", "delete a session"),
    "export": ("kvalet.api.store_export:command", "copy a session into a tar file"),
    "bench": ("kvalet.store.bench:main", "its speed beside the raw disk's, in one run (--dir instead of --store)"),
}
"""Name -> (module:function taking the arguments and returning the exit status, one line of help)."""


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: kvalet store COMMAND --store DIR [--json] ...",
            "",
            "Looking after a store.",
            "",
            "commands:",
            *lines,
            "",
            STATUSES,
            "",
            "'kvalet store COMMAND --help' says more.",
        ]
    )


def main(arguments: Sequence[str]) -> int:
    """The exit status, see STATUSES."""
    words = list(arguments)
    if words and words[0] in ("--help", "-h", "help"):
        print(usage())
        raise SystemExit(GOOD)  # as argparse does for the commands
    if not words or words[0] not in COMMANDS:
        print(usage(), file=sys.stderr)
        if words:
            print(f"\nkvalet store: there is no command {words[0]!r}", file=sys.stderr)
        return REFUSED
    module, _, name = COMMANDS[words[0]][0].partition(":")
    try:
        command = cast(Callable[[Sequence[str]], int], getattr(importlib.import_module(module), name))
        return command(words[1:])
    except (StoreError, WrongUsage) as error:
        print(f"kvalet store {words[0]}: {error}", file=sys.stderr)
        return REFUSED
    except OSError as error:  # the last resort: what nothing more special has put into words
        print(f"kvalet store {words[0]}: the system refused: {explain(error)}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print(f"kvalet store {words[0]}: interrupted", file=sys.stderr)
        return INTERRUPTED
