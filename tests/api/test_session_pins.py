"""The Python API's sessions over restarts: they go on by their name, can be pinned, and tell how they stand."""

from __future__ import annotations

from typing import Any

import anyio
import kvalet
import pytest
from fake_parts import KeptStore, engine_on
from kvalet.api.engine import Engine
from kvalet.api.errors import ApiError
from kvalet.api.session import Session
from kvalet.sched.session_state import SessionState


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return ("asyncio", {"use_uvloop": True})


def say(*texts: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


async def turn(session: Session, messages: list[dict[str, Any]], n: int = 6) -> kvalet.TurnEnd:
    return await session.turn(messages, tool_choice="none", max_tokens=n, ignore_eos=True).result()


async def settled(engine: Engine, session: Session) -> SessionState:
    """Until nothing of the engine moves any more."""
    scheduler = engine._open_scheduler()
    ticker = scheduler._ticker
    await session.info()
    assert await ticker.until(lambda: not (len(ticker.turns) or len(ticker.transfers) or len(ticker.records)), 30)
    return await session.info()


@pytest.mark.anyio
async def test_a_session_goes_on_with_what_it_had_after_a_restart() -> None:
    async with engine_on(first_disk := KeptStore()) as engine:
        end = await turn(engine.session("me"), say("Hello there, this is a first message."))
        await engine.drain(30)
        kv_len = len(end.prompt_ids) + len(end.ids) - 1
    async with engine_on(KeptStore(), first_disk) as engine:
        session = engine.session("me")
        state = await session.info()
        assert state == SessionState(known=True, branches=1, tokens=kv_len, saved_tokens=kv_len)
        again = await turn(session, say("Hello there, this is a first message."))
        assert again.report.disk_tokens > 0
        assert again.report.computed_tokens == 1  # the prompt was known whole: its last token is fed for an answer
        assert (again.ids, again.report.diverged_at) == (end.ids, -1)
        assert not (await engine.session("nobody").info()).known


@pytest.mark.anyio
async def test_pin_info_and_unpin_over_restarts() -> None:
    async with engine_on(first_disk := KeptStore()) as engine:
        session = engine.session("me")
        assert await session.info() == SessionState()
        assert (await session.pin()).pinned
        assert (await session.pin()).pinned
        end = await turn(session, say("Remember this."))
        state = await settled(engine, session)
        assert state.pinned
        assert state.saved_tokens == state.tokens == len(end.prompt_ids) + len(end.ids) - 1
    async with engine_on(second_disk := KeptStore(), first_disk) as engine:  # no drain before: as after a kill
        session = engine.session("me")
        assert (await session.info()).pinned
        assert not (await session.unpin()).pinned
        assert not (await session.unpin()).pinned
        await settled(engine, session)
    async with engine_on(KeptStore(), second_disk) as engine:
        session = engine.session("me")
        assert not (await session.info()).pinned
        await session.close()
        assert not (await session.info()).known


@pytest.mark.anyio
async def test_what_the_disk_refuses_is_told() -> None:
    disk = KeptStore()
    disk.fault = lambda job: "full" if job.kind == "write" else ""
    async with engine_on(disk) as engine:
        session = engine.session("me")
        await turn(session, say("Nobody can keep this."))
        await session.pin()
        scheduler = engine._open_scheduler()
        assert await scheduler._ticker.until(lambda: bool(scheduler.statistics().core.counters["checkpoint_refusals"]), 30)
        state = await session.info()
        assert (state.pinned, state.saved_tokens, state.refused) == (True, 0, "full")


@pytest.mark.anyio
async def test_pinning_needs_a_disk_tier_and_a_running_engine() -> None:
    async with engine_on(None) as engine:
        session = engine.session("me")
        with pytest.raises(ApiError, match="disk tier") as caught:
            await session.pin()
        assert caught.value.code == "no_store"
        assert not (await session.unpin()).known
    with pytest.raises(ApiError, match="not running"):
        await session.pin()
    with pytest.raises(ApiError, match="not running"):
        await session.info()


@pytest.mark.anyio
async def test_a_full_book_of_sessions_is_a_429() -> None:
    async with engine_on(KeptStore()) as engine:
        core = engine._open_parts().core
        core._board.sessions._max = 0  # type: ignore[attr-defined]
        with pytest.raises(ApiError) as caught:
            await engine.session("me").pin()
        assert (caught.value.status, caught.value.code) == (429, "sessions_full")


@pytest.mark.anyio
async def test_questions_of_many_at_once_are_all_answered() -> None:
    async with engine_on(KeptStore()) as engine:
        answers: list[SessionState] = []

        async def ask(number: int) -> None:
            session = engine.session(f"s{number % 7}")
            answers.append(await (session.pin() if number % 3 else session.info()))

        async with anyio.create_task_group() as tasks:
            for number in range(60):
                tasks.start_soon(ask, number)
        assert len(answers) == 60
