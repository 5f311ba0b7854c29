"""The rebuilt tokenizer on disk, so that a start need not parse the arrays of the GGUF file (seconds in Python).

One file per key: a digest of all that follows, a line of JSON, and ``tokenizer.json`` as it is. It is a cache: written to a
temporary name and renamed, checked by digest when read, and whatever is wrong with it, the tokenizer is built again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import tokenizers
from kvalet.runtime.spm_tokenizer import build_spm_tokenizer
from kvalet.runtime.tokenizer import Alphabet, Tokenizer, TokenizerArrays, build_tokenizer

_FORMAT = f"2 {tokenizers.__version__}"
"""Of the file, of how tokenizers are built, and of the package that writes them; any change makes old files misses."""

_log = logging.getLogger(__name__)


def load_tokenizer(key: bytes, read_arrays: Callable[[], TokenizerArrays], cache_dir: Path | None) -> Tokenizer:
    """The tokenizer for ``key``, from the cache or from ``read_arrays`` (called only on a miss).

    ``key``: any bytes that change whenever the arrays do (a digest of the file, or of its metadata). ``cache_dir`` None: no
    cache. A damaged file counts as a miss and is replaced; a folder that cannot be written is logged and does no harm.
    Raises TokenizerError where the arrays cannot be used.
    """
    path = None if cache_dir is None else cache_dir / f"tokenizer-{hashlib.sha256(key).hexdigest()[:32]}.cache"
    if path is not None:
        cached = _read(path)
        if cached is not None:
            return cached
    arrays = read_arrays()
    tokenizer = build_spm_tokenizer(arrays) if arrays.model == "llama" else build_tokenizer(arrays)
    if path is not None:
        _write(path, tokenizer)
    return tokenizer


def _read(path: Path) -> Tokenizer | None:
    """The tokenizer in ``path``; None if there is none, or none that is whole."""
    try:
        digest, _, rest = path.read_bytes().partition(b"\n")
        if digest.decode() != hashlib.sha256(rest).hexdigest():
            raise ValueError("its digest differs")
        first, _, body = rest.partition(b"\n")
        head = json.loads(first)
        if head["format"] != _FORMAT:
            raise ValueError(f"format {head['format']!r}, not {_FORMAT!r}")
        bos_id = head["bos_id"]
        return Tokenizer(
            body.decode(),
            bytes.fromhex(head["digest"]),
            bos_id=None if bos_id is None else int(bos_id),
            end_ids=frozenset(int(token_id) for token_id in head["end_ids"]),
            alphabet=Alphabet(head["alphabet"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("tokenizer cache %s is unusable (%s): building it again", path, error)
        return None


def _write(path: Path, tokenizer: Tokenizer) -> None:
    """Write atomically; a reader sees the whole file or none."""
    head = {
        "format": _FORMAT,
        "digest": tokenizer.digest.hex(),
        "bos_id": tokenizer.bos_id,
        "end_ids": sorted(tokenizer.end_ids),
        "alphabet": tokenizer.alphabet.value,
    }
    rest = json.dumps(head).encode() + b"\n" + tokenizer.tokenizer_json.encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
    except OSError as error:
        _log.warning("tokenizer cache %s cannot be written: %s", path, error)
