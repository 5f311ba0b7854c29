"""The engine: models in, sessions and turns out. The HTTP server and Python programs use this one class.

    async with Engine(EngineConfig(model="model.gguf")) as engine:
        session = engine.session("my-agent")
        async for piece in session.turn([{"role": "user", "content": "Hello"}], max_tokens=64):
            ...

Inside the block everything may be called from the event loop's thread. Templates, tokenising and schemas run on threads of the
engine's own; the model runs on its engine thread; the loop only carries messages.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import date
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import anyio
from kvalet.api.build import Parts, Progress, build
from kvalet.api.config import EngineConfig
from kvalet.api.errors import ApiError
from kvalet.api.memory_plan import MemoryPlan
from kvalet.api.prompts import Prepared
from kvalet.api.refusals import refusal_error
from kvalet.api.requests import ChatRequest, CompletionRequest, ToolCall, text_size
from kvalet.api.session import Session
from kvalet.api.turn import Turn
from kvalet.runtime.geometry import PAGE_TOKENS
from kvalet.sched.errors import Refused
from kvalet.sched.loop import Scheduler
from kvalet.sched.session_state import SessionState
from kvalet.sched.status import DrainReport, SchedulerStatistics
from kvalet.sched.turns import TurnSpec
from kvalet.store.ids import tenant_secret

TEXT_THREADS = 2
LARGE_TEXT = 256_000
"""Characters from which on a request has to wait while another such one is in the text threads: small ones never do."""
STALLED_S = 60.0
"""Without a step for so long while turns could go on, the engine is not ready: longer than any step or disk takes."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """``context_tokens``: prompt and answer together. ``created``: unix seconds of the model file."""

    id: str
    context_tokens: int
    vocab_size: int
    created: int


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """A moment's numbers. ``preparing``: requests being templated and tokenised. ``store`` None: no disk tier."""

    scheduler: SchedulerStatistics
    memory: MemoryPlan
    preparing: int
    remembered_calls: dict[str, int]
    store: Any = None


class Engine:
    """``progress(step, of, what)`` is told how the start proceeds (on another thread). ``builder`` makes the parts; the
    default one loads the model that the configuration names.

    The start raises ``api.build.StartError`` with one sentence; nothing is left behind then. Leaving the block ends every
    open turn with ``shutdown`` (``drain`` before, to let them finish and to save what is worth it).
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        progress: Progress | None = None,
        builder: Callable[[EngineConfig, Progress | None], Parts] = build,
    ) -> None:
        self.config = config if config is not None else EngineConfig()
        self.on_device_lost: Callable[[str], None] | None = None
        """Called once, on the loop, when nothing can be computed any more."""
        self._progress = progress
        self._builder = builder
        self._parts: Parts | None = None
        self._scheduler: Scheduler | None = None
        self._draining = False
        self._preparing = 0
        self._secret = b""

    async def __aenter__(self) -> Engine:
        self._threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="kvalet-text")
        self._large_text = anyio.CapacityLimiter(TEXT_THREADS - 1)
        building = self._threads.submit(self._builder, self.config, self._progress)
        try:
            self._parts = parts = await asyncio.wrap_future(building)
            scheduler = Scheduler(
                parts.core,
                parts.step_engine,
                parts.copier,
                parts.store,
                parts.slot_view,
                write_timeout_s=self.config.write_timeout_s,
            )
            scheduler.on_device_lost = self._device_lost
            await scheduler.__aenter__()
        except BaseException:
            await self._release(building)
            raise
        self._scheduler = scheduler
        self._secret = parts.store.secret if parts.store is not None else os.urandom(32)
        self.model = ModelInfo(parts.model_id, parts.context_tokens, parts.tokenizer.vocab_size, parts.created)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        scheduler, self._scheduler = self._scheduler, None
        try:
            if scheduler is not None:
                await scheduler.__aexit__(kind, error, trace)
        finally:
            await self._release()

    async def _release(self, building: Future[Parts] | None = None) -> None:
        """Not to be interrupted: a cancelled start still waits for what its thread is making, and closes it."""
        parts, self._parts = self._parts, None
        with anyio.CancelScope(shield=True):
            await asyncio.get_running_loop().run_in_executor(None, _close, parts, self._threads, building)

    # -- turns

    async def start_chat(self, request: ChatRequest) -> Turn:
        """From the return on the turn ends exactly once, and says how as its last item. ApiError for whatever is refused;
        it, or being cancelled, leaves nothing behind."""
        prepared = await self._prepare(request, lambda parts: parts.prompts.chat(request, date.today()))
        return await self._submit(request, prepared, "chatcmpl")

    async def start_completion(self, request: CompletionRequest) -> Turn:
        """As ``start_chat``."""
        prepared = await self._prepare(request, lambda parts: parts.prompts.completion(request))
        return await self._submit(request, prepared, "cmpl")

    async def _prepare(self, request: ChatRequest | CompletionRequest, work: Callable[[Parts], Prepared]) -> Prepared:
        """At most ``queue_limit`` requests wait for the text threads; one more is a 429."""
        parts = self._open_parts()
        if self._preparing >= self.config.queue_limit:
            raise ApiError("Too many requests are waiting.", status=429, code="queue_full", retry_after_s=1.0)
        self._preparing += 1
        try:
            async with self._large_text if text_size(request) >= LARGE_TEXT else nullcontext():
                return await self._in_thread(partial(work, parts))
        finally:
            self._preparing -= 1

    async def _submit(self, request: ChatRequest | CompletionRequest, prepared: Prepared, kind: str) -> Turn:
        scheduler = self._open_scheduler()
        spec = TurnSpec(
            turn=scheduler.next_turn_id(),
            prompt=prepared.ids,
            params=prepared.params,
            secret=tenant_secret(self._secret, request.tenant, request.cache_salt),
            session=request.session,
            tenant=request.tenant,
            priority=request.priority,
            received_at=scheduler.now(),
        )
        try:
            stream = await scheduler.submit(spec)
        except Refused as refused:
            limit = min(self.model.context_tokens, self._open_parts().plan.pool_tokens - PAGE_TOKENS)
            param = "messages" if isinstance(request, ChatRequest) else "prompt"
            raise refusal_error(refused, len(prepared.ids), limit, param) from refused
        return Turn(
            stream,
            f"{kind}-{secrets.token_hex(12)}",
            prepared.ids,
            choice=prepared.choice,
            names=prepared.names,
            keep_calls=partial(self._keep_calls, request.tenant),
        )

    def _keep_calls(self, tenant: str, calls: Iterable[ToolCall]) -> None:
        if self._parts is not None:
            for call in calls:
                self._parts.prompts.calls.remember(tenant, call.id, call.arguments)

    # -- sessions

    def session(self, id: str = "", tenant: str = "") -> Session:
        """A conversation by name; "" gives it a new one. The name is a hint where its KV is, never a key to it: any number of
        ``Session`` objects may share one name. A name that the disk tier knows goes on with what it had, also after a
        restart."""
        return Session(self, id or f"session-{secrets.token_hex(12)}", tenant)

    def close_session(self, id: str, tenant: str = "") -> None:
        """End the session's turns as cancelled and give up its claim on its KV (shared pages stay cached). Takes effect at
        the next tick; unknown names are ignored."""
        self._open_scheduler().close_session(id, tenant)

    def fork_session(self, parent: str, child: str, tenant: str = "") -> None:
        """``child`` begins with all that ``parent`` has; both share pages, chunks and reads."""
        self._open_scheduler().fork_session(parent, child, tenant)

    async def session_state(self, id: str, tenant: str = "") -> SessionState:
        """How the session stands; after a restart its records are read first. ``known`` False: nobody knows the name."""
        return await self._asked(self._open_scheduler().session_state(id, tenant))

    async def state_hash(self, id: str, tenant: str = "") -> tuple[str, int]:
        """(digest over the exact KV bytes of the session's pages on the device, in order; how many tokens they hold). For
        tests, while nothing runs: whatever way the bytes came there, the same history has the same digest in a deterministic
        engine. Copies all of it to the host."""
        step_engine, pages = self._open_parts().step_engine, (await self.session_state(id, tenant)).pages
        digest = getattr(step_engine, "kv_digest", None)
        if digest is None:
            raise ApiError("This engine has no digest of its KV.", code="not_supported")
        n_tokens = len(pages) * PAGE_TOKENS
        return str(await self._in_thread(partial(digest, pages, n_tokens))), n_tokens

    async def pin_session(self, id: str, tenant: str = "", *, pinned: bool = True) -> SessionState:
        """See ``Session.pin``. Idempotent. ApiError without a disk tier: pinned KV must be able to leave the device."""
        if pinned and self._open_parts().store is None:
            raise ApiError("A session can only be pinned where there is a disk tier (--store DIR).", code="no_store")
        return await self._asked(self._open_scheduler().pin_session(id, tenant, pinned=pinned))

    async def _asked(self, question: Coroutine[Any, Any, SessionState]) -> SessionState:
        try:
            return await question
        except Refused as refused:
            raise refusal_error(refused, 0, 0, "session") from refused

    # -- questions

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text; b"" for special tokens."""
        return self._open_parts().tokenizer.token_bytes(token_id)

    def ready(self) -> tuple[bool, str]:
        """Whether new turns are taken, and why not."""
        if self._scheduler is None:
            return False, "not started"
        if self._scheduler.device_lost is not None:
            return False, f"device lost: {self._scheduler.device_lost}"
        if (seconds := self._scheduler.stalled_s()) > STALLED_S:
            return False, f"stalled: no step for {seconds:.0f} s while turns wait"
        return (False, "draining") if self._draining else (True, "")

    def statistics(self) -> EngineStatistics:
        parts = self._open_parts()
        return EngineStatistics(
            scheduler=self._open_scheduler().statistics(),
            memory=parts.plan,
            preparing=self._preparing,
            remembered_calls=parts.prompts.calls.statistics(),
            store=None if parts.store is None else parts.store.statistics(),
        )

    def banner(self) -> list[str]:
        """Lines for the start: the model, the sizes of the tiers, what clamped them and why one would do nothing."""
        return list(self._open_parts().banner)

    async def drain(self, seconds: float) -> DrainReport:
        """Refuse new turns, let running ones end within ``seconds``, spill what is worth keeping to the disk meanwhile."""
        self._draining = True
        return await self._open_scheduler().drain(seconds)

    def _device_lost(self, message: str) -> None:
        if self.on_device_lost is not None:
            self.on_device_lost(message)

    def _open_scheduler(self) -> Scheduler:
        scheduler = self._scheduler
        if scheduler is None:
            raise ApiError("The engine is not running.", status=503, code="closing", retry_after_s=1.0)
        return scheduler

    def _open_parts(self) -> Parts:
        self._open_scheduler()
        assert self._parts is not None
        return self._parts

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _close(parts: Parts | None, threads: ThreadPoolExecutor, building: Future[Parts] | None) -> None:
    threads.shutdown(wait=True, cancel_futures=True)
    if parts is None and building is not None and not building.cancelled() and building.exception() is None:
        parts = building.result()
    if parts is not None:
        parts.close()
