"""SentencePiece's BPE from the arrays of a GGUF file, against a tokenizer that was given as merges; and through the cache."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import hftokens
import pytest
from kvalet.runtime.spm_tokenizer import build_spm_tokenizer
from kvalet.runtime.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, TokenizerArrays, TokenizerError
from kvalet.runtime.tokenizer_cache import load_tokenizer

TEXTS = ["hello world", "  two  spaces", "tell another in the world", "日本é🙂", "a\nb\tc", "", " ", "hellohello worldly"]


def arrays_of_package() -> TokenizerArrays:
    """The vocabulary of ``hftokens.metaspace`` as a GGUF has it: the score of a merge is its rank, negative."""
    fields = json.loads(hftokens.metaspace().to_str())
    tokens = tuple(sorted(fields["model"]["vocab"], key=fields["model"]["vocab"].get))
    rank = {"".join(merge): i for i, merge in enumerate(fields["model"]["merges"])}
    kinds = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    return TokenizerArrays(
        model="llama",
        pre="",
        tokens=tokens,
        token_type=tuple(kinds.get(t, BYTE if t.startswith("<0x") else NORMAL) for t in tokens),
        merges=(),
        add_bos_token=True,
        bos_token_id=tokens.index("<s>"),
        eos_token_id=tokens.index("</s>"),
        scores=tuple(-float(rank[t]) if t in rank else -1e6 for t in tokens),
    )


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_merges(text: str) -> None:
    made, package = build_spm_tokenizer(arrays_of_package()), hftokens.metaspace()
    ids = made.encode(text, allow_special=False)
    assert ids == package.encode(text, add_special_tokens=False).ids
    assert b"".join(map(made.token_bytes, ids)).decode() == (f" {text}" if text else "")


def test_a_prompt_of_parts_gets_its_space_after_each_control_token() -> None:
    made, package = build_spm_tokenizer(arrays_of_package()), hftokens.metaspace()
    text = "<s>hello world</s><s>and then"
    assert made.encode_parts([(text, True)]) == package.encode(text, add_special_tokens=False).ids
    assert made.bos_id == 1
    assert made.end_ids == {2}


def test_without_the_prefix_a_text_is_itself() -> None:
    made = build_spm_tokenizer(dataclasses.replace(arrays_of_package(), add_space_prefix=False))
    ids = made.encode("hello world", allow_special=False)
    assert made.decode(ids) == "hello world"


def test_the_cache_keeps_the_alphabet(tmp_path: Path) -> None:
    made = load_tokenizer(b"key", arrays_of_package, tmp_path)
    again = load_tokenizer(b"key", lambda: pytest.fail("it is in the cache"), tmp_path)
    assert again.alphabet is made.alphabet
    ids = made.encode("日本 hello", allow_special=False)
    assert again.encode("日本 hello", allow_special=False) == ids
    assert again.decode(ids) == made.decode(ids) == " 日本 hello"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scores": ()}, r"scores has 0 entries for \d+ tokens"),
        ({"token_type": (1,)}, r"token_type has 1 entries"),
        ({"bos_token_id": None}, r"add_bos_token is set"),
        ({"eos_token_id": 99_999}, r"eos_token_id 99999 is outside"),
    ],
)
def test_what_does_not_fit_is_refused_by_field(changes: dict[str, object], words: str) -> None:
    with pytest.raises(TokenizerError, match=words):
        build_spm_tokenizer(dataclasses.replace(arrays_of_package(), **changes))  # type: ignore[arg-type]


def test_bytes_must_be_there_and_scores_be_numbers() -> None:
    whole = arrays_of_package()
    at = whole.tokens.index("<0x41>")
    renamed = (*whole.tokens[:at], "other", *whole.tokens[at + 1 :])
    with pytest.raises(TokenizerError, match=r"lacks <0x41> \(1 bytes of 256\)"):
        build_spm_tokenizer(dataclasses.replace(whole, tokens=renamed))
    with pytest.raises(TokenizerError, match="no number"):
        build_spm_tokenizer(dataclasses.replace(whole, scores=(float("nan"), *whole.scores[1:])))
    with pytest.raises(TokenizerError, match="twice"):
        build_spm_tokenizer(dataclasses.replace(whole, tokens=("<s>", *whole.tokens[1:])))
