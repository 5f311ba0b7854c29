"""The engine around a scripted core: refusals, ends, cancelling at every stage, starting and stopping. No model."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import date
from typing import Any

import anyio
import pytest
import scripted_core
from bytetokens import byte_tokenizer
from kvalet.api.build import Parts, StartError
from kvalet.api.config import EngineConfig
from kvalet.api.engine import Engine
from kvalet.api.errors import ApiError
from kvalet.api.memory_plan import MemoryPlan
from kvalet.api.prompts import Prompts
from kvalet.api.refusals import STATUS
from kvalet.api.requests import ChatRequest, CompletionRequest, TextDelta, ToolCallDelta, TurnEnd
from kvalet.api.template import ChatTemplate
from kvalet.api.tool_format import call_text
from kvalet.runtime.grammar import GrammarCache
from kvalet.runtime.plan import SamplingParams, StepPlan
from kvalet.sched import commands, events
from kvalet.sched.turns import Ended, EndReason, Piece, Refusal, TurnReport

TOKENIZER = byte_tokenizer()
SOURCE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
TOOL = {
    "type": "function",
    "function": {"name": "note", "parameters": {"type": "object", "properties": {"n": {"type": "number"}}}},
}
CALL = call_text("note", '{"n": 1.0}')
USER = ({"role": "user", "content": "hi"},)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return ("asyncio", {"use_uvloop": True})


def answer(*texts: str, reason: EndReason = EndReason.STOP) -> Callable[[events.Submit], list[commands.Command]]:
    """A core that accepts, says ``texts`` and ends, all at once."""

    def reply(event: events.Submit) -> list[commands.Command]:
        turn = event.spec.turn
        emits = [commands.Emit(turn, Piece((index,), text)) for index, text in enumerate(texts)]
        return [commands.Accept(turn), *emits, commands.End(turn, Ended(reason, TurnReport(prompt_tokens=1), "m"))]

    return reply


class Watched(scripted_core.Script):
    """A script that tells when it has been asked something."""

    def __init__(self, replies: dict[type[events.Event], scripted_core.Reply] | None = None) -> None:
        super().__init__(replies)
        self.asked = asyncio.Event()

    def handle(self, event: events.Event) -> list[commands.Command]:
        self.asked.set()
        return super().handle(event)


class Built:
    """A builder of parts around a script, that counts what was closed."""

    def __init__(self, script: Watched) -> None:
        self.script = script
        self.entered = threading.Event()
        self.step_engine = scripted_core.Engine()
        self.closed = 0
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, config: EngineConfig, progress: Any) -> Parts:
        self.entered.set()
        assert self.gate.wait(30)
        template = ChatTemplate(SOURCE, list(TOKENIZER.control_ids))
        return Parts(
            core=self.script,
            step_engine=self.step_engine,
            copier=scripted_core.NoCopies(),
            store=None,
            slot_view=lambda slot: memoryview(b""),
            tokenizer=TOKENIZER,
            prompts=Prompts(TOKENIZER, GrammarCache(TOKENIZER), template, context_tokens=4000),
            plan=MemoryPlan(9, 128, 0, 0, 0, 0, 0, 0, 0),
            model_id="scripted",
            context_tokens=4000,
            created=7,
            banner=("line",),
            close=self.close,
        )

    def close(self) -> None:
        self.closed += 1


@asynccontextmanager
async def running(
    reply: Callable[[events.Submit], list[commands.Command]] | None = None, **config: Any
) -> AsyncIterator[tuple[Engine, Built]]:
    built = Built(Watched({} if reply is None else {events.Submit: reply}))
    async with Engine(EngineConfig(**config), builder=built) as engine:
        yield engine, built
    assert built.closed == 1


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest(**{"messages": USER, "params": SamplingParams(max_tokens=9), **fields})


def submitted(built: Built) -> list[events.Submit]:
    return [event for event in built.script.seen if isinstance(event, events.Submit)]


def cancels(built: Built) -> list[events.Cancel]:
    return [event for event in built.script.seen if isinstance(event, events.Cancel)]


async def seen(built: Built, kind: type[events.Event]) -> events.Event:
    """The first event of a kind; waits for it, bounded."""
    with anyio.fail_after(10):
        while True:
            built.script.asked.clear()
            for event in built.script.seen:
                if isinstance(event, kind):
                    return event
            await built.script.asked.wait()


@pytest.mark.anyio
async def test_a_chat_turn_from_request_to_end() -> None:
    async with running(answer("Sure. ", CALL[:20], CALL[20:])) as (engine, built):
        turn = await engine.start_chat(chat(tools=(TOOL,), session="s", tenant="t"))
        items = [item async for item in turn]
        end = items[-1]
        assert isinstance(end, TurnEnd)
        assert (end.finish_reason, end.text, end.tool_calls[0].arguments) == ("tool_calls", "Sure. ", '{"n": 1.0}')
        assert [type(item) for item in items[:2]] == [TextDelta, TextDelta]
        assert isinstance(items[2], ToolCallDelta)
        spec = submitted(built)[0].spec
        assert (spec.session, spec.tenant, spec.params.max_tokens) == ("s", "t", 9)
        assert spec.params.grammar is not None
        assert turn.id.startswith("chatcmpl-")
        assert end.prompt_ids == spec.prompt


@pytest.mark.anyio
async def test_a_call_that_comes_back_reworded_is_the_models_own_text_again() -> None:
    async with running(answer(CALL)) as (engine, built):
        end = await (await engine.start_chat(chat(tools=(TOOL,)))).result()
        call = {"id": end.tool_calls[0].id, "type": "function", "function": {"name": "note", "arguments": '{"n":1}'}}
        history = (*USER, {"role": "assistant", "content": None, "tool_calls": [call]})
        for tenant, text in (("", CALL), ("other", call_text("note", '{"n": 1}'))):
            await (await engine.start_chat(chat(messages=history, tools=(TOOL,), tenant=tenant))).result()
            assert f"assistant\n{text}\n" in TOKENIZER.decode(submitted(built)[-1].spec.prompt), tenant
        assert engine.statistics().remembered_calls["calls"] >= 1


@pytest.mark.anyio
async def test_completion_and_tenants_have_secrets_of_their_own() -> None:
    async with running(answer("x")) as (engine, built):
        for tenant, salt in (("", ""), ("a", ""), ("a", "s"), ("b", ""), ("a", "")):
            request = CompletionRequest((5, 6), SamplingParams(max_tokens=1), tenant=tenant, cache_salt=salt)
            turn = await engine.start_completion(request)
            assert turn.id.startswith("cmpl-")
            await turn.result()
        secrets = [event.spec.secret for event in submitted(built)]
        assert len(set(secrets)) == 4
        assert secrets[1] == secrets[4]
        assert all(len(secret) == 32 for secret in secrets)


@pytest.mark.anyio
@pytest.mark.parametrize("refusal", list(Refusal))
async def test_refusals(refusal: Refusal) -> None:
    def refuse(event: events.Submit) -> list[commands.Command]:
        return [commands.Refuse(event.spec.turn, refusal, "the reason", 3.0 if refusal is Refusal.QUEUE_FULL else 0.0)]

    async with running(refuse) as (engine, _):
        with pytest.raises(ApiError, match="the reason") as caught:
            await engine.start_chat(chat())
    status, code, retry_after_s = STATUS[refusal]
    assert (caught.value.status, caught.value.code) == (status, code)
    assert caught.value.retry_after_s == (3.0 if refusal is Refusal.QUEUE_FULL else retry_after_s)
    if refusal is Refusal.NEVER_FITS:
        assert "maximum context length is 112 tokens" in caught.value.message, "the pool of 128 less a page of growth"
        assert caught.value.param == "messages"


@pytest.mark.anyio
@pytest.mark.parametrize("reason", [EndReason.GRAMMAR, EndReason.DEVICE_ERROR, EndReason.SHUTDOWN, EndReason.INTERNAL])
async def test_ends_that_are_no_answer(reason: EndReason) -> None:
    async with running(answer("x", reason=reason)) as (engine, _):
        end = await (await engine.start_chat(chat())).result()
    assert (end.finish_reason, end.reason, end.message) == ("error", reason, "m")


@pytest.mark.anyio
async def test_requests_that_wait_for_text_threads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    original = Prompts.chat

    def slow(self: Prompts, request: ChatRequest, today: date) -> Any:
        assert gate.wait(30)
        return original(self, request, today)

    monkeypatch.setattr(Prompts, "chat", slow)
    async with running(answer("x"), queue_limit=3) as (engine, _):
        waiting = [asyncio.ensure_future(engine.start_chat(chat())) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as caught:
            await engine.start_chat(chat())
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        assert engine.statistics().preparing == 3
        gate.set()
        for turn in await asyncio.gather(*waiting):
            assert (await turn.result()).text == "x"
        assert engine.statistics().preparing == 0


@pytest.mark.anyio
async def test_a_consumer_that_is_cancelled_leaves_no_turn() -> None:
    async with running() as (engine, built):
        turn = await engine.start_chat(chat())
        with anyio.move_on_after(0.01):
            await turn.result()
        assert (await seen(built, events.Cancel)) is not None
        assert [item async for item in turn][-1].reason is EndReason.CANCELLED  # type: ignore[union-attr]
        assert len(cancels(built)) == 1


@pytest.mark.anyio
async def test_a_turn_that_is_forgotten_is_cancelled() -> None:
    async with running() as (engine, built):
        turn = await engine.start_chat(chat())
        del turn
        gc.collect()
        await seen(built, events.Cancel)


@pytest.mark.anyio
async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    async with running(lambda event: []) as (engine, built):  # never answers
        task = asyncio.ensure_future(engine.start_chat(chat()))
        await seen(built, events.Submit)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await seen(built, events.Cancel)


@pytest.mark.anyio
async def test_device_lost() -> None:
    told: list[str] = []
    async with running() as (engine, built):
        engine.on_device_lost = told.append
        assert engine.ready() == (True, "")
        built.step_engine.error = RuntimeError("no device")
        built.script.plans.append(StepPlan(step=1, rows=()))
        turn = await engine.start_chat(chat())
        await seen(built, events.DeviceFailed)
        await asyncio.sleep(0)
        ready, why = engine.ready()
        assert not ready
        assert "no device" in why
        assert len(told) == 1
        turn.cancel()


@pytest.mark.anyio
async def test_draining() -> None:
    async with running() as (engine, built):
        built.script.replies[events.BeginDrain] = lambda event: [commands.Drained(0)]
        report = await engine.drain(1.0)
        assert (report.finished, report.left_behind) == (True, 0)
        assert engine.ready() == (False, "draining")


@pytest.mark.anyio
async def test_a_failed_start_leaves_nothing_behind() -> None:
    def broken(config: EngineConfig, progress: Any) -> Parts:
        raise StartError("no such file")

    before = threading.active_count()
    engine = Engine(EngineConfig(), builder=broken)
    with pytest.raises(StartError, match="no such file"):
        async with engine:
            raise AssertionError("the engine must not start")
    assert threading.active_count() <= before + 1  # the loop's default executor keeps the thread that cleaned up
    assert engine.ready() == (False, "not started")


@pytest.mark.anyio
async def test_a_cancelled_start_closes_what_was_made_meanwhile() -> None:
    built = Built(Watched())
    built.gate.clear()
    engine = Engine(EngineConfig(), builder=built)
    task = asyncio.ensure_future(engine.__aenter__())
    assert await anyio.to_thread.run_sync(built.entered.wait, 10)
    task.cancel()
    asyncio.get_running_loop().call_later(0.01, built.gate.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert built.closed == 1


@pytest.mark.anyio
async def test_nothing_works_outside_the_block() -> None:
    async with running(answer("x")) as (engine, _):
        assert (engine.model.id, engine.model.context_tokens, engine.model.created) == ("scripted", 4000, 7)
        assert engine.model.vocab_size == TOKENIZER.vocab_size
        assert engine.banner() == ["line"]
        assert engine.token_bytes(TOKENIZER.encode("x", allow_special=False)[0]) == b"x"
    with pytest.raises(ApiError) as caught:
        await engine.start_chat(chat())
    assert caught.value.status == 503


@pytest.mark.anyio
async def test_leaving_the_block_ends_open_turns() -> None:
    async with running() as (engine, _):
        turn = await engine.start_chat(chat())
    end = await turn.result()
    assert (end.finish_reason, end.reason) == ("error", EndReason.SHUTDOWN)


@pytest.mark.anyio
async def test_sessions() -> None:
    async with running(answer("hello")) as (engine, built):
        async with engine.session("agent", tenant="t") as session:
            texts = [
                piece.text async for piece in session.turn(USER, temperature=0.0, stop=["x"]) if isinstance(piece, TextDelta)
            ]
            assert texts == ["hello"]
            end = await session.turn(USER, [TOOL], tool_choice="note", max_tokens=3, seed=4).result()
            assert end.text == "hello"
            child = session.fork("copy")
            assert (await child.turn(USER).result()).text == "hello"
        specs = [event.spec for event in submitted(built)]
        assert [(spec.session, spec.tenant) for spec in specs] == [("agent", "t"), ("agent", "t"), ("copy", "t")]
        assert specs[0].params.max_tokens > 3000, "without max_tokens: what the context leaves"
        assert (specs[1].params.max_tokens, specs[1].params.seed) == (3, 4)
        forked = await seen(built, events.ForkSession)
        assert isinstance(forked, events.ForkSession)
        assert (forked.parent, forked.child, forked.tenant) == ("agent", "copy", "t")
        closed = await seen(built, events.CloseSession)
        assert isinstance(closed, events.CloseSession)
        assert (closed.session, closed.tenant) == ("agent", "t")
        with pytest.raises(ApiError, match="is closed"):
            session.turn(USER)
        await session.close()
        assert engine.session().id != engine.session().id


@pytest.mark.anyio
async def test_session_turns_can_be_cancelled_at_any_time() -> None:
    async with running() as (engine, built):
        session = engine.session()
        never = session.turn(USER)
        never.cancel()
        items = [item async for item in never]
        assert len(items) == 1
        assert isinstance(items[0], TurnEnd)
        assert items[0].reason is EndReason.CANCELLED
        assert submitted(built) == []
        turn = session.turn(USER)
        task = asyncio.ensure_future(turn.result())
        await seen(built, events.Submit)
        turn.cancel()
        turn.cancel()
        assert (await task).reason is EndReason.CANCELLED


@pytest.mark.anyio
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": -1.0}, {"top_p": 0.0}, {"max_tokens": 0}, {"stop": "x"}, {"stop": [""]}, {"min_p": float("nan")}],
)
async def test_sampling_out_of_range_is_refused(sampling: dict[str, Any]) -> None:
    async with running() as (engine, _):
        with pytest.raises(ApiError) as caught:
            engine.session().turn(USER, **sampling)
        assert caught.value.param == next(iter(sampling))
        with pytest.raises(TypeError):
            engine.session().turn(USER, no_such_field=1)
