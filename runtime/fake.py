"""A model, its pool and its copies without torch: small, exact, and unforgiving about pages.

The KV of position p is 8 bytes that depend on all token ids up to p, because it is computed from the bytes of position
p - 1 *as read through the row's page table*; the next token is computed only from the bytes of all positions below kv_len,
every page, each offset, read the same way. So a stale offset, swapped pages, a page restored short or read before its copy
is complete, KV of other ids: each gives another token, and ``FakeModel.continuation`` says what the right ones are.

``shape_sensitive``: the bytes also depend on the kind and the bounds of the call that computed them, as real kernels'
bits do. Then answers are equal only if the scheduler repeats the same calls: what deterministic mode promises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvalet.runtime.fake_model import SEED_KV, TOKEN_BYTES, FakeModel, FakeWriter
from kvalet.runtime.plan import PageId, Row, RowId, RowOpen, RowResult, SamplingParams, SlotId, StepPlan, StepResult

POISON = 0xA5

CopyDoneCallback = Callable[[str | None, float], None]


class FakePool:
    """``n_pages`` pages of ``page_tokens`` x 8 bytes, poisoned."""

    def __init__(self, n_pages: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.page_bytes = page_tokens * TOKEN_BYTES
        self.pages = [bytearray([POISON]) * self.page_bytes for _ in range(n_pages)]

    def page_view(self, page: int) -> memoryview:
        return memoryview(self.pages[page])

    def poison(self, page: int) -> None:
        self.pages[page][:] = bytes([POISON]) * self.page_bytes


class FakeSlab:
    """Slots of one chunk's pages each, without a header block."""

    def __init__(self, n_slots: int, chunk_pages: int, page_bytes: int) -> None:
        self.slots = [bytearray([POISON]) * (chunk_pages * page_bytes) for _ in range(n_slots)]

    def view(self, slot: SlotId) -> memoryview:
        """Writable, the whole slot."""
        return memoryview(self.slots[slot])


@dataclass(slots=True)
class _OpenRow:
    ids: list[int]
    n_prompt: int
    pages: list[PageId]
    params: SamplingParams
    writer: FakeWriter
    ended: bool = False


class FakeEngine:
    """``EnginePort``. ``launch`` computes at once, ``finish`` only hands out; so steps may be planned ahead (``lag`` 1).

    Raises RuntimeError on a plan that breaks the contract of runtime.plan: that is a defect of the scheduler.
    """

    synchronous = True

    def __init__(self, pool: FakePool, model: FakeModel | None = None) -> None:
        self.pool = pool
        self.model = model or FakeModel()
        self.rows: dict[RowId, _OpenRow] = {}
        self.launched_steps = 0

    def launch(self, plan: StepPlan) -> StepResult:
        self.launched_steps += 1
        for row in plan.closes:
            del self.rows[row]
        for opening in plan.opens:
            self._open(opening)
        for source, target in plan.page_copies:
            self.pool.pages[target][:] = self.pool.pages[source]
        results = [result for row in plan.rows if (result := self._row(row)) is not None]
        return StepResult(plan.step, tuple(results))

    def finish(self, launched: StepResult) -> StepResult:
        return launched

    def _open(self, opening: RowOpen) -> None:
        if opening.row in self.rows:
            raise RuntimeError(f"row {opening.row} is open already")
        writer = FakeWriter(self.model, opening.params, opening.n_prompt)
        for token in opening.ids[opening.n_prompt :]:
            writer.accept((token,))
        self.rows[opening.row] = _OpenRow(list(opening.ids), opening.n_prompt, list(opening.pages), opening.params, writer)
        first_new = -(-opening.kv_len // self.pool.page_tokens)
        for page in opening.pages[first_new:]:
            self.pool.poison(page)

    def _row(self, row: Row) -> RowResult | None:
        state = self.rows[row.row]
        for page in row.new_pages:
            self.pool.poison(page)
        state.pages.extend(row.new_pages)
        end = row.start + row.n
        if end > len(state.ids) and not state.ended:
            raise RuntimeError(f"{row} feeds tokens that nobody knows: {len(state.ids)} ids")
        if row.sample != (end == len(state.ids)) and not state.ended:
            raise RuntimeError(f"{row} must sample exactly at its last id of {len(state.ids)}")
        self._feed(state, row)
        if state.ended:
            return None
        if not row.sample:
            return RowResult(row.row, end)
        kv = b"".join(bytes(self.pool.pages[page]) for page in state.pages)[: end * TOKEN_BYTES]
        ids, text, ended = state.writer.accept(self.model.next_ids(kv, len(state.ids) - state.n_prompt, state.params))
        state.ids.extend(ids)
        state.ended = ended is not None
        return RowResult(row.row, end, ids, text, ended, state.writer.reusable if ended else -1)

    def _feed(self, state: _OpenRow, row: Row) -> None:
        """Write KV of [start, start + n). A row that has ended writes a surplus token's KV: garbage, in its own page."""
        size = self.pool.page_tokens
        for at in range(row.start, row.start + row.n):
            token = state.ids[at] if at < len(state.ids) else 0
            previous = SEED_KV if at == 0 else self._read(state.pages[(at - 1) // size], (at - 1) % size)
            value = self.model.kv(previous, token, (row.decode, row.start, row.n))
            offset = at % size * TOKEN_BYTES
            self.pool.pages[state.pages[at // size]][offset : offset + TOKEN_BYTES] = value.to_bytes(TOKEN_BYTES, "little")

    def _read(self, page: PageId, offset: int) -> int:
        start = offset * TOKEN_BYTES
        return int.from_bytes(self.pool.pages[page][start : start + TOKEN_BYTES], "little")


@dataclass(slots=True)
class FakeCopy:
    """A copy that was asked for. ``run`` moves the bytes now and calls ``done``; ``fail`` leaves garbage behind."""

    inward: bool
    pool_pages: tuple[PageId, ...]
    slot: SlotId
    slot_pages: tuple[int, ...]
    done: CopyDoneCallback
    copier: FakeCopier

    def run(self) -> None:
        size = self.copier.pool.page_bytes
        slot = self.copier.slab.slots[self.slot]
        for place, page in zip(self.slot_pages, self.pool_pages, strict=True):
            if self.inward:
                self.copier.pool.pages[page][:] = slot[place * size : (place + 1) * size]
            else:
                slot[place * size : (place + 1) * size] = self.copier.pool.pages[page]
        self.done(None, 0.5)

    def fail(self, error: str) -> None:
        self.done(error, 0.0)


class FakeCopier:
    """``CopierPort``. ``hold`` False: copies run inside the call. True: they wait in ``pending`` for ``run`` or ``fail`` of
    whoever scripts the order; the pages of a waiting inward copy are poisoned, so that reading early is seen."""

    def __init__(self, pool: FakePool, slab: FakeSlab, *, hold: bool = False) -> None:
        self.pool = pool
        self.slab = slab
        self.hold = hold
        self.pending: deque[FakeCopy] = deque()

    def copy_out(
        self, pages: Sequence[PageId], slot: SlotId, first_page: int, done: CopyDoneCallback, n_tokens: int = 0
    ) -> None:
        places = tuple(range(first_page, first_page + len(pages)))
        self._take(FakeCopy(False, tuple(pages), slot, places, done, self))

    def copy_in(self, slot: SlotId, slot_pages: Sequence[int], pages: Sequence[PageId], done: CopyDoneCallback) -> None:
        for page in pages:
            self.pool.poison(page)
        self._take(FakeCopy(True, tuple(pages), slot, tuple(slot_pages), done, self))

    def close(self) -> None:
        """What waits fails."""
        while self.pending:
            self.pending.popleft().fail("the copier is closed")

    def _take(self, copy: FakeCopy) -> None:
        if self.hold:
            self.pending.append(copy)
        else:
            copy.run()
