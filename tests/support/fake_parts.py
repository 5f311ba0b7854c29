"""A whole ``Engine`` without a model: real templates, loop and core; the shipped fakes as device and disk."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from bytetokens import byte_tokenizer
from fake_house import IDENTITY, ThreadedCopier, ThreadedStore
from kvalet.api.build import Parts
from kvalet.api.build_tiers import NoDisk
from kvalet.api.config import EngineConfig
from kvalet.api.engine import Engine
from kvalet.api.memory_plan import MemoryPlan
from kvalet.api.prompts import Prompts
from kvalet.api.template import ChatTemplate
from kvalet.runtime.fake import FakeEngine, FakeModel, FakePool, FakeSlab
from kvalet.runtime.grammar import GrammarCache
from kvalet.sched.config import SchedConfig
from kvalet.sched.core import Core

TOKENIZER = byte_tokenizer()
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
CONTEXT_TOKENS = 2000
PAGE_TOKENS, CHUNK_TOKENS, PAGES, RAM_SLOTS, STAGING_SLOTS = 4, 16, 400, 8, 3


class KeptStore(ThreadedStore):
    """Its ``secret`` makes it pass for a ``DiskStore``."""

    secret = b"s" * 32


@asynccontextmanager
async def engine_on(disk: KeptStore | None, kept: KeptStore | None = None, **config: Any) -> AsyncIterator[Engine]:
    """An engine over ``disk`` (None: no disk tier), which begins with what ``kept`` holds."""

    def build(settings: EngineConfig, _progress: Any) -> Parts:
        pool = FakePool(PAGES, PAGE_TOKENS)
        slab = FakeSlab(RAM_SLOTS + STAGING_SLOTS, CHUNK_TOKENS // PAGE_TOKENS, pool.page_bytes)
        copier = ThreadedCopier(pool, slab)
        sched = SchedConfig(
            page_tokens=PAGE_TOKENS, chunk_tokens=CHUNK_TOKENS, n_pages=PAGES, context_tokens=CONTEXT_TOKENS,
            identity=IDENTITY, ram_slots=RAM_SLOTS, staging_slots=STAGING_SLOTS,
            checkpoint_idle=settings.checkpoint == "idle",
        )  # fmt: skip
        if disk is not None and kept is not None:
            disk.entries.update(kept.entries)
            disk.records = kept.records
        return Parts(
            core=Core(sched, disk if disk is not None else NoDisk()),
            step_engine=FakeEngine(pool, FakeModel()),
            copier=copier,
            store=disk,  # type: ignore[arg-type]  # a StorePort with a secret is all that an engine asks of it here
            slot_view=slab.view,
            tokenizer=TOKENIZER,
            prompts=Prompts(TOKENIZER, GrammarCache(TOKENIZER), ChatTemplate(TEMPLATE, list(TOKENIZER.control_ids)),
                            context_tokens=CONTEXT_TOKENS),
            plan=MemoryPlan(PAGES, PAGES * PAGE_TOKENS, 0, 0, 0, 0, 0, 0, 0),
            model_id="fake",
            context_tokens=CONTEXT_TOKENS,
            created=7,
            banner=(),
            close=disk.close if disk is not None else _nothing,
        )  # fmt: skip

    async with Engine(EngineConfig(**config), builder=build) as engine:
        yield engine


def _nothing() -> None:
    pass
