"""The parts of an engine on a GPU. Order: weights, then the pool from what they leave, then the graphs over the pool.

What is CUDA about it comes from a ``DeviceKit``: with plain torch in its place the same is built, and tested, on the CPU.
"""

from __future__ import annotations

import importlib.metadata
import resource
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol

import torch
from kvalet.api.build_device import Model, tiers_plan
from kvalet.api.build_tiers import NoCopies
from kvalet.api.config import EngineConfig
from kvalet.api.device_plan import DeviceMemory, overhead_bytes, plan_pool
from kvalet.api.memory_plan import MemoryPlan, PlanError
from kvalet.runtime.config import EngineConfig as RuntimeConfig
from kvalet.runtime.cuda_decoder import CudaDecoder
from kvalet.runtime.cuda_engine import CudaEngine
from kvalet.runtime.cuda_pool import CudaCopier, CudaPool
from kvalet.runtime.cuda_slab import CudaHostMemory, HostMemory, RegisteredSlab
from kvalet.runtime.cuda_step import BUCKETS, buckets_for
from kvalet.runtime.device_ops import DeviceOps
from kvalet.runtime.geometry import KVGeometry
from kvalet.runtime.identity import ARITHMETIC, identity_fields
from kvalet.runtime.loading import open_model
from kvalet.runtime.plain_weights import PlainWeights, load_plain
from kvalet.runtime.rows import GrammarSource, TextContext
from kvalet.runtime.slab import Slab
from kvalet.runtime.spec import ModelSpec
from kvalet.sched.ports import CopierPort, EnginePort

HEAD_DIMS = (64, 128, 256)
"""What FlashInfer's paged kernels are compiled for."""
SLAB_THREADS = 8


class DeviceKit(Protocol):
    """One kind of device. ``arithmetic``: names its kernels and card, where equal bits are promised."""

    def ops(self) -> DeviceOps: ...

    def memory(self) -> DeviceMemory: ...

    def host_memory(self) -> HostMemory: ...

    def arithmetic(self) -> str: ...


class CudaKit:
    """The process's current CUDA device."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())

    def ops(self) -> DeviceOps:
        from kvalet.runtime.cuda_ops import CudaOps

        return CudaOps(self._device)

    def memory(self) -> DeviceMemory:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return DeviceMemory(total, free)

    def host_memory(self) -> HostMemory:
        return CudaHostMemory()

    def arithmetic(self) -> str:
        flashinfer = importlib.metadata.version("flashinfer-python")
        return f"{torch.cuda.get_device_name(self._device)}-flashinfer{flashinfer}".replace(" ", "-")


class CudaBuild:
    """``api.build_device.DeviceBuild``. ``say``: told what takes long, on the building thread and (slab) on another."""

    def __init__(self, config: EngineConfig, kit: DeviceKit, say: Callable[[str], None]) -> None:
        self._config, self._kit, self._say = config, kit, say
        self._rows = config.decode_rows if config.deterministic else config.max_rows

    def load(self, chosen: RuntimeConfig) -> Model:
        """PlanError for what the device cannot do, by name; ModelError, TokenizerError as ``open_model``."""
        self._chosen, self._ops = chosen, self._kit.ops()
        with open_model(chosen.model, cache_dir=chosen.cache_dir, load_format=chosen.load_format) as files:
            fault = unsupported(self._config, files.spec)
            if fault:
                raise PlanError(fault)
            self._spec, self._tokenizer = files.spec, files.tokenizer
            self._weights = load_plain(files.source, files.spec, torch.bfloat16, self._ops.device)
            digest = files.weights_digest()
        self._context = self._spec.served_context(chosen.context_tokens)
        family = numerics(self._config, self._kit.arithmetic())
        identity = identity_fields(
            chosen, self._spec, weights=digest, path="bf16", tokenizer=self._tokenizer.digest, family=family
        )
        return Model(
            self._spec, self._tokenizer, identity, self._context, weights_bytes(self._weights), family, chosen.kv_dtype
        )

    def plan(self, geometry: KVGeometry) -> MemoryPlan:
        overhead = overhead_bytes(
            self._spec,
            max_step_tokens=self._chosen.max_step_tokens,
            max_rows=self._config.max_rows,
            buckets=(self._rows,) if self._config.deterministic else buckets_for(self._rows),
        )
        pool = plan_pool(self._config, geometry, self._kit.memory(), context_tokens=self._context, overhead=overhead)
        made = tiers_plan(self._config, geometry, self._context, pool.n_pages)
        return replace(made, notes=(*pool.notes, *memlock_notes(made), *made.notes))

    def engine(self, plan: MemoryPlan, grammars: GrammarSource | None) -> EnginePort:
        """Captures the graphs; the first start on a machine compiles the kernels, which takes minutes."""
        spec = self._spec
        self._pool = CudaPool(spec.geometry(self._chosen.kv_dtype), plan.n_pages, self._ops.device)
        decoder = CudaDecoder(spec, self._weights, self._pool.pages, self._context + 1, self._ops)
        text = TextContext(self._tokenizer, spec.vocab, self._tokenizer.end_ids, grammars)
        self._say("capturing decode graphs (the first start on a machine compiles kernels: minutes)")
        return CudaEngine(
            decoder,
            self._pool,
            text,
            max_rows=self._config.max_rows,
            max_step_tokens=self._chosen.max_step_tokens,
            deterministic=self._config.deterministic,
            decode_rows=self._config.decode_rows,
        )

    def copier(self, plan: MemoryPlan, geometry: KVGeometry, opened: ExitStack) -> tuple[Slab | None, CopierPort]:
        slots = plan.ram_slots + plan.staging_slots
        if not slots:
            return None, NoCopies()
        slab = Slab(geometry, slots, populate=False)
        opened.callback(slab.close)
        registered = RegisteredSlab(slab, self._kit.host_memory(), threads=SLAB_THREADS, progress=self._tell_slab)
        opened.callback(registered.close)
        return slab, CudaCopier(self._pool, registered, self._ops)

    def _tell_slab(self, ready: int, of: int) -> None:
        self._say(f"slab: {ready / (1 << 30):,.1f} of {of / (1 << 30):,.1f} GiB ready")


def unsupported(config: EngineConfig, spec: ModelSpec) -> str:
    """What of the configuration or the model a GPU cannot serve, in one sentence; "" if all is well. Pure."""
    if config.weights not in ("auto", "bf16"):
        return f"--weights {config.weights} is for the CPU: on a GPU give auto or bf16"
    if spec.head_dim not in HEAD_DIMS:
        return f"heads of {spec.head_dim} are not supported on a GPU, only {', '.join(map(str, HEAD_DIMS))}; use --device cpu"
    if spec.n_q_heads % spec.n_kv_heads:
        return f"{spec.n_q_heads} query heads over {spec.n_kv_heads} KV heads are not supported on a GPU; use --device cpu"
    if config.deterministic and config.decode_rows > BUCKETS[-1]:
        return f"--decode-rows {config.decode_rows} is more than the {BUCKETS[-1]} rows of the largest graph"
    return ""


def numerics(config: EngineConfig, arithmetic: str) -> str:
    """The numerics family (``runtime.identity``): the kind of arithmetic, and under ``deterministic`` everything that makes the
    bits. Pure."""
    if not config.deterministic:
        return "cuda-bf16"
    return f"cuda-bf16-deterministic-rows{config.decode_rows}-arithmetic{ARITHMETIC}-torch{torch.__version__}-{arithmetic}"


def weights_bytes(weights: PlainWeights) -> int:
    """Bytes of all tensors; a tied head counts once."""
    tensors = [weights.embed, weights.norm] + ([weights.head] if weights.head is not weights.embed else [])
    for layer in weights.layers:
        tensors += [tensor for name in type(layer).__slots__ if (tensor := getattr(layer, name)) is not None]
    return sum(tensor.nbytes for tensor in tensors)


def memlock_notes(plan: MemoryPlan, limit: int | None = None) -> tuple[str, ...]:
    """A driver may refuse to register more than the limit; most do not look at it. ``limit``: bytes, None: this process's."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    needed = plan.ram_bytes + plan.staging_bytes
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return ()
    return (
        f"`ulimit -l` allows {soft >> 20:,} MiB of locked memory and the slab is {needed >> 20:,} MiB: if registering it fails,"
        " raise the limit or give a smaller --ram-bytes",
    )
