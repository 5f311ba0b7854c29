"""Waiting reads: three classes, fair shares between sessions inside a class. Pure; the owner locks."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

Job = TypeVar("Job")


class FairQueue(Generic[Job]):
    """A smaller class always goes first; inside a class sessions take turns, one job each, first in first out within a
    session. Bounded by its owner (``len``). Job ids are unique."""

    def __init__(self, klasses: int) -> None:
        self._rings: list[OrderedDict[str, deque[tuple[int, Job]]]] = [OrderedDict() for _ in range(klasses)]
        self._where: dict[int, tuple[int, str]] = {}

    def __len__(self) -> int:
        return len(self._where)

    def waiting(self, up_to_klass: int) -> bool:
        """Is anything of this class or a more urgent one waiting?"""
        return any(self._rings[klass] for klass in range(up_to_klass + 1))

    def put(self, job_id: int, job: Job, *, session: str, klass: int) -> None:
        klass = min(max(klass, 0), len(self._rings) - 1)
        self._rings[klass].setdefault(session, deque()).append((job_id, job))
        self._where[job_id] = (klass, session)

    def take(self) -> Job | None:
        """The next job, or None. Its session goes to the back of its class."""
        for ring in self._rings:
            if ring:
                session, jobs = next(iter(ring.items()))
                job_id, job = jobs.popleft()
                del self._where[job_id]
                ring.move_to_end(session)
                if not jobs:
                    del ring[session]
                return job
        return None

    def remove(self, job_id: int) -> Job | None:
        """Take out one waiting job; None if it is not waiting (any more)."""
        where = self._where.pop(job_id, None)
        if where is None:
            return None
        klass, session = where
        jobs = self._rings[klass][session]
        for index, (waiting_id, job) in enumerate(jobs):
            if waiting_id == job_id:
                del jobs[index]
                if not jobs:
                    del self._rings[klass][session]
                return job
        raise AssertionError("a waiting job is not where the queue says")

    def jobs(self) -> list[Job]:
        return [job for ring in self._rings for waiting in ring.values() for _, job in waiting]
