"""The open sessions: found by name, or recognised by what their history begins with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from kvalet.sched.prefix_names import PrefixNames
from kvalet.sched.session import Branch, Session
from kvalet.sched.turns import TurnSpec


class SessionBook:
    """Open sessions, least recently used first. Bound: ``max_sessions``; beyond it the least recently used session that
    ``may_forget`` lets go is forgotten (``on_forget`` is told), and if there is none, ``open`` answers None."""

    def __init__(self, max_sessions: int) -> None:
        self._max = max_sessions
        self.may_forget: Callable[[Session], bool] = lambda session: not session.turns
        self.on_forget: Callable[[Session], None] = lambda session: None
        self._named: dict[tuple[str, str], Session] = {}
        self._nameless: dict[int, Session] = {}
        self._prefixes = PrefixNames()

    def __len__(self) -> int:
        return len(self._named) + len(self._nameless)

    def __iter__(self) -> Iterator[Session]:
        yield from self._named.values()
        yield from self._nameless.values()

    def open(self, spec: TurnSpec) -> Session | None:
        """The session of this request: by name, else by the longest boundary that its ids begin with, else a new one."""
        if spec.session:
            return self.open_named(spec.tenant, spec.session)
        session_or_none = self._prefixes.find(spec)
        if session_or_none is None:
            if not self._make_room():
                return None
            session_or_none = Session(spec.tenant, "")
        else:
            del self._nameless[id(session_or_none)]
        self._nameless[id(session_or_none)] = session_or_none
        return session_or_none

    def open_named(self, tenant: str, name: str) -> Session | None:
        """The session of that name, used now; a new one if there is none; None if there is no room for it."""
        found = self._named.pop((tenant, name), None)
        if found is None and not self._make_room():
            return None
        session = self._named[(tenant, name)] = found or Session(tenant, name)
        return session

    def find(self, tenant: str, name: str) -> Session | None:
        return self._named.get((tenant, name))

    def holds(self, session: Session) -> bool:
        """It is open."""
        return id(session) in self._nameless or self._named.get((session.tenant, session.name)) is session

    def close(self, tenant: str, name: str) -> Session | None:
        return self._named.pop((tenant, name), None)

    def fork(self, parent: Session, tenant: str, child: str) -> bool:
        """``child`` gets all branches of ``parent``; False if there is no room. An existing child gains them."""
        session = self._named.get((tenant, child))
        if session is None:
            if not self._make_room():
                return False
            session = self._named[(tenant, child)] = Session(tenant, child)
        for branch in list(parent.branches):
            session.extend(branch, branch)
        return True

    def ended(self, session: Session, old: Branch | None, new: Branch) -> None:
        """A turn of ``session`` has ended and left ``new`` behind."""
        session.extend(old, new)
        if not session.name and id(session) in self._nameless:
            self._prefixes.update(session)

    def claimed(self, branch: Branch) -> bool:
        """Some open session still has this branch. O(sessions)."""
        return any(branch in s.branches for s in (*self._named.values(), *self._nameless.values()))

    def _make_room(self) -> bool:
        if len(self) < self._max:
            return True
        for key, session in islice(self._named.items(), self._max):
            if self.may_forget(session):
                del self._named[key]
                self.on_forget(session)
                return True
        for number, session in self._nameless.items():
            if self.may_forget(session):
                self._prefixes.forget(session)
                del self._nameless[number]
                self.on_forget(session)
                return True
        return False
