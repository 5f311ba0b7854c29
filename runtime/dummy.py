"""Random weights of a real shape (``--load-format dummy``): for measuring a model that is not there. Only its config.json is.

Every tensor has a seed of its own, made from its name, so that each is the same whatever order and device fills it with one
kind of generator. Scaled so that activations stay finite at any depth.
"""

from __future__ import annotations

import json
import math
import zlib

import torch
from kvalet.runtime.spec import ModelSpec
from kvalet.runtime.tensor_source import roles
from kvalet.runtime.tokenizer import Alphabet, Tokenizer
from torch import Tensor

SEED = 0


class DummyTensors:
    """See ``TensorSource``: norms are ones, biases zeros, matrices normal with variance 1 / columns."""

    def __init__(self, spec: ModelSpec, seed: int = SEED) -> None:
        self.label = f"dummy weights of {spec.name}"
        self._seed = seed
        self._shapes = dict(roles(spec))

    def __contains__(self, role: str) -> bool:
        return role in self._shapes

    def load(self, role: str, out: Tensor) -> None:
        if out.dim() == 1:
            out.fill_(0.0 if role.endswith(".bias") else 1.0)
            return
        generator = torch.Generator(device=out.device).manual_seed(zlib.crc32(f"{self._seed} {role}".encode()))
        out.normal_(0.0, 1.0 / math.sqrt(out.shape[-1]), generator=generator)

    def surplus(self) -> list[str]:
        return []

    def digest(self) -> str:
        """Instead of one over bytes: over the seed and all shapes, from which the bytes follow."""
        return f"dummy-{self._seed}-{zlib.crc32(json.dumps(self._shapes).encode()):08x}"


def ids_tokenizer(vocab: int, end_ids: frozenset[int]) -> Tokenizer:
    """For a folder without a tokenizer: the text of an id is its decimal number and a space, so that answers say what they
    are. Texts cannot be encoded (api refuses them); prompts are lists of ids."""
    fields = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {str(i): i for i in range(vocab)}, "unk_token": "0"},
    }
    digest = f"ids-{vocab}".encode().ljust(32, b"\0")[:32]
    return Tokenizer(json.dumps(fields), digest, bos_id=None, end_ids=end_ids, alphabet=Alphabet.IDS)
