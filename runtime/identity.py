"""What stored KV bytes mean: the fields of the identity. Two engines with equal fields may read each other's bytes.

The digest over the fields is store's (``store.ids.Identity.of``); here is what goes into it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import xxhash
from kvalet.runtime.config import EngineConfig
from kvalet.runtime.gguf import GgufFile
from kvalet.runtime.safetensors_files import SafetensorsTensors
from kvalet.runtime.spec import ModelSpec

LAYOUT_VERSION = "1"
"""Of the page layout [page, layer, 2, token, kv_head, head_dim] and of everything else that is not a field of its own."""

ARITHMETIC = "2"
"""Counts changes of this code that change bits: part of the numerics where equal bits are promised. 2: products over blocks in
prefill and another packing, both on processors without AMX."""

CACHE_NAME = "weight-digests.json"
CACHE_ENTRIES = 1024
"""Files remembered (a large model has a hundred); beyond it the oldest entry goes."""


def weight_digest(file: GgufFile, cache_dir: Path | None) -> str:
    """xxh3-128 (hex) over names, shapes, types and bytes of all tensors, in order of name; cached, see ``cached_digest``."""

    def compute() -> str:
        state = xxhash.xxh3_128()
        for name in sorted(file.tensors):
            info = file.tensors[name]
            state.update(f"{name}|{info.shape}|{info.kind.name}|".encode())
            state.update(file.data(name).data)
        digest: str = state.hexdigest()
        return digest

    return cached_digest(file.path, cache_dir, compute)


def folder_digest(source: SafetensorsTensors, cache_dir: Path | None) -> str:
    """The sum (modulo 2**128, hex) of its shards' digests, each cached by itself: other shards with the same tensors give the
    same digest."""
    digests = [cached_digest(path, cache_dir, partial(source.shard_digest, path)) for path in source.files]
    return f"{sum(int(digest, 16) for digest in digests) % (1 << 128):032x}"


def cached_digest(path: Path, cache_dir: Path | None, compute: Callable[[], str]) -> str:
    """``compute()`` (32 hex digits), remembered by (device, inode, size, mtime in ns) of the file: 100 MB take 10 ms, a
    model of 10 GB takes seconds.

    A cache that cannot be read or written is no error: the digest is computed.
    """
    stat = os.stat(path)
    key = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}"
    cache = None if cache_dir is None else cache_dir / CACHE_NAME
    entries = {} if cache is None else _read(cache)
    if key in entries:
        return entries[key]
    digest = compute()
    if cache is not None:
        _write(cache, dict([*entries.items(), (key, digest)][-CACHE_ENTRIES:]))
    return digest


def _read(cache: Path) -> dict[str, str]:
    try:
        entries = json.loads(cache.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(entries, dict):
        return {}
    return {str(key): value for key, value in entries.items() if isinstance(value, str) and len(value) == 32}


def _write(cache: Path, entries: dict[str, str]) -> None:
    temporary = cache.with_name(f"{cache.name}.{os.getpid()}.tmp")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(entries))
        os.replace(temporary, cache)
    except OSError:
        with contextlib.suppress(OSError):  # the folder itself may be what is wrong
            temporary.unlink()


def numerics_family(config: EngineConfig, path: str) -> str:
    """Which arithmetic makes the bits. ``path``: the weights that compute ("bf16", "fp32", "int4", "auto").

    Under ``deterministic`` equal bits are promised, so mode, ARITHMETIC, row count, torch and instruction set are part of it;
    without it only the kind of arithmetic is: other kernels of the same kind make KV that serves as well.
    """
    family = f"cpu-{path}"
    if config.deterministic:
        capability = torch.backends.cpu.get_cpu_capability().lower()
        amx = "-amx" if torch.cpu._is_amx_tile_supported() else ""
        family += f"-deterministic-rows{config.decode_rows}-arithmetic{ARITHMETIC}-torch{torch.__version__}-{capability}{amx}"
    return family


def describe_decoder(spec: ModelSpec) -> str:
    """What the configuration, not the weights, decides about KV: heads, norms, windows, layers without rotation."""
    text = f"heads={spec.n_q_heads} eps={spec.eps:.9g}"
    if spec.window_layers:
        text += f" window={spec.window} in {sorted(spec.window_layers)}"
    return text + (f" nope in {sorted(spec.nope_layers)}" if spec.nope_layers else "")


def identity_fields(
    config: EngineConfig, spec: ModelSpec, *, weights: str, path: str, tokenizer: bytes, family: str = ""
) -> dict[str, str]:
    """All fields, as text. ``weights``: ``weight_digest``; ``path``: see ``numerics_family``; ``tokenizer``: digest.
    ``family``: the numerics family, "" = that of the CPU."""
    geometry = spec.geometry(config.kv_dtype)
    rope = spec.rope.describe(spec.served_context(config.context_tokens))
    return {
        "model": spec.architecture,
        "weights": weights,
        "weights_mode": path,
        "kv_dtype": geometry.kv_dtype,
        "layers": str(geometry.n_layers),
        "kv_heads": str(geometry.n_kv_heads),
        "head_dim": str(geometry.head_dim),
        "page_tokens": str(geometry.page_tokens),
        "chunk_tokens": str(geometry.chunk_tokens),
        "page_stride_bytes": str(geometry.page_stride_bytes),
        "rope": f"rotate-half dim={spec.head_dim} {rope}",
        "decoder": describe_decoder(spec),
        "layout": LAYOUT_VERSION,
        "byte_order": sys.byteorder,
        "numerics": family or numerics_family(config, path),
        "tokenizer": tokenizer.hex(),
    }
