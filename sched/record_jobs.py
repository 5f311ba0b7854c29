"""Carries out what concerns records: jobs of the store that move no slots. Every one that starts is answered once in the inbox.

Whatever the store raises becomes the failure of that job, as in ``in_flight``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvalet.sched.commands import DropRecord, ReadRecords, WriteRecord
from kvalet.sched.events import Event, RecordDone, RecordFailed, RecordsRead, TransferId
from kvalet.sched.inbox import Posting
from kvalet.sched.ports import StorePort
from kvalet.store.record import Record

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Reading:
    """One ``ReadRecords``: what has come of it so far. ``found`` by place, so that the order asked for is kept."""

    n_jobs: int
    missing: int
    found: dict[int, Record] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


class RecordJobs:
    """Loop thread only, but for the callbacks it hands to the store: these only post. Bounded by what the core asks for:
    a few writes, and for each session that is being opened one read of at most ``MAX_BRANCHES`` records."""

    def __init__(self, store: StorePort | None, post: Callable[[Posting], None]) -> None:
        self._store = store
        self._post = post
        self._writing: set[TransferId] = set()
        self._reading: dict[TransferId, _Reading] = {}

    def __len__(self) -> int:
        return len(self._writing) + len(self._reading)

    def write(self, command: WriteRecord) -> None:
        transfer = command.transfer
        self._writing.add(transfer)

        def done(completion: Any) -> None:
            self._post(partial(self._written, transfer, completion))

        try:
            if self._store is None:
                self._post(partial(self._write_failed, transfer, "closed"))
            else:
                self._store.write_record(transfer, command.record, done, klass=command.klass)
        except Exception:
            log.exception("record %s could not be written", transfer)
            self._post(partial(self._write_failed, transfer, "internal"))

    def read(self, command: ReadRecords) -> None:
        """One job per branch, numbered from ``transfer`` on; one answer when the last has come."""
        self._reading[command.transfer] = _Reading(len(command.branches), len(command.branches))
        for place, branch in enumerate(command.branches):
            self._read_one(command, place, branch)

    def _read_one(self, command: ReadRecords, place: int, branch: str) -> None:
        transfer = command.transfer

        def done(completion: Any) -> None:
            self._post(partial(self._read, transfer, place, completion))

        try:
            if self._store is None:
                self._post(partial(self._read_failed, transfer, "closed"))
            else:
                self._store.read_record(transfer + place, command.tenant, command.session, branch, done)
        except Exception:
            log.exception("record of session %r could not be read", command.session)
            self._post(partial(self._read_failed, transfer, "internal"))

    def drop(self, command: DropRecord) -> None:
        if self._store is not None:
            self._store.drop_record(command.tenant, command.session, command.branch)

    def cancel_all(self) -> None:
        if self._store is not None:
            for transfer in self._writing:
                self._store.cancel(transfer)
            for first, reading in self._reading.items():
                for place in range(reading.n_jobs):
                    self._store.cancel(first + place)

    def _settle(self, completion: Any) -> Any:
        """The store's books first, whoever still waits for the answer. None: they could not be settled."""
        assert self._store is not None
        try:
            return self._store.settle(completion)
        except Exception:
            log.exception("a record job could not be settled")
            return None

    def _written(self, transfer: TransferId, completion: Any, now: float) -> Event | None:
        result = self._settle(completion)
        if result is None or result.reason:
            return self._write_failed(transfer, "internal" if result is None else result.reason, now)
        if transfer not in self._writing:
            return None
        self._writing.remove(transfer)
        return RecordDone(now, transfer, result.n_bytes)

    def _write_failed(self, transfer: TransferId, reason: str, now: float) -> Event | None:
        if transfer not in self._writing:
            return None
        self._writing.remove(transfer)
        return RecordFailed(now, transfer, reason)

    def _read(self, transfer: TransferId, place: int, completion: Any, now: float) -> Event | None:
        result = self._settle(completion)
        if result is None or result.reason or result.record is None:
            reason = "internal" if result is None else result.reason or "missing"
            return self._read_failed(transfer, reason, now)
        reading = self._reading.get(transfer)
        if reading is not None:
            reading.found[place] = result.record
        return self._one_less(transfer, now)

    def _read_failed(self, transfer: TransferId, reason: str, now: float) -> Event | None:
        reading = self._reading.get(transfer)
        if reading is not None:
            reading.failures.append(reason)
        return self._one_less(transfer, now)

    def _one_less(self, transfer: TransferId, now: float) -> Event | None:
        reading = self._reading.get(transfer)
        if reading is None:
            return None
        reading.missing -= 1
        if reading.missing:
            return None
        del self._reading[transfer]
        records = tuple(reading.found[place] for place in sorted(reading.found))
        return RecordsRead(now, transfer, records, tuple(reading.failures))

    def __repr__(self) -> str:
        return f"<RecordJobs writing={len(self._writing)} reading={len(self._reading)}>"
