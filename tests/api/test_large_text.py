"""Requests of megabytes take turns in the text threads, so that small ones never wait behind them."""

from __future__ import annotations

import asyncio
import threading
from datetime import date
from typing import Any

import anyio
import pytest
import scripted_core
from bytetokens import byte_tokenizer
from kvalet.api.build import Parts
from kvalet.api.config import EngineConfig
from kvalet.api.engine import LARGE_TEXT, Engine
from kvalet.api.errors import ApiError
from kvalet.api.memory_plan import MemoryPlan
from kvalet.api.prompts import Prepared, Prompts
from kvalet.api.requests import MESSAGE_CHARS, ChatRequest, CompletionRequest, text_size
from kvalet.runtime.plan import SamplingParams

TOKENIZER = byte_tokenizer()
PARAMS = SamplingParams(max_tokens=9)


def chat(*contents: Any) -> ChatRequest:
    return ChatRequest(tuple({"role": "user", "content": content} for content in contents), PARAMS)


@pytest.mark.parametrize(
    ("contents", "size"),
    [
        (["abc", "de"], 5),
        ([[{"type": "text", "text": "abc"}, {"type": "text", "text": "d"}]], 4),
        ([None], 0),
        ([7], 0),
        ([["abc", {"text": 5}, {"type": "image_url"}, {"text": "x"}]], 1),
        ([{"text": "abc"}], 0),
    ],
)
def test_the_size_of_a_chat_is_that_of_its_text_whatever_it_holds(contents: list[Any], size: int) -> None:
    assert text_size(chat(*contents)) == size + MESSAGE_CHARS * len(contents)


def test_the_size_of_a_completion_is_that_of_its_text() -> None:
    assert text_size(CompletionRequest("abcd", PARAMS)) == 4
    assert text_size(CompletionRequest((1, 2, 3), PARAMS)) == 0
    assert text_size(ChatRequest(({"role": "user"},), PARAMS)) == MESSAGE_CHARS


class Slow(Prompts):
    """Large prompts take until ``go``; every prompt is then refused, so that nothing else of the engine is needed."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER, None, None, context_tokens=100)
        self.go, self.began = threading.Event(), threading.Event()
        self.at_work = 0
        self.most = 0
        self._lock_counts = threading.Lock()

    def chat(self, request: ChatRequest, today: date) -> Prepared:
        if text_size(request) >= LARGE_TEXT:
            with self._lock_counts:
                self.at_work += 1
                self.most = max(self.most, self.at_work)
            self.began.set()
            assert self.go.wait(60)
            with self._lock_counts:
                self.at_work -= 1
        raise ApiError("refused", code="large" if text_size(request) >= LARGE_TEXT else "small")


@pytest.mark.anyio
async def test_a_small_prompt_does_not_wait_behind_large_ones() -> None:
    prompts = Slow()

    def built(config: EngineConfig, progress: Any) -> Parts:
        return Parts(
            core=scripted_core.Script({}),
            step_engine=scripted_core.Engine(),
            copier=scripted_core.NoCopies(),
            store=None,
            slot_view=lambda slot: memoryview(b""),
            tokenizer=TOKENIZER,
            prompts=prompts,
            plan=MemoryPlan(9, 128, 0, 0, 0, 0, 0, 0, 0),
            model_id="scripted",
            context_tokens=100,
            created=7,
            banner=(),
            close=lambda: None,
        )

    async def code(engine: Engine, content: str) -> str | None:
        with pytest.raises(ApiError) as refused:
            await engine.start_chat(chat(content))
        return refused.value.code

    async with Engine(EngineConfig(), builder=built) as engine:
        with anyio.fail_after(60):
            async with asyncio.TaskGroup() as group:
                large = [group.create_task(code(engine, "x" * LARGE_TEXT)) for _ in range(4)]
                assert await asyncio.to_thread(prompts.began.wait, 60)
                assert [await code(engine, "x") for _ in range(8)] == ["small"] * 8
                assert not any(task.done() for task in large)
                prompts.go.set()
        assert [task.result() for task in large] == ["large"] * 4
    assert prompts.most == 1
