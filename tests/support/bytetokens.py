"""A tokenizer of single bytes with ChatML's control tokens: real text handling without a model file."""

from __future__ import annotations

from functools import lru_cache

from kvalet.runtime.tokenizer import CONTROL, NORMAL, Tokenizer, TokenizerArrays, build_tokenizer

CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@lru_cache(maxsize=1)
def byte_tokenizer() -> Tokenizer:
    """Ids 0-2 are the control tokens, 3-258 the bytes in GPT-2's alphabet. Turns end with <|im_end|>."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]
    return build_tokenizer(
        TokenizerArrays(
            model="gpt2",
            pre="gpt-2",
            tokens=(*CONTROLS, *letters),
            token_type=(*(CONTROL for _ in CONTROLS), *(NORMAL for _ in letters)),
            merges=(),
            eos_token_id=2,
        )
    )
