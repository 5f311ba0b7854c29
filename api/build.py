"""From one configuration to everything that an engine is made of, with progress. Blocking: runs on a worker thread.

Pool, slab and arenas are sized here, once, and never grow. What was chosen, clamped or left out is told in ``Parts.banner``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvalet.api.build_config import resolved, runtime_config, sched_config
from kvalet.api.build_device import CpuBuild, DeviceBuild, Model
from kvalet.api.build_tiers import NoDisk, no_slot, open_store
from kvalet.api.config import EngineConfig
from kvalet.api.device_choice import choose_device
from kvalet.api.fetch_model import cache_dir
from kvalet.api.memory_plan import MemoryPlan, PlanError
from kvalet.api.model_place import ModelPlace, NoModel, find_model
from kvalet.api.prompts import Prompts
from kvalet.api.template import ChatTemplate
from kvalet.runtime.engine import load_model
from kvalet.runtime.errors import RuntimeFault
from kvalet.runtime.geometry import KVGeometry
from kvalet.runtime.grammar import GrammarCache, GrammarError
from kvalet.runtime.plan import SlotId
from kvalet.runtime.slab import SlabError
from kvalet.runtime.tokenizer import Tokenizer, TokenizerError
from kvalet.sched.config import SchedConfig
from kvalet.sched.core import Core
from kvalet.sched.ports import CopierPort, EnginePort
from kvalet.sched.tick import DecisionCore
from kvalet.store.errors import StoreError
from kvalet.store.ids import Identity
from kvalet.store.store import DiskStore

if TYPE_CHECKING:
    from kvalet.api.build_cuda import DeviceKit

STEPS = 5
Progress = Callable[[int, int, str], None]
"""(step, of, what): called before each step, on the building thread."""


class StartError(Exception):
    """Why the engine cannot start: one sentence for a person. Nothing is left behind."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine owns. ``close`` gives everything back, in order; call it once, after the scheduler has ended."""

    core: DecisionCore
    step_engine: EnginePort
    copier: CopierPort
    store: DiskStore | None
    slot_view: Callable[[SlotId], memoryview]
    tokenizer: Tokenizer
    prompts: Prompts
    plan: MemoryPlan
    model_id: str
    context_tokens: int
    created: int
    banner: tuple[str, ...]
    close: Callable[[], None]


def build(config: EngineConfig, progress: Progress | None = None, kit: DeviceKit | None = None) -> Parts:
    """StartError for whatever is wrong with the model file, the sizes, the store's directory, or the configuration.

    ``kit``: the device that ``api.build_cuda`` builds on, whatever ``config.device`` says; None: what that says."""
    tell = progress if progress is not None else _silent
    try:
        with ExitStack() as opened:
            return _build(config, tell, opened, kit)
    except (RuntimeFault, TokenizerError, GrammarError, PlanError, SlabError, StoreError, NoModel) as error:
        raise StartError(str(error)) from error
    except MemoryError as error:
        raise StartError("there is not enough memory for the model; try --weights int4 or smaller sizes") from error


def _build(config: EngineConfig, tell: Progress, opened: ExitStack, kit: DeviceKit | None) -> Parts:
    with _contradictions():
        name, device_note = choose_device(config.device) if kit is None else ("cuda", "")
    config = resolved(config, name)
    place = find_model(config.model)
    tell(1, STEPS, f"reading {place.name}" if config.load_format == "auto" else f"making random weights for {place.name}")
    with _contradictions():
        chosen = runtime_config(config, place.path, cache_dir())
    device = _device(config, tell, kit)
    model = device.load(chosen)
    with _contradictions():  # a tokenizer that llguidance cannot read
        grammars = None if model.tokenizer.ids_only else GrammarCache(model.tokenizer)
    tell(2, STEPS, "sizing pool, RAM tier and disk tier")
    geometry = model.spec.geometry(model.kv_dtype)
    plan = device.plan(geometry)
    tell(3, STEPS, f"making the pool: {plan.pool_tokens:,} tokens")
    step_engine = device.engine(plan, grammars)
    identity = Identity.of(model.identity)
    tell(4, STEPS, f"making the slab: {plan.ram_slots} + {plan.staging_slots} slots")
    slab, copier = device.copier(plan, geometry, opened)
    tell(5, STEPS, "opening the store" if plan.store_bytes else "no disk tier")
    with _contradictions():
        store, store_note = open_store(config, geometry, plan, identity, opened)
        sched = sched_config(config, geometry, plan, identity, model.context_tokens)
    template, template_note = _template(model)
    prompts = Prompts(
        model.tokenizer,
        grammars,
        template,
        context_tokens=model.context_tokens,
        default_max_tokens=config.default_max_tokens,
        ids_only=model.tokenizer.ids_only,
    )
    cut = (
        f"context: {model.context_tokens:,} tokens, the model's own limit"
        if model.context_tokens < config.context_tokens
        else ""
    )
    notes = [*plan.notes, *(note for note in (device_note, store_note, template_note, cut) if note)]
    banner = _banner(config, place, model, geometry, plan, store, sched, notes)
    return Parts(
        core=Core(sched, store if store is not None else NoDisk()),
        step_engine=step_engine,
        copier=copier,
        store=store,
        slot_view=slab.view if slab is not None else no_slot,
        tokenizer=model.tokenizer,
        prompts=prompts,
        plan=plan,
        model_id=config.served_name or place.name,
        context_tokens=model.context_tokens,
        created=int(place.path.stat().st_mtime),
        banner=tuple(banner),
        close=opened.pop_all().close,
    )


@contextmanager
def _contradictions() -> Iterator[None]:
    """Frozen configurations refuse values that contradict each other with a ValueError; here it becomes the sentence."""
    try:
        yield
    except ValueError as error:
        raise StartError(str(error)) from error


def _silent(step: int, of: int, what: str) -> None:
    pass


def _device(config: EngineConfig, tell: Progress, kit: DeviceKit | None) -> DeviceBuild:
    if config.device == "cpu":
        return CpuBuild(config, load_model)
    from kvalet.api.build_cuda import CudaBuild, CudaKit

    return CudaBuild(config, kit if kit is not None else CudaKit(), lambda what: tell(4, STEPS, what))


def _template(model: Model) -> tuple[ChatTemplate | None, str]:
    """None, with the reason, for a model that can only complete text."""
    source = model.spec.chat_template
    if model.tokenizer.ids_only:
        return None, "the folder has no tokenizer: prompts are lists of token ids, answers the ids as text, chat is off"
    if not source:
        return None, "chat is off: the model has no chat template"
    names = {token_id: text for text, token_id in model.tokenizer.control_ids.items()}
    variables = model.spec.template_tokens or {
        "bos_token": names.get(model.tokenizer.bos_id or -1, ""),
        "eos_token": _end_text(model.tokenizer, names),
    }
    try:
        return ChatTemplate(source, list(model.tokenizer.control_ids), variables), ""
    except ValueError as error:
        return None, f"chat is off: {error}"


def _end_text(tokenizer: Tokenizer, names: dict[int, str]) -> str:
    return next((names[token_id] for token_id in sorted(tokenizer.end_ids, reverse=True) if token_id in names), "")


def _banner(
    config: EngineConfig,
    place: ModelPlace,
    model: Model,
    geometry: KVGeometry,
    plan: MemoryPlan,
    store: DiskStore | None,
    sched: SchedConfig,
    notes: list[str],
) -> list[str]:
    arena = f" arena {plan.arena_tokens:,} tokens," if plan.arena_tokens else ""
    lines = [
        f"model {place.name}: {model.spec.n_layers} layers, {model.context_tokens:,} tokens of context, {model.arithmetic},"
        f" weights {_mib(model.weights_bytes)}",
        f"pool {plan.pool_tokens:,} tokens ({_mib(plan.pool_bytes)}),{arena}"
        f" {sched.max_rows} rows, chunks of {geometry.chunk_tokens} tokens",
        f"RAM tier {_mib(plan.ram_bytes)} ({plan.ram_slots} chunks), staging {_mib(plan.staging_bytes)}",
    ]
    if store is not None:
        lines.append(f"disk tier {config.store_dir}: {_mib(plan.store_bytes)} at most, {store.found.files:,} files found")
    else:
        lines.append("disk tier off" + ("" if config.store_dir else " (give --store DIR)"))
    return [*lines, *(f"note: {note}" for note in notes)]


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 20):,.0f} MiB"
