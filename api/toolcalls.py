"""Generated text -> content and tool calls, piece by piece, the same whatever the cuts.

The parser reads the format of tool_format.py (and its Hermes relatives with other white space). What it emits, joined, depends
on the whole text only, never on where it was cut: marker beginnings are held until they are decided, arguments are passed on
verbatim, and the end of a call is found by reading JSON, so a marker inside an argument string is only text. Pure.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection
from enum import Enum, auto

from kvalet.api.json_text import parse_json
from kvalet.api.requests import Delta, TextDelta, ToolCall, ToolCallDelta
from kvalet.api.tool_format import CALL_CLOSE, CALL_OPEN

MAX_HEADER_CHARS = 1024
"""Between the opening marker and the arguments. More is not a call."""

_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\S)')
_WHITE = " \t\r\n"


def new_call_id() -> str:
    """Unguessable: it names the call's text in the engine's memory."""
    return f"call_{secrets.token_hex(12)}"


class _State(Enum):
    TEXT = auto()
    BETWEEN = auto()
    """After a call: white space up to the next one is not content."""
    HEADER = auto()
    ARGUMENTS = auto()
    CLOSE = auto()


class CallParser:
    """``constrained``: a grammar made the text, so what follows a marker is a call and its arguments are passed on as they
    come. Otherwise a call is held until it is complete and known to be well-formed (a name in ``names``, arguments a JSON
    object); if it is not, it comes out as the text that it was.

    ``unfinished``: after ``finish``, the text ended inside a call. ``calls`` and ``text`` are always the joined deltas.
    """

    def __init__(
        self, *, constrained: bool = True, names: Collection[str] = (), make_id: Callable[[], str] = new_call_id
    ) -> None:
        self._constrained = constrained
        self._names = names
        self._make_id = make_id
        self._state = _State.TEXT
        self._buffer = ""
        """Text not yet decided: the beginning of a marker, a header, what follows the arguments."""
        self._white = ""
        """White space that is either inside the arguments or after them."""
        self._raw: list[str] = []
        """Everything since the opening marker of an unproven call."""
        self._arguments: list[str] = []
        self._name = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._calls: list[ToolCall] = []
        self._open_call: ToolCall | None = None
        self._text: list[str] = []
        self.unfinished = False

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls so far, the unfinished one last."""
        return tuple(self._calls) if self._open_call is None else (*self._calls, self._grown(self._open_call))

    @property
    def text(self) -> str:
        return "".join(self._text)

    def feed(self, text: str) -> list[Delta]:
        """What became certain by ``text``."""
        out: list[Delta] = []
        while text:
            text = _STEPS[self._state](self, text, out)
        return out

    def finish(self, *, truncated: bool) -> list[Delta]:
        """No more text comes. ``truncated``: it was cut off by a limit, so the beginning of a marker at the end was to become
        one and is not content. Call once."""
        out: list[Delta] = []
        while self._in_call() and not self._constrained and not truncated:
            out += self.feed(self._not_a_call(out))
        if self._in_call():
            self.unfinished = True
            if not self._constrained and self._state is not _State.HEADER:
                self._start_call(out)
        elif not truncated and (self._state is _State.TEXT or self._buffer.strip(_WHITE)):
            self._emit_text(self._buffer, out)
        self._buffer = ""
        return out

    def _in_call(self) -> bool:
        return self._state in (_State.HEADER, _State.ARGUMENTS, _State.CLOSE)

    # One step per state: takes the text, emits what is certain, returns what is left to read in the next state.

    def _read_text(self, text: str, out: list[Delta]) -> str:
        text = self._buffer + text
        self._buffer = ""
        start = text.find(CALL_OPEN)
        if start >= 0:
            self._emit_text(text[:start], out)
            self._enter_call()
            return text[start + len(CALL_OPEN) :]
        held = _held_suffix(text, CALL_OPEN)
        self._emit_text(text[: len(text) - held], out)
        self._buffer = text[len(text) - held :]
        return ""

    def _read_between(self, text: str, out: list[Delta]) -> str:
        text = self._buffer + text
        self._buffer = ""
        stripped = text.lstrip(_WHITE)
        if stripped.startswith(CALL_OPEN):
            self._enter_call()
            return stripped[len(CALL_OPEN) :]
        if CALL_OPEN.startswith(stripped):
            self._buffer = text
            return ""
        self._state = _State.TEXT
        return text

    def _enter_call(self) -> None:
        self._state = _State.HEADER
        self._raw = [CALL_OPEN]
        self._arguments, self._white = [], ""
        self._depth, self._in_string, self._escaped = 0, False, False

    def _read_header(self, text: str, out: list[Delta]) -> str:
        self._buffer += text
        match = _HEADER.match(self._buffer)
        if match is None and len(self._buffer) <= MAX_HEADER_CHARS:
            return ""
        if match is None or match.end() > MAX_HEADER_CHARS:
            return self._not_a_call(out)
        header, rest = self._buffer[: match.end()], self._buffer[match.end() :]
        self._buffer = ""
        self._raw.append(header)
        self._name = json.loads(match[1], strict=False)
        self._state = _State.ARGUMENTS
        if self._constrained:
            self._start_call(out)
        return rest

    def _read_arguments(self, text: str, out: list[Delta]) -> str:
        end = self._scan(text)
        value, rest = (text, "") if end < 0 else (text[:end], text[end + 1 :])
        grown = self._white + value
        keep = grown if self._in_string else grown.rstrip(_WHITE)
        self._white = grown[len(keep) :]
        if keep:
            self._arguments.append(keep)
            if self._constrained:
                out.append(ToolCallDelta(index=len(self._calls), arguments=keep))
        self._raw.append(value)
        if end >= 0:
            self._raw.append("}")
            self._state = _State.CLOSE
        return rest

    def _scan(self, text: str) -> int:
        """Where the brace stands that closes the call's own object, -1 if not in ``text``."""
        for index, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                if self._depth == 0:
                    return index
                self._depth -= 1
        return -1

    def _read_close(self, text: str, out: list[Delta]) -> str:
        self._buffer += text
        stripped = self._buffer.lstrip(_WHITE)
        if stripped.startswith(CALL_CLOSE):
            rest = stripped[len(CALL_CLOSE) :]
            self._raw.append(self._buffer[: len(self._buffer) - len(rest)])
            self._buffer = ""
            return self._call_closed(rest, out)
        if CALL_CLOSE.startswith(stripped):
            return ""
        if self._constrained:  # not by a grammar of ours; the call itself is complete
            rest, self._buffer = self._buffer, ""
            return self._call_closed(rest, out)
        return self._not_a_call(out)

    def _call_closed(self, rest: str, out: list[Delta]) -> str:
        if not self._constrained:
            if self._name not in self._names or not isinstance(parse_json("".join(self._arguments)), dict):
                return self._not_a_call(out, rest)
            self._start_call(out)
        assert self._open_call is not None
        self._calls.append(self._grown(self._open_call))
        self._open_call = None
        self._state = _State.BETWEEN
        return rest

    def _not_a_call(self, out: list[Delta], rest: str = "") -> str:
        """What looked like a call was text. Only its opening marker is known to be no marker; the rest is read again."""
        text = "".join(self._raw) + self._buffer + rest
        self._raw, self._buffer = [], ""
        self._state = _State.TEXT
        self._emit_text(CALL_OPEN, out)
        return text[len(CALL_OPEN) :]

    def _start_call(self, out: list[Delta]) -> None:
        self._open_call = ToolCall(self._make_id(), self._name, "")
        arguments = "".join(self._arguments)
        out.append(ToolCallDelta(len(self._calls), arguments, self._open_call.id, self._name))

    def _grown(self, call: ToolCall) -> ToolCall:
        return ToolCall(call.id, call.name, "".join(self._arguments))

    def _emit_text(self, text: str, out: list[Delta]) -> None:
        if text:
            self._text.append(text)
            out.append(TextDelta(text))


_STEPS: dict[_State, Callable[[CallParser, str, list[Delta]], str]] = {
    _State.TEXT: CallParser._read_text,
    _State.BETWEEN: CallParser._read_between,
    _State.HEADER: CallParser._read_header,
    _State.ARGUMENTS: CallParser._read_arguments,
    _State.CLOSE: CallParser._read_close,
}


def _held_suffix(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``marker`` (but not all of it)."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)
