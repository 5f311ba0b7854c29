"""Small tokenizers of the two kinds that the families have, made with the ``tokenizers`` package: byte-level BPE with a
pre-tokeniser (Llama 3, Qwen, SmolLM) and SentencePiece's alphabet with byte fallback (Llama 2, Mistral)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

MERGED = ("he", "ll", "hell", "o", "hello", " w", "or", " wor", "ld", " world", "th", " th", "er", "in", "an", " a", "to", "ol")
"""Words that merges build, each from two shorter ones."""
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _merges(words: Sequence[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """A merge for every word that is two known tokens; the words join the vocabulary."""
    merges = []
    for word in words:
        cut = next((i for i in range(len(word) - 1, 0, -1) if word[:i] in vocab and word[i:] in vocab), None)
        if cut is not None and word not in vocab:
            vocab[word] = len(vocab)
            merges.append((word[:cut], word[cut:]))
    return merges


def byte_level(controls: Sequence[str], plain: Sequence[str] = (), bos: str = "") -> Tokenizer:
    """``controls``: special tokens; ``plain``: added tokens that are not special (as ``<think>``); ``bos``: put before every
    text by the post-processor."""
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = _merges([word.replace(" ", "Ġ") for word in MERGED], vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return _finished(tokenizer, controls, plain, bos)


def metaspace(controls: Sequence[str] = ("<unk>", "<s>", "</s>"), bos: str = "<s>", legacy: bool = True) -> Tokenizer:
    """``legacy``: a space before every text after a control token, by a normaliser (Llama 2); else before the first text of a
    prompt only, by the pre-tokeniser (newer Mistral)."""
    vocab = {name: i for i, name in enumerate(controls)}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for letter in ["▁", *map(chr, range(32, 127)), "é", "日"]:
        vocab.setdefault(letter, len(vocab))
    merges = _merges([word.replace(" ", "▁") for word in (*MERGED, " hello")], vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=controls[0], fuse_unk=True, byte_fallback=True))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finished(tokenizer, controls, (), bos)


def _finished(tokenizer: Tokenizer, controls: Sequence[str], plain: Sequence[str], bos: str) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in controls])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in plain])
    if bos:
        bos_id = tokenizer.token_to_id(bos)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, bos_id)]
        )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, **config: Any) -> None:
    """tokenizer.json, and tokenizer_config.json with ``config``."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
