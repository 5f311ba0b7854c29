"""The fake model's arithmetic and its end conditions: what the right answer of a turn is, without pool or pages."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvalet.runtime.plan import EndedBy, SamplingParams

TOKEN_BYTES = 8
SEED_KV = 0x9E3779B97F4A7C15
"""Stands for the KV before position 0."""
_MASK = (1 << 64) - 1


def fake_text(token: int) -> str:
    """Text of one token: its number and a space."""
    return f"{token} "


@dataclass(frozen=True, slots=True)
class FakeModel:
    """The arithmetic. ``vocab``: ids are below it; ``eos``: ends a turn unless ``ignore_eos``.

    Grammars of kind "fake": text "dead N" allows no token after N accepted ones; "run N" forces N ids at once.
    """

    vocab: int = 97
    eos: int = 0
    shape_sensitive: bool = False

    def kv(self, previous: int, token: int, call: tuple[bool, int, int]) -> int:
        """KV of a position after one whose KV is ``previous``. ``call``: (decode, start, n) of the call that computes it."""
        value = (previous ^ (token + 1) * 0xD6E8FEB86659FD93) * 0xC2B2AE3D27D4EB4F & _MASK
        if self.shape_sensitive:
            decode, start, n = call
            value ^= 0x1234567 if decode else (start * 1_000_003 + n) * 0x9E3779B1
        return (value ^ value >> 29) & _MASK

    def next_ids(self, kv: bytes, accepted: int, params: SamplingParams) -> tuple[int, ...]:
        """The next ids after ``accepted`` new ones, from the KV of all positions; none at a dead end."""
        grammar = params.grammar.text.split() if params.grammar is not None else []
        if grammar and grammar[0] == "dead" and accepted >= int(grammar[1]):
            return ()
        digest = hashlib.blake2b(kv, digest_size=8, salt=(params.seed or 0).to_bytes(8, "little")).digest()
        first = int.from_bytes(digest, "little") % self.vocab
        run = int(grammar[1]) if grammar and grammar[0] == "run" else 1
        return tuple((first + i) % self.vocab for i in range(run))

    def continuation(self, prompt: Sequence[int], params: SamplingParams) -> tuple[tuple[int, ...], EndedBy]:
        """What a turn must answer: computed without pool or pages, for a model that is not shape sensitive."""
        if self.shape_sensitive:
            raise ValueError("a shape sensitive model has no answer without the calls that computed it")
        writer = FakeWriter(self, params, len(prompt))
        kv = bytearray()
        previous = SEED_KV
        fed = 0
        ids = list(prompt)
        while True:
            for token in ids[fed:]:
                previous = self.kv(previous, token, (False, 0, 0))
                kv += previous.to_bytes(TOKEN_BYTES, "little")
            fed = len(ids)
            new, _, ended = writer.accept(self.next_ids(bytes(kv), len(ids) - len(prompt), params))
            ids.extend(new)
            if ended is not None:
                return tuple(ids[len(prompt) :]), ended


@dataclass(slots=True)
class FakeWriter:
    """End conditions and text of one turn: what is certain, what may still become a stop string."""

    model: FakeModel
    params: SamplingParams
    n_prompt: int
    ids: list[int] = field(default_factory=list)
    text: str = ""
    sent: int = 0
    reusable: int = 0

    def accept(self, ids: Sequence[int]) -> tuple[tuple[int, ...], str, EndedBy | None]:
        """(ids accepted, text now certain, end). Stops inside a run as soon as the turn ends."""
        if not ids:
            self.reusable = len(self.ids)
            return (), self._flush(len(self.text)), EndedBy.GRAMMAR
        taken: list[int] = []
        for token in ids:
            taken.append(token)
            self.ids.append(token)
            ended = self._ended(token)
            if ended is not None:
                return tuple(taken), self._flush(len(self.text)), ended
        return tuple(taken), self._flush(len(self.text) - self._held_back()), None

    def _ended(self, token: int) -> EndedBy | None:
        params = self.params
        stops = token in params.stop_token_ids or (token == self.model.eos and not params.ignore_eos)
        if stops and len(self.ids) > params.min_tokens:
            self.reusable = len(self.ids) - 1
            return EndedBy.STOP
        self.text += fake_text(token)
        starts = [at for stop in params.stop if (at := self.text.find(stop)) >= 0]
        if starts:
            self._cut(min(starts))
            return EndedBy.STOP
        if len(self.ids) >= params.max_tokens:
            self.reusable = len(self.ids)
            return EndedBy.LENGTH
        return None

    def _cut(self, at: int) -> None:
        self.text = self.text[:at]
        length = 0
        for n, token in enumerate(self.ids):
            length += len(fake_text(token))
            if length > at:
                self.reusable = n
                return

    def _held_back(self) -> int:
        """Longest suffix of the text that a stop string begins with."""
        longest = 0
        for stop in self.params.stop:
            for n in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:n]):
                    longest = n
                    break
        return longest

    def _flush(self, upto: int) -> str:
        piece, self.sent = self.text[self.sent : max(upto, self.sent)], max(upto, self.sent)
        return piece
