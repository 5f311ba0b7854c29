"""Server-sent events from bytes: an incremental decoder, fed with whatever the socket gave."""

from __future__ import annotations

import codecs

MAX_EVENT_CHARS = 16 << 20


class SseError(Exception):
    """The stream is not what an event stream may be. The decoder is of no further use."""


class SseDecoder:
    """``feed`` bytes cut anywhere, get the ``data`` of the events that are complete. Comments and other fields are skipped.

    Lines may end with LF, CR LF or CR. At the bound: an event longer than MAX_EVENT_CHARS raises SseError.
    """

    def __init__(self) -> None:
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._line = ""
        self._data: list[str] = []
        self._skip_lf = False
        self.comments = 0

    def feed(self, raw: bytes) -> list[str]:
        events: list[str] = []
        text = self._text.decode(raw)
        if not text:  # nothing, or the first bytes of a character: a CR before it may still be half of a CR LF
            return events
        if self._skip_lf:
            text = text.removeprefix("\n")
        self._skip_lf = text.endswith("\r")
        *lines, self._line = (self._line + text.replace("\r\n", "\n").replace("\r", "\n")).split("\n")
        for line in lines:
            if line:
                self._field(line)
            elif self._data:
                events.append("\n".join(self._data))
                self._data = []
        if len(self._line) + sum(map(len, self._data)) > MAX_EVENT_CHARS:
            raise SseError(f"an event of more than {MAX_EVENT_CHARS} characters")
        return events

    def _field(self, line: str) -> None:
        if line.startswith(":"):
            self.comments += 1
            return
        name, _, value = line.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
