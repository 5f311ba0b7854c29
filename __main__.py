"""The command line: ``kvalet COMMAND ...``. Each command is imported only when it is asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import cast

COMMANDS = {
    "serve": ("kvalet.api.serve_command:main", "serve a model over HTTP"),
    "chat": ("kvalet.api.chat_command:main", "talk to a running server"),
    "pull": ("kvalet.api.pull_command:main", "fetch a model from the Hugging Face hub"),
    "doctor": ("kvalet.api.doctor:main", "what was found on this machine, and what is wrong"),
    "store": ("kvalet.api.store_command:main", "look after a store: ls, check, gc, rm, export, bench"),
    "demo": ("kvalet.api.demo:main", "many agents on one small machine, spilled and restored"),
}
"""Name -> (module:function taking the arguments and returning the exit status, one line of help)."""

USAGE_STATUS = 2


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: kvalet [--version] [--help] COMMAND ...",
            "",
            "Many agent sessions on one device, idle ones spilled to RAM and disk.",
            "",
            "commands:",
            *lines,
            "",
            "'kvalet COMMAND --help' says more.",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 done, 1 found something wrong (doctor), 2 asked for something that cannot be, 70 device lost."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in ("--version", "-V"):
        from kvalet import __version__

        print(f"kvalet {__version__}")
        return 0
    if words and words[0] in ("--help", "-h", "help"):
        print(usage())
        return 0
    if not words or words[0] not in COMMANDS:
        print(usage(), file=sys.stderr)
        if words:
            print(f"\nkvalet: there is no command {words[0]!r}", file=sys.stderr)
        return USAGE_STATUS
    module, _, name = COMMANDS[words[0]][0].partition(":")
    command = cast(Callable[[Sequence[str]], int], getattr(importlib.import_module(module), name))
    return command(words[1:])


if __name__ == "__main__":
    sys.exit(main())
