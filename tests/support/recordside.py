"""The part of ``schedworld.World`` that carries out records, and what is asked about sessions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kvalet.sched import commands as cmd
from kvalet.sched import events as ev
from kvalet.sched.checkpoint import _above
from kvalet.sched.config import SchedConfig
from kvalet.sched.core import Core
from kvalet.sched.records import durable
from kvalet.sched.session import space_of
from kvalet.sched.session_state import SessionState
from kvalet.store.fake import FakeJob, FakeStore
from kvalet.store.ids import ChunkKey, chunk_key
from kvalet.store.record import Record


class RecordSide:
    """Every record is looked through before it is written: it must be what its ids are, and durable below."""

    config: SchedConfig
    core: Core
    store: FakeStore | None
    now: float
    inbox: list[Callable[[float], ev.Event]]
    secrets: set[bytes]

    def begin_records(self) -> None:
        self.told: dict[int, SessionState | None] = {}
        self.next_request = 1
        self.damaged: set[ChunkKey] = set()
        """What a test did away with on the disk, behind everybody's back."""

    def check_kept(self) -> None:
        """What pinned records name is on disk, always."""
        if self.store is not None:
            lost = self.store.records.pinned_keys() - self.store.entries.keys() - self.damaged
            assert not lost, f"{len(lost)} pieces of pinned records are not on disk\n{self.core.tell()}"

    def check_pinned_sessions(self) -> None:
        """At rest, with a disk that takes everything: no pinned piece was lost, none is only above the disk (what went before
        the session was pinned is gone), and the records say what is there."""
        board = self.core._board
        assert board.counters.lost_pinned_chunks == 0, self.core.tell()
        for session in board.sessions:
            for line in session.lines.values() if session.pinned else ():
                n_tokens = durable(board, line)
                above = [key for key in line.pieces if _above(board, key)]
                assert not above, f"{line} of a pinned session is not on disk\n{self.core.tell()}"
                assert line.saved_tokens == n_tokens, f"{line}, {n_tokens} are durable\n{self.core.tell()}"

    def feed(self, event: ev.Event) -> None:
        raise NotImplementedError

    def advance(self) -> bool:
        raise NotImplementedError

    def step(self) -> bool:
        raise NotImplementedError

    def copy(self, inward: bool, error: str | None = None) -> bool:
        raise NotImplementedError

    def jobs(self, kind: str = "") -> list[FakeJob]:
        raise NotImplementedError

    def job(self, kind: str = "", reason: str = "", index: int = 0) -> bool:
        raise NotImplementedError

    def tick(self, seconds: float = 0.0) -> bool:
        raise NotImplementedError

    def advance_but_records(self) -> bool:
        """One thing of any kind happens, but for the jobs of records. False: all else is quiet."""
        chunks = [index for index, job in enumerate(self.jobs()) if "record" not in job.kind]
        if self.step() or self.copy(True) or self.copy(False):
            return True
        return self.job("", "", chunks[0]) if chunks else self.tick()

    def session(self, name: str, pinned: bool | None = None) -> SessionState | None:
        """Ask about a session, or pin it; the machine runs until the answer is there."""
        request = self.ask_session(name, pinned)
        while request not in self.told:
            assert self.advance(), f"no answer\n{self.core.tell()}"
        return self.told[request]

    def ask_session(self, name: str, pinned: bool | None = None) -> int:
        request = self.next_request
        self.next_request += 1
        self.feed(ev.AskSession(self.now, request, name, "", pinned))
        return request

    def _do_WriteRecord(self, command: cmd.WriteRecord) -> None:
        assert self.store is not None
        self.check_record(command.record)
        transfer = command.transfer
        written = partial(self._record_written, transfer)
        self.store.write_record(transfer, command.record, written, klass=command.klass)

    def _record_written(self, transfer: ev.TransferId, completion: Any) -> None:
        assert self.store is not None
        result = self.store.settle(completion)
        if result.reason:
            self.inbox.append(lambda now: ev.RecordFailed(now, transfer, result.reason))
        else:
            self.inbox.append(lambda now: ev.RecordDone(now, transfer, result.n_bytes))

    def check_record(self, record: Record) -> None:
        """It names what its ids are up to its kv_len, and all of that is on disk at this moment."""
        assert self.store is not None
        secret = next(s for s in self.secrets if space_of(s) == record.space)
        size, at, parent = self.config.chunk_tokens, 0, self.config.identity
        for key in (*record.chunk_keys, *(() if record.tail_key is None else (record.tail_key,))):
            ids = record.ids[at : min(at + size, record.kv_len)]
            assert key == chunk_key(secret, parent, ids), f"{record} names another chunk at token {at}"
            assert key in self.store.entries, f"{record} names what is not durable at token {at}\n{self.core.tell()}"
            at, parent = at + len(ids), key
        assert at == record.kv_len <= len(record.ids), record

    def _do_ReadRecords(self, command: cmd.ReadRecords) -> None:
        store = self.store
        found: list[Record] = []
        failures: list[str] = []
        assert store is not None

        def done(completion: Any) -> None:
            result = store.settle(completion)
            if result.record is None:
                failures.append(result.reason)
            else:
                found.append(result.record)
            if len(found) + len(failures) == len(command.branches):
                self.inbox.append(lambda now: ev.RecordsRead(now, command.transfer, tuple(found), tuple(failures)))

        for place, branch in enumerate(command.branches):
            store.read_record(command.transfer + place, command.tenant, command.session, branch, done)

    def _do_DropRecord(self, command: cmd.DropRecord) -> None:
        assert self.store is not None
        self.store.drop_record(command.tenant, command.session, command.branch)

    def _do_TellSession(self, command: cmd.TellSession) -> None:
        assert command.request not in self.told
        self.told[command.request] = command.state
