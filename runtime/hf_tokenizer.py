"""tokenizer.json of a Hugging Face folder -> ``Tokenizer``. The ids are those of the ``tokenizers`` package, which reads the
file; here is decided what bytes a token stands for, with what id a prompt begins, and which ids end a turn.

Two alphabets exist in the families that are served: byte-level (Llama 3, Qwen, SmolLM, newer Mistral) and SentencePiece's, with
``▁`` for a space and ``<0x0A>`` for a byte (Llama 2, older Mistral). Anything else is refused by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from kvalet.runtime.tokenizer import END_OF_TURN_NAMES, Alphabet, Tokenizer, TokenizerError
from tokenizers import Tokenizer as FastTokenizer

PROBE = "a"
"""A text whose encoding shows what the post-processor puts around it."""


def tokenizer_of_json(text: str, end_ids: frozenset[int], eos_token: str | None, where: str) -> Tokenizer:
    """``end_ids``: as the folder's configurations say; ``eos_token`` and the control tokens of ``END_OF_TURN_NAMES`` are added.
    ``where``: the file, for messages. Raises TokenizerError for what cannot be used."""
    try:
        fast = FastTokenizer.from_str(text)
        fields: dict[str, Any] = json.loads(text)
    except Exception as error:  # noqa: BLE001 - the package raises a bare Exception for whatever it cannot parse
        raise TokenizerError(f"{where} cannot be used: {str(error)[:120]}") from None
    kind = (fields.get("model") or {}).get("type")
    if kind not in ("BPE", None):
        raise TokenizerError(f"{where} has a model of type {kind!r}; supported is 'BPE'")
    for token in fields.get("added_tokens") or []:
        for flag in ("lstrip", "rstrip", "single_word"):
            if token.get("special") and token.get(flag):
                raise TokenizerError(f"{where} has special token {token.get('content')!r} with {flag}, which is not supported")
    controls = {token.content: token_id for token_id, token in fast.get_added_tokens_decoder().items() if token.special}
    named = {controls[name] for name in (*END_OF_TURN_NAMES, eos_token) if name in controls}
    ends = frozenset(end_ids | named)
    bos_id = _bos_id(fast, where)
    digest = hashlib.sha256(text.encode() + f"|bos={bos_id}|ends={sorted(ends)}".encode()).digest()
    prefix_space = _prefix_by_hand(fields)
    fields |= {"padding": None, "truncation": None}
    return Tokenizer(
        json.dumps(fields), digest, bos_id=bos_id, end_ids=ends, alphabet=_alphabet(fields, where), prefix_space=prefix_space
    )


def _bos_id(fast: FastTokenizer, where: str) -> int | None:
    """The id that the post-processor puts before a text. What it puts behind one (an end of sequence) is for training."""
    plain = fast.encode(PROBE, add_special_tokens=False).ids
    whole = fast.encode(PROBE, add_special_tokens=True).ids
    before = next((at for at in range(len(whole) - len(plain) + 1) if whole[at : at + len(plain)] == plain), None)
    if before is None or before > 1:
        raise TokenizerError(f"{where} puts {whole} around a text of {plain}, which is not supported")
    return whole[0] if before else None


def _parts(fields: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """The components of ``normalizer``, ``pre_tokenizer`` or ``decoder``, a sequence's one after the other."""
    found = fields.get(name)
    if not isinstance(found, dict):
        return
    inner = found.get("decoders") or found.get("pretokenizers") or found.get("normalizers")
    yield from (inner if found.get("type") == "Sequence" and isinstance(inner, list) else [found])


def _alphabet(fields: dict[str, Any], where: str) -> Alphabet:
    decoders = [part.get("type") for part in _parts(fields, "decoder")]
    if "ByteLevel" in decoders:
        return Alphabet.BYTE_LEVEL
    if "Metaspace" in decoders or {"Replace", "ByteFallback"} <= set(decoders):
        return Alphabet.METASPACE
    raise TokenizerError(f"{where} has the decoder {decoders}; supported are ByteLevel and Metaspace or ByteFallback")


def _prefix_by_hand(fields: dict[str, Any]) -> bool:
    """Whether only the first text of a prompt gets a space in front (Metaspace with "first"), not each text after a control
    token. Prompts are encoded in pieces, each of which would count as the first: the file's own rule is switched off, and
    ``Tokenizer`` does it."""
    found = False
    for part in _parts(fields, "pre_tokenizer"):
        if part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") == "first":
            part["prepend_scheme"] = "never"
            found = True
    return found
