"""Recognising a session without a name by what its history begins with, in one pass over a prompt.

A prompt goes on from a branch if it begins with the branch's first ``boundary`` ids. Each branch is kept under the digest of
those ids. A prompt cannot be hashed to every length that some branch has; so each branch leaves a mark at the last multiple
of STRIDE before its boundary. A prompt is hashed once, with a look for a mark at each multiple; from the last mark it has
passed back to the first, the few lengths that are known behind a mark are tried. So a prompt costs one pass, one look-up
per STRIDE tokens, and a bounded number of digests more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvalet.sched.session import Branch, Session
from kvalet.sched.turns import TurnSpec
from kvalet.store.ids import ids_le

STRIDE = 64
MAX_TRIES = 512
"""Lengths tried for one prompt; the longest come first. Beyond it a session is not recognised: its history is then what the
tiers find by its ids, and only what needs a session (deterministic calls, the record of a divergence) is missing."""
_ID_BYTES = 4


@dataclass(slots=True)
class _Names:
    """What one session has left: ``of`` by the branch's identity in memory, which ``branches`` keeps alive."""

    of: dict[int, tuple[bytes, bytes, int]] = field(default_factory=dict)
    branches: tuple[Branch, ...] = ()


class PrefixNames:
    """The branches of all sessions without a name. Bound: as many as there are branches."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, dict[int, Session]] = {}
        """Digest at a boundary -> who has a branch of it, the one updated last at the end."""
        self._marks: dict[bytes, dict[int, int]] = {}
        """Digest at a multiple of STRIDE -> boundary -> how many branches have it."""
        self._names: dict[int, _Names] = {}

    def __len__(self) -> int:
        return sum(len(names.of) for names in self._names.values())

    def update(self, session: Session) -> None:
        """``session`` has the branches that it has now: only new ones are hashed. Of two sessions that begin with the same ids
        the one updated last is found."""
        names = self._names.setdefault(id(session), _Names())
        now = {id(branch): branch for branch in session.branches}
        self._drop(session, names, [number for number in names.of if number not in now])
        for number, branch in now.items():
            if number not in names.of:
                mark, name = _digests(branch)
                names.of[number] = (mark, name, branch.boundary)
                known = self._marks.setdefault(mark, {})
                known[branch.boundary] = known.get(branch.boundary, 0) + 1
            sharers = self._sessions.setdefault(names.of[number][1], {})
            sharers.pop(id(session), None)
            sharers[id(session)] = session
        names.branches = tuple(session.branches)

    def forget(self, session: Session) -> None:
        names = self._names.pop(id(session), None)
        if names is not None:
            self._drop(session, names, list(names.of))

    def _drop(self, session: Session, names: _Names, numbers: Iterable[int]) -> None:
        for number in numbers:
            mark, name, boundary = names.of.pop(number)
            if not any(other == name for _, other, _ in names.of.values()):
                del self._sessions[name][id(session)]
            if not self._sessions[name]:
                del self._sessions[name]
            known = self._marks[mark]
            known[boundary] -= 1
            if not known[boundary]:
                del known[boundary]
            if not known:
                del self._marks[mark]

    def find(self, spec: TurnSpec) -> Session | None:
        """The session with the longest boundary that the prompt begins with."""
        if not self._marks:
            return None
        data = memoryview(ids_le(spec.prompt))
        digest = hashlib.blake2b(key=spec.secret, digest_size=16)
        passed = []
        for at in range(0, len(spec.prompt) + 1, STRIDE):
            digest.update(data[max(0, at - STRIDE) * _ID_BYTES : at * _ID_BYTES])
            known = self._marks.get(digest.digest())
            if known is not None:
                passed.append((at, digest.copy(), known))
        tries = 0
        for at, begun, known in reversed(passed):
            for length in sorted((n for n in known if n <= len(spec.prompt)), reverse=True):
                if tries == MAX_TRIES:
                    return None
                tries += 1
                whole = begun.copy()
                whole.update(data[at * _ID_BYTES : length * _ID_BYTES])
                sharers = self._sessions.get(whole.digest())
                if sharers:
                    session = next(reversed(sharers.values()))
                    if _begins_with_a_branch(spec, session, length):
                        return session
        return None


def _digests(branch: Branch) -> tuple[bytes, bytes]:
    """(at the last multiple of STRIDE, at the boundary)."""
    at = branch.boundary // STRIDE * STRIDE
    digest = hashlib.blake2b(ids_le(branch.ids[:at]), key=branch.secret, digest_size=16)
    mark = digest.digest()
    digest.update(ids_le(branch.ids[at : branch.boundary]))
    return mark, digest.digest()


def _begins_with_a_branch(spec: TurnSpec, session: Session, length: int) -> bool:
    """Nothing is trusted to a hash."""
    return any(
        b.boundary == length and b.secret == spec.secret and b.ids[:length] == spec.prompt[:length] for b in session.branches
    )
