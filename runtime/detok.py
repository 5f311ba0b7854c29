"""Token ids to text, one at a time: never a part of a character, never a surrogate.

A byte-level token is a run of bytes, and a character may be spread over several. So the text is what an incremental UTF-8
decoder makes of the tokens' bytes: whole characters at once, an incomplete one held back (at most 3 bytes). Bytes that can
never become a character give U+FFFD, as in a decode of everything at once; an incomplete tail gives it once, at the end.
"""

from __future__ import annotations

import codecs
from typing import Protocol


class Vocabulary(Protocol):
    """What the detokeniser needs from a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text: none for a control token, nor for an id that the vocabulary does not have."""
        ...


_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one row. The joined results of ``push`` and ``finish`` equal the decode of all its ids at once."""

    __slots__ = ("_decoder", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = _Utf8Decoder(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that are complete now."""
        return self._decoder.decode(self._vocabulary.token_bytes(token_id))

    @property
    def pending(self) -> bool:
        """Whether the last byte pushed belongs to a character that is not complete."""
        return bool(self._decoder.getstate()[0])

    def finish(self) -> str:
        """U+FFFD if a character was cut off, else nothing. Nothing is pending afterwards."""
        return self._decoder.decode(b"", final=True)
