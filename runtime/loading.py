"""Opening a model: a GGUF file, a Hugging Face folder, or a folder's shape with random weights. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from kvalet.runtime.dummy import DummyTensors, ids_tokenizer
from kvalet.runtime.errors import ModelError
from kvalet.runtime.gguf import GgufFile
from kvalet.runtime.gguf_tensors import GgufTensors
from kvalet.runtime.hf_config import spec_of_config
from kvalet.runtime.hf_folder import (
    CONFIG,
    GENERATION,
    MAX_TOKENIZER_BYTES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    read_config,
    read_end_ids,
    read_object,
    read_template,
    read_template_tokens,
    read_text,
)
from kvalet.runtime.hf_tokenizer import tokenizer_of_json
from kvalet.runtime.identity import folder_digest, weight_digest
from kvalet.runtime.safetensors_files import SafetensorsTensors
from kvalet.runtime.spec import ModelSpec, read_spec, read_tokenizer
from kvalet.runtime.tensor_source import TensorSource
from kvalet.runtime.tokenizer import Tokenizer
from kvalet.runtime.tokenizer_cache import load_tokenizer


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """An open model: what it is, where its tensors come from, its tokenizer. ``weights_digest()``: see ``runtime.identity``; it
    reads all weights unless their digest is cached. Close it when the weights are made."""

    spec: ModelSpec
    source: TensorSource
    tokenizer: Tokenizer
    weights_digest: Callable[[], str]
    close: Callable[[], None]

    def __enter__(self) -> ModelFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_model(path: Path, *, cache_dir: Path | None = None, load_format: str = "auto") -> ModelFiles:
    """``path``: a GGUF file or a folder; with "dummy" a folder that need not hold more than its config.json.

    Raises ModelError (one sentence that names file, field and value) or TokenizerError; then nothing stays open.
    """
    if path.is_dir():
        return _open_folder(path, cache_dir, load_format == "dummy")
    if load_format == "dummy":
        raise ModelError(f"dummy weights need a folder with a {CONFIG}; {path} is none")
    return _open_gguf(path, cache_dir)


def _open_gguf(path: Path, cache_dir: Path | None) -> ModelFiles:
    file = GgufFile(path)
    try:
        spec = read_spec(file)
        tokenizer = load_tokenizer(file.head_bytes, lambda: read_tokenizer(file), cache_dir)
        return ModelFiles(
            spec, GgufTensors(file, spec), tokenizer, weights_digest=lambda: weight_digest(file, cache_dir), close=file.close
        )
    except BaseException:
        file.close()
        raise


def _open_folder(folder: Path, cache_dir: Path | None, dummy: bool) -> ModelFiles:
    config = read_config(folder)
    generation = read_object(folder / GENERATION)
    tokenizer_config = read_object(folder / TOKENIZER_CONFIG) or {}
    spec = spec_of_config(config, str(folder / CONFIG), folder.absolute().name)
    ends = read_end_ids(config, generation)
    tokens = read_template_tokens(tokenizer_config)
    text = read_text(folder / TOKENIZER, MAX_TOKENIZER_BYTES)
    if text is None and not dummy:
        raise ModelError(f"model folder {folder} has no {TOKENIZER}; save its tokenizer again with transformers' AutoTokenizer")
    if text is None:
        tokenizer = ids_tokenizer(spec.vocab, ends)
    else:
        tokenizer = tokenizer_of_json(text, ends, tokens.get("eos_token"), str(folder / TOKENIZER))
        spec = replace(spec, chat_template=read_template(folder, tokenizer_config), template_tokens=tokens)
    _check_vocabulary(folder, spec, tokenizer)
    if dummy:
        random = DummyTensors(spec)
        return ModelFiles(spec, random, tokenizer, weights_digest=random.digest, close=_nothing)
    source = SafetensorsTensors(folder, spec)
    return ModelFiles(spec, source, tokenizer, weights_digest=lambda: folder_digest(source, cache_dir), close=source.close)


def _check_vocabulary(folder: Path, spec: ModelSpec, tokenizer: Tokenizer) -> None:
    if tokenizer.vocab_size > spec.vocab:
        raise ModelError(
            f"model folder {folder} has token ids up to {tokenizer.vocab_size - 1} in its {TOKENIZER},"
            f" but vocab_size {spec.vocab}"
        )
    beyond = [token_id for token_id in tokenizer.end_ids if token_id >= tokenizer.vocab_size]
    if beyond:
        raise ModelError(
            f"model folder {folder} has eos_token_id {beyond[0]}, which is none of its {tokenizer.vocab_size} tokens"
        )


def _nothing() -> None:
    pass
