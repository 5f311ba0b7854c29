"""The small files of a Hugging Face folder: read with bounds, JSON objects only, one sentence for whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvalet.runtime.errors import ModelError

CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
TEMPLATE = "chat_template.jinja"
MAX_JSON_BYTES = 8 << 20
MAX_TOKENIZER_BYTES = 256 << 20


def read_text(path: Path, most: int = MAX_JSON_BYTES) -> str | None:
    """None where there is no such file. ModelError beyond ``most`` bytes, or where it cannot be read as UTF-8."""
    try:
        size = path.stat().st_size
        if size > most:
            raise ModelError(f"{path} has {size} bytes, more than {most}")
        return path.read_text("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where there is no such file."""
    text = read_text(path)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no valid JSON: {str(error)[:80]}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds no JSON object")
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, which every model folder has."""
    found = read_object(folder / CONFIG)
    if found is None:
        if (folder / "adapter_config.json").is_file():
            raise ModelError(f"model folder {folder} holds an adapter, not a model: merge it into its base model first")
        raise ModelError(f"model folder {folder} has no {CONFIG}")
    return found


def read_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """The chat template: its own file, else the field of tokenizer_config.json (of several, the one named "default"; a list
    without it has none)."""
    own = read_text(folder / TEMPLATE)
    if own is not None:
        return own
    found = tokenizer_config.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise ModelError(f"{folder / TOKENIZER_CONFIG} has a chat_template that is no text")
    return found


def read_template_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """What templates call "bos_token", "eos_token" and so on: texts, also where the file has objects with a content."""
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = tokenizer_config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def read_end_ids(*configs: dict[str, Any] | None) -> frozenset[int]:
    """All ``eos_token_id`` of the configurations: a number, or a list of them. ModelError for anything else."""
    found: set[int] = set()
    for config in configs:
        value = None if config is None else config.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise ModelError(f"eos_token_id {value!r} is neither a token id nor a list of them")
            found.add(token_id)
    return frozenset(found)
