"""Small words for the scheduler's script tests: histories, what a client sends next, what a turn cost."""

from __future__ import annotations

from kvalet.sched import events as ev
from kvalet.sched.session import Session
from kvalet.sched.turns import TurnReport
from kvalet.store.record import Record, decode
from schedworld import Client, World


def words(number: int, length: int) -> tuple[int, ...]:
    """Token ids of one conversation, unlike those of another."""
    return tuple((number * 31 + i * 7) % 90 + 1 for i in range(length))


def after(client: Client, *more: int) -> tuple[int, ...]:
    """What the client sends next: all that was said, and ``more``."""
    return client.spec.prompt + tuple(client.ids) + more


def report(client: Client) -> TurnReport:
    assert client.ended is not None
    return client.ended.report


def drain(world: World, seconds: float = 1000.0) -> None:
    """Everything worth it goes to disk."""
    world.feed(ev.BeginDrain(world.now, world.now + seconds))
    world.settle()


def restart(world: World) -> None:
    """A drained process ends and another begins over the same disk."""
    drain(world)
    world.kill()


def records(world: World, session: str = "") -> list[Record]:
    """What the disk holds, of one session or of all, least recently written first."""
    assert world.store is not None
    found = [decode(data, tenant=branch[0]) for branch, data in world.store.records.files.items()]
    return [r for r in found if isinstance(r, Record) and (not session or r.session == session)]


def open_session(world: World, name: str) -> Session:
    session = world.core._board.sessions.find("", name)
    assert session is not None
    return session


def crowd(world: World, n: int, length: int = 30, first: int = 50) -> None:
    """Other sessions take their turns, so that whoever is idle has to leave the device."""
    for number in range(first, first + n):
        world.ask(words(number, length), f"crowd{number}", max_tokens=2)
