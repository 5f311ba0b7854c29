"""The tokenizer of GGUF files with ``tokenizer.ggml.model`` "llama": SentencePiece's BPE (Llama 2, older Mistral).

SentencePiece joins the two neighbours whose join has the highest score. With a merge for every way to make a token of two
others, ordered by the score of what they make, that is BPE of the ``tokenizers`` package. Characters that are no token become
bytes (``<0xE6>``).
"""

from __future__ import annotations

import math

from kvalet.runtime.tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Alphabet,
    Tokenizer,
    TokenizerArrays,
    TokenizerError,
    end_ids,
)
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as FastTokenizer

N_BYTES = 256


def build_spm_tokenizer(arrays: TokenizerArrays) -> Tokenizer:
    """About 0.5 s for 32k tokens. Raises TokenizerError naming the field."""
    _check(arrays)
    vocab = {text: i for i, text in enumerate(arrays.tokens)}
    unknown = next((text for text, kind in zip(arrays.tokens, arrays.token_type, strict=True) if kind == UNKNOWN), None)
    fast = FastTokenizer(
        models.BPE(vocab=vocab, merges=merges_of(arrays, vocab), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaces = [normalizers.Replace(" ", SPACE)]
    fast.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), *spaces] if arrays.add_space_prefix else spaces)
    fast.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    for kinds, special in (((CONTROL, UNKNOWN), True), ((USER_DEFINED,), False)):
        names = [text for text, kind in zip(arrays.tokens, arrays.token_type, strict=True) if kind in kinds]
        added = [AddedToken(name, special=special, normalized=False) for name in names]
        fast.add_special_tokens(added) if special else fast.add_tokens(added)
    return Tokenizer(
        fast.to_str(),
        arrays.digest(),
        bos_id=arrays.bos_token_id if arrays.add_bos_token else None,
        end_ids=end_ids(arrays),
        alphabet=Alphabet.METASPACE,
    )


def merges_of(arrays: TokenizerArrays, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the best first: by score, then by the ids of the two."""
    joinable = {
        text for text, kind in zip(arrays.tokens, arrays.token_type, strict=True) if kind in (NORMAL, USER_DEFINED, UNUSED)
    }
    found = []
    for text, score in zip(arrays.tokens, arrays.scores, strict=True):
        if text not in joinable:
            continue
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in joinable and right in joinable:
                found.append((-score, vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _check(arrays: TokenizerArrays) -> None:
    n = len(arrays.tokens)
    for name, values in (("token_type", arrays.token_type), ("scores", arrays.scores)):
        if len(values) != n:
            raise TokenizerError(f"tokenizer.ggml.{name} has {len(values)} entries for {n} tokens")
    if len(set(arrays.tokens)) != n:
        raise TokenizerError("tokenizer.ggml.tokens holds a token twice")
    if not all(map(math.isfinite, arrays.scores)):
        raise TokenizerError("tokenizer.ggml.scores holds a value that is no number")
    unsupported = set(arrays.token_type) - {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE}
    if unsupported:
        raise TokenizerError(f"tokenizer.ggml.token_type holds types {sorted(unsupported)}, which are not supported")
    known = set(arrays.tokens)
    missing = [byte for byte in range(N_BYTES) if f"<0x{byte:02X}>" not in known]
    if missing:
        raise TokenizerError(f"tokenizer.ggml.tokens lacks <0x{missing[0]:02X}> ({len(missing)} bytes of {N_BYTES})")
    for name, token_id in (("bos", arrays.bos_token_id), ("eos", arrays.eos_token_id)):
        if token_id is not None and not 0 <= token_id < n:
            raise TokenizerError(f"tokenizer.ggml.{name}_token_id {token_id} is outside the vocabulary of {n}")
    if arrays.add_bos_token and arrays.bos_token_id is None:
        raise TokenizerError("tokenizer.ggml.add_bos_token is set, but there is no bos_token_id")
