"""The default model's tokenizer, read once per test session with the reference reader of GGUF files."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from gguf import GGUFReader
from kvalet.runtime.tokenizer import Tokenizer, TokenizerArrays, build_tokenizer


@lru_cache(maxsize=1)
def read_arrays(path: Path) -> TokenizerArrays:
    fields = GGUFReader(path).fields

    def field(name: str) -> object:
        return fields[f"tokenizer.ggml.{name}"].contents()

    return TokenizerArrays(
        model=str(field("model")),
        pre=str(field("pre")),
        tokens=tuple(field("tokens")),
        token_type=tuple(field("token_type")),
        merges=tuple(field("merges")),
        add_bos_token=bool(field("add_bos_token")),
        bos_token_id=int(field("bos_token_id")),
        eos_token_id=int(field("eos_token_id")),
    )


@lru_cache(maxsize=1)
def read_tokenizer(path: Path) -> Tokenizer:
    return build_tokenizer(read_arrays(path))
