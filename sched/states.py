"""The two lifecycles of the scheduler as tables, with the theory of operation on top.

Theory. A *turn* is one request; a *transfer* is one chunk on its way between tiers. They are never multiplied: a turn
that waits for bytes is ``restoring`` whatever its transfers are doing, and a transfer whose turn has gone goes on to its
own end. What ties them is ownership and leases:

- a turn that is queued owns and leases nothing; a turn in any other live state owns the pages of its table and its spare
  pages, and pins its path in the page index;
- a transfer leases the pages and holds the slot it moves bytes between, from the command until the answer. Closing,
  cancelling or preempting a turn drops ownership at once; a page returns to the free list when it has neither owner nor
  lease. So nothing ever waits for a turn to "finish being cancelled";
- a step in flight leases the pages of rows whose turn has let go of them, until its result arrives. Results carry the
  row's id, which is never reused: results of a closed row are dropped by comparison.

A session is only open or closed; "parked" and "resident" are read off the chunk map and are no states. A turn that is
preempted goes back to ``queued``: its tokens are kept, its KV stays in the index as long as nobody needs the room.

``docs/lifecycle.md`` is generated from these tables (``python -m kvalet.sched.states``); a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class TurnState(StrEnum):
    QUEUED = "queued"
    """Waits for pages; owns and leases nothing."""
    RESTORING = "restoring"
    """Its pages are reserved; some of its KV is on its way from RAM or disk."""
    PREFILLING = "prefilling"
    """Known tokens are being fed: the prompt, or after a preemption what had been generated as well."""
    DECODING = "decoding"
    """One token a step."""
    PAUSED = "paused"
    """Its client does not read. Keeps its pages until they are needed; then it is the first to go."""
    ENDED = "ended"


class TurnCause(StrEnum):
    ADMITTED = "admitted, all that matched is on the device"
    ADMITTED_TO_RESTORE = "admitted, something must come from RAM or disk"
    RESTORED = "last page in, or the run ended at a bad chunk"
    SAMPLED = "first new token of this admission"
    BLOCKED = "channel full"
    UNBLOCKED_PREFILL = "channel read, tokens left to feed"
    UNBLOCKED_DECODE = "channel read, decoding"
    REQUEUED = "preempted, or its restore passed to an older asker"
    END = "ended, once, with one reason"


class TransferState(StrEnum):
    RESERVED = "reserved"
    """Pages are leased; no command is out: it waits for a slot."""
    READING = "reading"
    """Disk -> slot."""
    COPYING = "copying"
    """Device -> slot or slot -> device."""
    WRITING = "writing"
    """Slot -> disk."""
    DONE = "done"
    FAILED = "failed"


class TransferCause(StrEnum):
    READ = "ReadChunk or ReadTail sent"
    COPY = "CopyOut or CopyIn sent"
    WRITE = "WriteChunk sent"
    COMPLETE = "last answer came"
    FAIL = "an answer was a failure, or the last asker left"


TURN_TABLE: Mapping[TurnState, Mapping[TurnCause, TurnState]] = {
    TurnState.QUEUED: {
        TurnCause.ADMITTED: TurnState.PREFILLING,
        TurnCause.ADMITTED_TO_RESTORE: TurnState.RESTORING,
        TurnCause.END: TurnState.ENDED,
    },
    TurnState.RESTORING: {
        TurnCause.RESTORED: TurnState.PREFILLING,
        TurnCause.REQUEUED: TurnState.QUEUED,
        TurnCause.END: TurnState.ENDED,
    },
    TurnState.PREFILLING: {
        TurnCause.SAMPLED: TurnState.DECODING,
        TurnCause.BLOCKED: TurnState.PAUSED,
        TurnCause.REQUEUED: TurnState.QUEUED,
        TurnCause.END: TurnState.ENDED,
    },
    TurnState.DECODING: {
        TurnCause.BLOCKED: TurnState.PAUSED,
        TurnCause.REQUEUED: TurnState.QUEUED,
        TurnCause.END: TurnState.ENDED,
    },
    TurnState.PAUSED: {
        TurnCause.UNBLOCKED_PREFILL: TurnState.PREFILLING,
        TurnCause.UNBLOCKED_DECODE: TurnState.DECODING,
        TurnCause.REQUEUED: TurnState.QUEUED,
        TurnCause.END: TurnState.ENDED,
    },
    TurnState.ENDED: {},
}

TRANSFER_TABLE: Mapping[TransferState, Mapping[TransferCause, TransferState]] = {
    TransferState.RESERVED: {
        TransferCause.READ: TransferState.READING,
        TransferCause.COPY: TransferState.COPYING,
        TransferCause.WRITE: TransferState.WRITING,
        TransferCause.FAIL: TransferState.FAILED,
    },
    TransferState.READING: {
        TransferCause.COPY: TransferState.COPYING,
        TransferCause.COMPLETE: TransferState.DONE,
        TransferCause.FAIL: TransferState.FAILED,
    },
    TransferState.COPYING: {
        TransferCause.WRITE: TransferState.WRITING,
        TransferCause.COMPLETE: TransferState.DONE,
        TransferCause.FAIL: TransferState.FAILED,
    },
    TransferState.WRITING: {
        TransferCause.COMPLETE: TransferState.DONE,
        TransferCause.FAIL: TransferState.FAILED,
    },
    TransferState.DONE: {},
    TransferState.FAILED: {},
}


class IllegalTransition(RuntimeError):
    """A pair (state, cause) that the tables do not have. The core turns it into a ``CoreDefect`` with its story."""


def next_turn_state(state: TurnState, cause: TurnCause) -> TurnState:
    """Raises ``IllegalTransition`` for a pair that is not in ``TURN_TABLE``."""
    try:
        return TURN_TABLE[state][cause]
    except KeyError:
        raise IllegalTransition(f"a turn that is {state.value} cannot take: {cause.value}") from None


def next_transfer_state(state: TransferState, cause: TransferCause) -> TransferState:
    """Raises ``IllegalTransition`` for a pair that is not in ``TRANSFER_TABLE``."""
    try:
        return TRANSFER_TABLE[state][cause]
    except KeyError:
        raise IllegalTransition(f"a transfer that is {state.value} cannot take: {cause.value}") from None


def _diagram(title: str, first: StrEnum, table: Mapping[StrEnum, Mapping[StrEnum, StrEnum]]) -> list[str]:
    lines = [f"## {title}", "", "```mermaid", "stateDiagram-v2", f"    [*] --> {first.value}"]
    for state, row in table.items():
        lines += [f"    {state.value} --> {target.value}: {cause.value}" for cause, target in row.items()]
        if not row:
            lines.append(f"    {state.value} --> [*]")
    lines += ["```", "", "| from | cause | to |", "|---|---|---|"]
    lines += [f"| {state.value} | {cause.value} | {to.value} |" for state, row in table.items() for cause, to in row.items()]
    return [*lines, ""]


def render_lifecycle() -> str:
    """The text of ``docs/lifecycle.md``."""
    lines = [
        "# Lifecycles",
        "",
        "Generated by `python -m kvalet.sched.states`; do not edit. The theory is in `sched/states.py`.",
        "",
    ]
    lines += _diagram("Turn", TurnState.QUEUED, TURN_TABLE)  # type: ignore[arg-type]  # Mapping is invariant in its key
    lines += _diagram("Transfer", TransferState.RESERVED, TRANSFER_TABLE)  # type: ignore[arg-type]
    return "\n".join(lines)


if __name__ == "__main__":
    print(render_lifecycle(), end="")
