"""A running turn as its reader sees it: content and tool calls as they become certain, then one ``TurnEnd``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from kvalet.api.requests import Delta, TextDelta, ToolCall, TurnEnd
from kvalet.api.toolcalls import CallParser
from kvalet.sched.turns import Ended, EndReason, Piece


class PieceStream(Protocol):
    """What is needed of ``sched.streams.TurnStream``."""

    async def __anext__(self) -> Piece | Ended: ...

    def close(self) -> None: ...


def finish_reason(reason: EndReason, choice: str, *, calls: int, unfinished: bool) -> str:
    """The one table from how a turn ended to OpenAI's word for it, streamed or whole:

    | ended by | answer | finish reason |
    |---|---|---|
    | its token limit | anything | length |
    | anything | inside a call | length |
    | its own end | calls, choice auto or required | tool_calls |
    | its own end | a call, choice named | stop |
    | its own end | text | stop |
    | anything else | anything | error |
    """
    if reason is EndReason.LENGTH:
        return "length"
    if reason is not EndReason.STOP:
        return "error"
    if unfinished:
        return "length"
    return "tool_calls" if calls and choice != "named" else "stop"


class Turn:
    """``async for item in turn`` gives deltas and last, exactly once, a ``TurnEnd``. One reader at a time.

    A read that is cancelled has taken nothing. A turn that nobody reads is paused when its channel is full and cancelled
    after the write timeout; one whose last reference goes is cancelled at once.
    """

    def __init__(
        self,
        stream: PieceStream,
        turn_id: str,
        prompt_ids: tuple[int, ...],
        *,
        choice: str = "none",
        names: tuple[str, ...] = (),
        constrained: bool = True,
        keep_calls: Callable[[Iterable[ToolCall]], None] | None = None,
    ) -> None:
        self.id = turn_id
        self._stream = stream
        self._prompt_ids = prompt_ids
        self._choice = choice
        self._parser = None if choice == "none" else CallParser(constrained=constrained, names=names)
        self._keep_calls = keep_calls
        self._ids: list[int] = []
        self._text: list[str] = []
        self._ready: deque[Delta] = deque()
        self._end: TurnEnd | None = None
        self._told = False

    def __aiter__(self) -> Turn:
        return self

    async def __anext__(self) -> Delta | TurnEnd:
        while not self._ready:
            if self._end is not None:
                if self._told:
                    raise StopAsyncIteration
                self._told = True
                return self._end
            self._take(await self._stream.__anext__())
        return self._ready.popleft()

    def cancel(self) -> None:
        """The turn ends at the next tick, whatever it is doing. Synchronous, idempotent, harmless after the end; who goes on
        reading gets the ``TurnEnd``."""
        self._stream.close()

    async def result(self) -> TurnEnd:
        """Read to the end. Cancelled while reading, the turn is cancelled too: nobody else would read it."""
        try:
            async for item in self:
                if isinstance(item, TurnEnd):
                    return item
        finally:
            if self._end is None:
                self.cancel()
        assert self._end is not None  # read before; its end stays
        return self._end

    def _take(self, item: Piece | Ended) -> None:
        if isinstance(item, Ended):
            self._finish(item)
            return
        self._ids.extend(item.ids)
        deltas = self._parsed(item.text)
        if not deltas and (item.ids or item.logprobs):
            deltas = [TextDelta("")]
        if deltas:
            deltas[0] = replace(deltas[0], ids=item.ids, logprobs=item.logprobs)
        self._ready.extend(deltas)

    def _parsed(self, text: str) -> list[Delta]:
        if self._parser is not None:
            return self._parser.feed(text)
        if not text:
            return []
        self._text.append(text)
        return [TextDelta(text)]

    def _finish(self, ended: Ended) -> None:
        calls: tuple[ToolCall, ...] = ()
        unfinished = False
        text = "".join(self._text)
        if self._parser is not None:
            # Only a natural end says that the beginning of a marker was text after all.
            self._ready.extend(self._parser.finish(truncated=ended.reason is not EndReason.STOP))
            calls, text, unfinished = self._parser.calls, self._parser.text, self._parser.unfinished
        if self._keep_calls is not None and calls:
            self._keep_calls(calls[:-1] if unfinished else calls)
        self._end = TurnEnd(
            finish_reason=finish_reason(ended.reason, self._choice, calls=len(calls), unfinished=unfinished),
            reason=ended.reason,
            report=ended.report,
            message=ended.message,
            text=text,
            tool_calls=calls,
            ids=tuple(self._ids),
            prompt_ids=self._prompt_ids,
        )
