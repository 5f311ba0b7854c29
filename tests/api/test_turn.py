"""From pieces to deltas: ids and log-probabilities kept, one end, cancel at any time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import anyio
import pytest
from kvalet.api.requests import TextDelta, ToolCall, ToolCallDelta, TurnEnd
from kvalet.api.tool_format import call_text
from kvalet.api.turn import Turn, finish_reason
from kvalet.runtime.plan import TokenLogprob
from kvalet.sched.turns import Ended, EndReason, Piece, TurnReport

REPORT = TurnReport(prompt_tokens=3, completion_tokens=5)
CALL = call_text("note", '{"t": "x"}')


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return ("asyncio", {"use_uvloop": True})


class Script:
    """A turn's stream from a list. After ``close`` what is left is dropped and the end is ``cancelled``."""

    def __init__(self, items: Sequence[Piece | Ended]) -> None:
        self._items = list(items)
        self.closed = 0
        self.gate: asyncio.Event | None = None

    async def __anext__(self) -> Piece | Ended:
        if self.gate is not None:
            await self.gate.wait()
        if self.closed and self._items:
            self._items = []
            return Ended(EndReason.CANCELLED, REPORT)
        if not self._items:
            raise StopAsyncIteration
        return self._items.pop(0)

    def close(self) -> None:
        self.closed += 1
        if self.gate is not None:
            self.gate.set()


def pieces(*texts: str, reason: EndReason = EndReason.STOP) -> list[Piece | Ended]:
    made: list[Piece | Ended] = [Piece((index,), text, (TokenLogprob(index, -1.0),)) for index, text in enumerate(texts)]
    return [*made, Ended(reason, REPORT, "" if reason is EndReason.STOP else "said so")]


def turn_of(script: Script, choice: str = "auto") -> Turn:
    return Turn(script, "t", (7, 8, 9), choice=choice, names=("note",))


async def read(turn: Turn) -> tuple[list[TextDelta | ToolCallDelta], TurnEnd]:
    items = [item async for item in turn]
    end = items.pop()
    assert isinstance(end, TurnEnd)
    assert not any(isinstance(item, TurnEnd) for item in items), "exactly one end, last"
    return [item for item in items if not isinstance(item, TurnEnd)], end


@pytest.mark.anyio
async def test_text_turn() -> None:
    deltas, end = await read(turn_of(Script(pieces("Hel", "", "lo <tool_call>")), "none"))
    assert [delta.text for delta in deltas if isinstance(delta, TextDelta)] == ["Hel", "", "lo <tool_call>"]
    assert (end.finish_reason, end.text, end.tool_calls) == ("stop", "Hello <tool_call>", ())
    assert (end.ids, end.prompt_ids, end.report) == ((0, 1, 2), (7, 8, 9), REPORT)


@pytest.mark.anyio
@pytest.mark.parametrize("choice", ["auto", "required", "named"])
async def test_every_id_and_logprob_arrives_once_whatever_is_held_back(choice: str) -> None:
    for text in ("Sure. " + CALL, CALL + "\n" + CALL):
        for size in (1, 3, 7, 1000):
            parts = [text[at : at + size] for at in range(0, len(text), size)]
            deltas, end = await read(turn_of(Script(pieces(*parts)), choice))
            ids = tuple(itertools.chain.from_iterable(delta.ids for delta in deltas))
            assert ids == end.ids == tuple(range(len(parts)))
            assert [logprob.token_id for delta in deltas for logprob in delta.logprobs] == list(ids)
            assert end.finish_reason == ("stop" if choice == "named" else "tool_calls")
            assert end.tool_calls[0].arguments == '{"t": "x"}'
            assert end.text == ("Sure. " if text.startswith("S") else "")


@pytest.mark.parametrize(
    ("reason", "choice", "calls", "unfinished", "word"),
    [
        (EndReason.STOP, "none", 0, False, "stop"),
        (EndReason.STOP, "auto", 0, False, "stop"),
        (EndReason.STOP, "auto", 1, False, "tool_calls"),
        (EndReason.STOP, "required", 2, False, "tool_calls"),
        (EndReason.STOP, "required", 0, False, "stop"),
        (EndReason.STOP, "named", 1, False, "stop"),
        (EndReason.STOP, "auto", 1, True, "length"),
        (EndReason.LENGTH, "auto", 1, False, "length"),
        (EndReason.LENGTH, "named", 1, True, "length"),
        (EndReason.LENGTH, "none", 0, False, "length"),
        *((reason, "auto", 1, False, "error") for reason in EndReason if reason not in (EndReason.STOP, EndReason.LENGTH)),
    ],
)
def test_finish_reasons(reason: EndReason, choice: str, calls: int, unfinished: bool, word: str) -> None:
    assert finish_reason(reason, choice, calls=calls, unfinished=unfinished) == word


@pytest.mark.anyio
async def test_cut_off_call_has_the_same_arguments_in_both_modes() -> None:
    for length in range(1, len(CALL)):
        deltas, end = await read(turn_of(Script(pieces(*CALL[:length], reason=EndReason.LENGTH)), "required"))
        streamed = "".join(delta.arguments for delta in deltas if isinstance(delta, ToolCallDelta))
        assert end.finish_reason == "length"
        assert streamed == "".join(call.arguments for call in end.tool_calls)
        assert end.text == ""


@pytest.mark.anyio
async def test_only_finished_calls_are_remembered() -> None:
    kept: list[ToolCall] = []
    text = CALL + "\n" + CALL[:-5]
    turn = Turn(Script(pieces(text, reason=EndReason.LENGTH)), "t", (), choice="auto", keep_calls=kept.extend)
    end = await turn.result()
    assert len(end.tool_calls) == 2
    assert kept == [end.tool_calls[0]]


@pytest.mark.anyio
async def test_errors_carry_their_message() -> None:
    _, end = await read(turn_of(Script(pieces("x", reason=EndReason.GRAMMAR))))
    assert (end.finish_reason, end.reason, end.message) == ("error", EndReason.GRAMMAR, "said so")


@pytest.mark.anyio
async def test_cancel_is_idempotent_and_the_reader_gets_the_end() -> None:
    script = Script(pieces("a", "b"))
    turn = turn_of(script)
    assert await anext(turn) == TextDelta("a", (0,), (TokenLogprob(0, -1.0),))
    turn.cancel()
    turn.cancel()
    deltas, end = await read(turn)
    assert (deltas, end.reason, end.text) == ([], EndReason.CANCELLED, "a")
    turn.cancel()
    assert [item async for item in turn] == []
    assert await turn.result() == end


@pytest.mark.anyio
async def test_a_cancelled_read_has_taken_nothing() -> None:
    script = Script(pieces("a"))
    script.gate = asyncio.Event()
    turn = turn_of(script)
    with anyio.move_on_after(0.01):
        await anext(turn)
    assert script.closed == 0
    script.gate.set()
    assert (await turn.result()).text == "a"


@pytest.mark.anyio
async def test_result_cancelled_while_reading_cancels_the_turn() -> None:
    script = Script(pieces("a"))
    script.gate = asyncio.Event()
    with anyio.move_on_after(0.01):
        await turn_of(script).result()
    assert script.closed == 1
