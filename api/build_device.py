"""What is made differently on each device: the model's weights, the pool's size, the step engine, slab and copier. Here: the
CPU; ``api.build_cuda`` is the GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Protocol

from kvalet.api.build_tiers import NoCopies, make_slab
from kvalet.api.config import EngineConfig
from kvalet.api.machine import available_memory, folder_bytes, free_disk_bytes
from kvalet.api.memory_plan import MemoryPlan, plan_memory
from kvalet.runtime.config import EngineConfig as RuntimeConfig
from kvalet.runtime.engine import LoadedModel, StepEngine
from kvalet.runtime.geometry import KVGeometry
from kvalet.runtime.rows import GrammarSource
from kvalet.runtime.slab import Slab
from kvalet.runtime.spec import ModelSpec
from kvalet.runtime.tokenizer import Tokenizer
from kvalet.runtime.transfer import Copier
from kvalet.sched.ports import CopierPort, EnginePort


@dataclass(frozen=True, slots=True)
class Model:
    """What everybody else must know of a loaded model. ``arithmetic``: for the start's lines."""

    spec: ModelSpec
    tokenizer: Tokenizer
    identity: dict[str, str]
    context_tokens: int
    weights_bytes: int
    arithmetic: str
    kv_dtype: str


class DeviceBuild(Protocol):
    """The calls come in this order: ``load``, ``plan``, ``engine``, ``copier``."""

    def load(self, chosen: RuntimeConfig) -> Model: ...

    def plan(self, geometry: KVGeometry) -> MemoryPlan: ...

    def engine(self, plan: MemoryPlan, grammars: GrammarSource | None) -> EnginePort: ...

    def copier(self, plan: MemoryPlan, geometry: KVGeometry, opened: ExitStack) -> tuple[Slab | None, CopierPort]: ...


class CpuBuild:
    """``loader``: ``runtime.engine.load_model``."""

    def __init__(self, config: EngineConfig, loader: Callable[[RuntimeConfig], LoadedModel]) -> None:
        self._config, self._loader = config, loader

    def load(self, chosen: RuntimeConfig) -> Model:
        self._chosen, self._model = chosen, self._loader(chosen)
        model = self._model
        arithmetic, weights = model.identity["numerics"], model.decoder.weights
        if weights.path == "auto":
            arithmetic += f" (int4 up to {weights.switch_rows} rows)"
        return Model(
            model.spec,
            model.tokenizer,
            model.identity,
            model.context_tokens,
            model.weights_bytes,
            arithmetic,
            chosen.kv_dtype,
        )

    def plan(self, geometry: KVGeometry) -> MemoryPlan:
        return tiers_plan(self._config, geometry, self._model.context_tokens)

    def engine(self, plan: MemoryPlan, grammars: GrammarSource | None) -> EnginePort:
        chosen = replace(self._chosen, n_pages=plan.n_pages, arena_tokens=plan.arena_tokens)
        self._engine = StepEngine(chosen, self._model, grammars)
        return self._engine

    def copier(self, plan: MemoryPlan, geometry: KVGeometry, opened: ExitStack) -> tuple[Slab | None, CopierPort]:
        slab = make_slab(geometry, plan, opened)
        return slab, Copier(self._engine.pool, slab, geometry) if slab is not None else NoCopies()


def tiers_plan(config: EngineConfig, geometry: KVGeometry, context_tokens: int, device_pages: int = 0) -> MemoryPlan:
    """``plan_memory`` with what this machine has left now."""
    memory = available_memory()
    disk = free_disk_bytes(config.store_dir) + folder_bytes(config.store_dir) if config.store_dir else 0
    return plan_memory(
        config,
        geometry,
        context_tokens=context_tokens,
        available_bytes=memory.available_bytes,
        limited_by=memory.limited_by,
        free_disk_bytes=disk,
        device_pages=device_pages,
    )
