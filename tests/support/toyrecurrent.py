"""A toy model with running state, in bytes: its state is a fold over the token ids, its next token needs state and pages.

``Toy.state`` after n tokens names all of them; the KV of a chunk is ``storekit.payload`` of its key. Whoever mixes a state with
the chunks of another position gets another token, and ``Toy.next_token`` says so by an assertion.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvalet.store.ids import ChunkMeta
from kvalet.store.usable import usable_boundary
from recordkit import RecordRig, state_meta
from storekit import CHUNK_TOKENS, chain

STATE_BYTES = 5000


def fold(state: bytes, ids: Sequence[int]) -> bytes:
    """One token after the other, as a recurrent layer does it."""
    for token in ids:
        state = hashlib.blake2b(state + token.to_bytes(4, "little"), digest_size=32).digest()
    return state


def as_bytes(state: bytes) -> bytes:
    """The state as it is stored."""
    return hashlib.shake_128(state).digest(STATE_BYTES - 32) + state


@dataclass
class Toy:
    """One sequence. ``computed``: how many tokens were computed, not restored."""

    rig: RecordRig
    metas: list[ChunkMeta]
    parts: int = 1
    state: bytes = bytes(32)
    position: int = 0
    computed: int = 0
    reasons: list[str] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [token for meta in self.metas for token in meta.ids]

    def prefill(self) -> bytes:
        """Compute what is missing; returns the next token, a function of state and position."""
        rest = self.ids[self.position :]
        self.state = fold(self.state, rest)
        self.computed += len(rest)
        self.position += len(rest)
        assert self.state == fold(bytes(32), self.ids), "a state of other tokens was used"
        return hashlib.blake2b(self.state, digest_size=4).digest()

    def state_metas(self, after: ChunkMeta) -> list[ChunkMeta]:
        size = -(-STATE_BYTES // self.parts)
        return [
            state_meta(self.rig.secret, after, min(size, STATE_BYTES - part * size), part, self.parts)
            for part in range(self.parts)
        ]

    def save(self, boundaries: Sequence[int]) -> None:
        """Chunks, and the state at the ends of these pieces (by ordinal)."""
        assert [one.reason for one in self.rig.write(self.metas)] == [""] * len(self.metas)
        for ordinal in boundaries:
            upto = [token for meta in self.metas[: ordinal + 1] for token in meta.ids]
            data = as_bytes(fold(bytes(32), upto))
            for meta, piece in zip(self.state_metas(self.metas[ordinal]), self.cut(data), strict=True):
                assert self.rig.put_state(meta, piece) == ""

    def cut(self, data: bytes) -> list[bytes]:
        size = -(-STATE_BYTES // self.parts)
        return [data[i : i + size] for i in range(0, STATE_BYTES, size)]

    def resume(self) -> int:
        """Chunks in order as far as they verify, then all states after them; returns the boundary it goes on from."""
        ends: dict[int, bytes] = {}
        for meta in self.metas:
            reason = self.rig.read(meta)
            if reason:
                self.reasons.append(reason)
                break
            ends[meta.first_token + len(meta.ids)] = bytes(meta.key)
        verified: list[ChunkMeta] = []
        pieces: dict[tuple[int, int], bytes] = {}
        for meta in self.metas:
            for part in self.state_metas(meta):
                reason, data = self.rig.get_state(part)
                if reason:
                    self.reasons.append(reason)
                else:
                    assert part.state is not None
                    verified.append(part)
                    pieces[part.first_token, part.state.part] = data
        self.position = usable_boundary(ends, verified)
        if self.position:
            whole = b"".join(pieces[self.position, part] for part in range(self.parts))
            assert len(whole) == STATE_BYTES
            self.state = whole[-32:]
        return self.position


def toy(rig: RecordRig, *, n_chunks: int = 3, tail: int = 9, parts: int = 1) -> Toy:
    assert tail < CHUNK_TOKENS
    return Toy(rig, chain(rig.secret, n_chunks, tail=tail, root=rig.root), parts)
