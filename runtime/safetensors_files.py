"""The tensors of a Hugging Face folder: one model.safetensors, or the shards that model.safetensors.index.json lists.

The files are mapped, not read: a tensor is copied from the mapping straight to where it is wanted. Headers are checked by the
``safetensors`` package (offsets, sizes, the file's own length); here shapes and types are compared with what the model needs.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import xxhash
from kvalet.runtime.errors import ModelError
from kvalet.runtime.spec import ModelSpec
from kvalet.runtime.tensor_source import EMBED, HEAD, NORM, roles
from safetensors import SafetensorError, safe_open
from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
MAX_INDEX_BYTES = 64 << 20
MAX_SHARDS = 10_000
HARMLESS = ".rotary_emb.inv_freq"
"""Ending of tensors that old checkpoints carry beside the weights: what ``rope`` computes by itself."""

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GLOBAL = {EMBED: "model.embed_tokens.weight", NORM: "model.norm.weight", HEAD: "lm_head.weight"}


def file_name_of(role: str) -> str:
    """The name that a checkpoint of these families gives the role; "" for a role that it never has."""
    if role in _GLOBAL:
        return _GLOBAL[role]
    if not role.startswith("blk."):
        return ""
    _, layer, part, ending = role.split(".")
    return f"model.layers.{layer}.{_NAMES[part]}.{ending}"


def shard_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The weight files, in order of name, and tensor -> file as the index says (empty without one). ModelError where the
    folder has none, or one that is listed is missing."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE], {}
    index = folder / INDEX
    if not index.is_file():
        raise ModelError(_no_weights(folder))
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise ModelError(f"{index} is larger than {MAX_INDEX_BYTES} bytes")
        listed = json.loads(index.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{index} cannot be read: {error}") from None
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()) or not listed:
        raise ModelError(f"{index} has no weight_map of tensor and file names")
    names = sorted(set(listed.values()))
    if len(names) > MAX_SHARDS:
        raise ModelError(f"{index} lists {len(names)} files, more than {MAX_SHARDS}")
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index} lists {name[:80]!r}, which is no safetensors file of this folder")
        if not (folder / name).is_file():
            raise ModelError(f"model folder {folder} lacks {name}, one of {len(names)} files that {INDEX} lists")
    return [folder / name for name in names], listed


def _no_weights(folder: Path) -> str:
    pickled = sorted(p.name for ending in ("*.bin", "*.pt", "*.pth") for p in folder.glob(ending))
    if pickled:
        return (
            f"model folder {folder} has its weights in {pickled[0]}, a pickle, which is never loaded because it may run code;"
            " use a revision with safetensors files, or save the model again with transformers' save_pretrained"
        )
    return f"model folder {folder} has neither {SINGLE} nor {INDEX}"


class SafetensorsTensors:
    """See ``TensorSource``. Holds the mappings until ``close``."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        """Opens every file. ModelError for a missing, short or damaged one, and where index and files disagree."""
        self.label = f"model folder {folder}"
        self._spec = spec
        self.files, listed = shard_files(folder)
        self._shards = {path.name: _open(path) for path in self.files}
        self._where: dict[str, str] = {}
        for file, shard in self._shards.items():
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                if name in self._where:
                    raise ModelError(f"{self.label} has tensor {name} in {self._where[name]} and in {file}")
                self._where[name] = file
        for name, file in listed.items():
            if self._where.get(name) != file:
                raise ModelError(f"tensor {name} is not in {file} of {self.label}, although {INDEX} says so")

    def __contains__(self, role: str) -> bool:
        return file_name_of(role) in self._where

    def load(self, role: str, out: Tensor) -> None:
        out.copy_(self._tensor(file_name_of(role), tuple(out.shape)))

    def surplus(self) -> list[str]:
        known = {file_name_of(role) for role, _ in roles(self._spec)}
        found = sorted(name for name in self._where.keys() - known if not name.endswith(HARMLESS))
        if self._spec.tied and _GLOBAL[HEAD] in found:
            self._check_tied()
            found.remove(_GLOBAL[HEAD])
        return found

    def _check_tied(self) -> None:
        """Some checkpoints hold the tied head a second time: harmless if it is the embedding."""
        shape = (self._spec.vocab, self._spec.hidden)
        if not torch.equal(self._tensor(_GLOBAL[EMBED], shape), self._tensor(_GLOBAL[HEAD], shape)):
            raise ModelError(f"{self.label} has tie_word_embeddings true, but its lm_head.weight is not its embedding")

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        file = self._where.get(name)
        if file is None:
            raise ModelError(f"{self.label} has no tensor {name}")
        part = self._shards[file].get_slice(name)
        found, dtype = part.get_shape(), part.get_dtype()
        if tuple(found) != shape:
            raise ModelError(f"tensor {name} in {file} of {self.label} has shape {list(found)}, not {list(shape)}")
        if dtype not in DTYPES:
            raise ModelError(f"tensor {name} in {file} of {self.label} is of type {dtype}; supported are {', '.join(DTYPES)}")
        tensor: Tensor = self._shards[file].get_tensor(name)
        return tensor

    def shard_digest(self, path: Path) -> str:
        """32 hex digits over names, types, shapes and bytes of one file's tensors. Digests of shards add up (modulo 2**128) to
        that of the model, so that it does not depend on how the tensors are spread over files."""
        shard = self._shards[path.name]
        total = 0
        for name in shard.keys():  # noqa: SIM118
            part = shard.get_slice(name)
            state = xxhash.xxh3_128(f"{name}|{tuple(part.get_shape())}|{part.get_dtype()}|".encode())
            if math.prod(part.get_shape()):
                state.update(shard.get_tensor(name).reshape(-1).view(torch.uint8).numpy().data)
            total += state.intdigest()
        return f"{total % (1 << 128):032x}"

    def close(self) -> None:
        """Let the mappings go; tensors that were handed out keep theirs. Idempotent."""
        self._shards.clear()


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"model file {path} is damaged or cut short: {error}") from None
