"""Incremental text: no part of a character, no surrogate, U+FFFD once for a cut-off tail (case P13)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from kvalet.runtime.detok import Detokenizer
from kvalet.runtime.tokenizer import Tokenizer
from smollm import read_tokenizer
from tokenizers.decoders import DecodeStream

TEXT = "ok 😀 日本語 👩‍👩‍👧 é x"


class ByteVocabulary:
    """Token i is the byte i; token 256 is a control token."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return read_tokenizer(model_path)


def deltas(vocabulary: ByteVocabulary | Tokenizer, ids: list[int]) -> list[str]:
    detok = Detokenizer(vocabulary)
    return [*(detok.push(token_id) for token_id in ids), detok.finish()]


def test_stopping_after_every_id(tokenizer: Tokenizer) -> None:
    """Cut after each id: the joined deltas are the decode of those ids, and what was sent before the end is whole."""
    ids = tokenizer.encode(TEXT, allow_special=False)
    for n in range(len(ids) + 1):
        pieces = deltas(tokenizer, ids[:n])
        assert "".join(pieces) == tokenizer.decode(ids[:n])
        assert TEXT.startswith("".join(pieces[:-1]))
        assert pieces[-1] in ("", "\ufffd")
    assert deltas(tokenizer, ids)[-1] == ""


def test_single_bytes_stopping_after_every_byte() -> None:
    """The finest cut there is: U+FFFD exactly where a character is cut, once, at the end."""
    data = TEXT.encode()
    for n in range(len(data) + 1):
        pieces = deltas(ByteVocabulary(), list(data[:n]))
        cut = n < len(data) and data[n] & 0xC0 == 0x80
        assert "".join(pieces[:-1]) == data[:n].decode(errors="ignore")
        assert pieces[-1] == ("\ufffd" if cut else "")


def test_pending_says_whether_a_character_is_open() -> None:
    detok = Detokenizer(ByteVocabulary())
    seen = []
    for byte in "a😀".encode():
        detok.push(byte)
        seen.append(detok.pending)
    assert seen == [False, True, True, True, False]
    detok.push(0xF0)
    assert detok.finish() == "\ufffd"
    assert not detok.pending
    assert detok.finish() == ""


@pytest.mark.parametrize(
    ("data", "pieces"),
    [
        (b"\xf0\x9f a", ["", "", "\ufffd ", "a", ""]),
        (b"\x80", ["\ufffd", ""]),
        (b"a\x80b", ["a", "\ufffd", "b", ""]),
        (b"\xed\xa0\x80", ["", "", "\ufffd\ufffd\ufffd", ""]),
        (b"\xff\xfe", ["\ufffd", "\ufffd", ""]),
        (b"\xe6\x97", ["", "", "\ufffd"]),
    ],
    ids=["half then space", "lone continuation", "inside text", "surrogate", "never a character", "cut off"],
)
def test_bytes_that_are_no_character(data: bytes, pieces: list[str]) -> None:
    assert deltas(ByteVocabulary(), list(data)) == pieces
    assert "".join(pieces) == data.decode(errors="replace")


def test_a_control_token_does_not_break_a_character() -> None:
    first, *rest = "é".encode()
    assert deltas(ByteVocabulary(), [first, 256, *rest]) == ["", "", "é", ""]


def test_random_bytes_equal_the_decode_at_once() -> None:
    seed = 13
    rng = random.Random(seed)
    starts = [*"aé日😀".encode(), 0xED, 0xA0, 0xFF, 0xC0, 0x80]
    for case in range(5000):
        data = bytes(rng.choice(starts) for _ in range(rng.randrange(0, 12)))
        text = "".join(deltas(ByteVocabulary(), list(data)))
        assert text == data.decode(errors="replace"), (seed, case, data)
        text.encode()  # no surrogates


def test_equal_to_the_package_s_decode_stream(tokenizer: Tokenizer) -> None:
    """Its own incremental decoder is the twin wherever the text is one; on bytes that are no text it may hold back for ever."""
    seed = 131
    rng = random.Random(seed)
    alphabet = "aé日😀 \n本👩‍👧0x"
    for case in range(300):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 20)))
        ids = tokenizer.encode(text, allow_special=False)
        stream = DecodeStream(ids=[], skip_special_tokens=True)
        theirs = [stream.step(tokenizer.fast, token_id) or "" for token_id in ids]
        assert "".join(deltas(tokenizer, ids)) == "".join(theirs) == text, (seed, case, text)
