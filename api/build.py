"""From one configuration to everything that an engine is made of, with progress. Blocking: runs on a worker thread.

Pool, slab and arenas are sized here, once, and never grow. What was chosen, clamped or left out is told in ``Parts.banner``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from kvalet.api.build_config import runtime_config, sched_config
from kvalet.api.build_tiers import NoCopies, NoDisk, make_slab, no_slot, open_store
from kvalet.api.config import EngineConfig
from kvalet.api.fetch_model import cache_dir
from kvalet.api.machine import available_memory, folder_bytes, free_disk_bytes
from kvalet.api.memory_plan import MemoryPlan, PlanError, plan_memory
from kvalet.api.model_place import ModelPlace, NoModel, find_model
from kvalet.api.prompts import Prompts
from kvalet.api.template import ChatTemplate
from kvalet.runtime.engine import LoadedModel, StepEngine, load_model
from kvalet.runtime.errors import RuntimeFault
from kvalet.runtime.geometry import KVGeometry
from kvalet.runtime.grammar import GrammarCache, GrammarError
from kvalet.runtime.plan import SlotId
from kvalet.runtime.slab import SlabError
from kvalet.runtime.tokenizer import Tokenizer, TokenizerError
from kvalet.runtime.transfer import Copier
from kvalet.sched.config import SchedConfig
from kvalet.sched.core import Core
from kvalet.sched.ports import CopierPort, EnginePort
from kvalet.sched.tick import DecisionCore
from kvalet.store.errors import StoreError
from kvalet.store.ids import Identity
from kvalet.store.store import DiskStore

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


def build(config: EngineConfig, progress: Progress | None = None) -> Parts:
    """StartError for whatever is wrong with the model file, the sizes, the store's directory, or the configuration."""
    tell = progress if progress is not None else _silent
    try:
        with ExitStack() as opened:
            return _build(config, tell, opened)
    except (RuntimeFault, TokenizerError, GrammarError, PlanError, SlabError, StoreError, NoModel) as error:
        raise StartError(str(error)) from error
    except MemoryError as error:
        raise StartError("there is not enough memory for the model; try --weights int4 or smaller sizes") from error


def _build(config: EngineConfig, tell: Progress, opened: ExitStack) -> Parts:
    if config.device != "cpu":
        raise StartError(f"device {config.device!r} is not supported by this version; use 'cpu'")
    place = find_model(config.model)
    tell(1, STEPS, f"reading {place.name}" if config.load_format == "auto" else f"making random weights for {place.name}")
    with _contradictions():
        chosen = runtime_config(config, place.path, cache_dir())
    model = load_model(chosen)
    grammars = None if model.tokenizer.ids_only else GrammarCache(model.tokenizer)
    tell(2, STEPS, "sizing pool, RAM tier and disk tier")
    geometry = model.spec.geometry(chosen.kv_dtype)
    plan = _plan(config, geometry, model.context_tokens)
    tell(3, STEPS, f"making the pool: {plan.pool_tokens:,} tokens")
    chosen = replace(chosen, n_pages=plan.n_pages, arena_tokens=plan.arena_tokens)
    step_engine = StepEngine(chosen, model, grammars)
    identity = Identity.of(model.identity)
    tell(4, STEPS, f"making the slab: {plan.ram_slots} + {plan.staging_slots} slots")
    slab = make_slab(geometry, plan, opened)
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
    notes = [*plan.notes, *(note for note in (store_note, template_note) if note)]
    banner = _banner(config, place, model, geometry, plan, store, sched, notes)
    return Parts(
        core=Core(sched, store if store is not None else NoDisk()),
        step_engine=step_engine,
        copier=Copier(step_engine.pool, slab, geometry) if slab is not None else NoCopies(),
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


def _plan(config: EngineConfig, geometry: KVGeometry, context_tokens: int) -> MemoryPlan:
    memory = available_memory()
    disk = free_disk_bytes(config.store_dir) + folder_bytes(config.store_dir) if config.store_dir else 0
    return plan_memory(
        config,
        geometry,
        context_tokens=context_tokens,
        available_bytes=memory.available_bytes,
        limited_by=memory.limited_by,
        free_disk_bytes=disk,
    )


def _template(model: LoadedModel) -> tuple[ChatTemplate | None, str]:
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
    model: LoadedModel,
    geometry: KVGeometry,
    plan: MemoryPlan,
    store: DiskStore | None,
    sched: SchedConfig,
    notes: list[str],
) -> list[str]:
    family = model.identity["numerics"]
    weights = model.decoder.weights
    if weights.path == "auto":
        family += f" (int4 up to {weights.switch_rows} rows)"
    lines = [
        f"model {place.name}: {model.spec.n_layers} layers, {model.context_tokens:,} tokens of context, {family},"
        f" weights {_mib(model.weights_bytes)}",
        f"pool {plan.pool_tokens:,} tokens ({_mib(plan.pool_bytes)}), arena {plan.arena_tokens:,} tokens,"
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
