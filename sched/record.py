"""The KV record of a turn: what was found where, what was computed, how long each stage took."""

from __future__ import annotations

import dataclasses

from kvalet.sched.board import Board
from kvalet.sched.session import Turn
from kvalet.sched.transfer_record import Transfer
from kvalet.sched.turns import TurnReport


def restored(turn: Turn, transfer: Transfer, page_bytes: int) -> None:
    """One chunk has come in for ``turn``."""
    turn.read_ms += transfer.read_ms
    turn.verify_ms += transfer.verify_ms
    turn.copy_ms += transfer.copy_ms
    assert transfer.chunk is not None
    turn.tiers.append((transfer.chunk.end, transfer.from_disk))
    if transfer.from_disk:
        turn.bytes_from_disk += transfer.n_bytes
    else:
        turn.bytes_from_ram += transfer.n_pages * page_bytes


def account(board: Board, turn: Turn) -> None:
    """Fill the record: tiers on the first admission, what is done again on later ones."""
    hit = turn.kv_len
    board.counters.prefix_hit_tokens += hit
    turn.prefill_from = board.now
    if turn.tiers:
        turn.restore_ms += (board.now - turn.restore_from) * 1e3
    ram = disk = 0
    at = min(turn.resident_base, hit)
    for end, from_disk in turn.tiers:
        n = max(0, min(end, hit) - at)
        at += n
        ram, disk = (ram, disk + n) if from_disk else (ram + n, disk)
    resident = hit - ram - disk
    if turn.prefilled_once:
        again = max(0, min(turn.kv_high, len(turn.ids)) - resident)
        turn.report = dataclasses.replace(turn.report, recomputed_tokens=turn.report.recomputed_tokens + again)
        return
    turn.prefilled_once = True
    if turn.branch is not None:
        had = min(turn.branch.kv_len, _shared(turn))
        missing = had - hit - sum(turn.lost.values())
        if missing > board.config.page_tokens:
            turn.lost["evicted"] = missing
    turn.report = dataclasses.replace(
        turn.report, prompt_tokens=turn.n_prompt, computed_tokens=turn.n_prompt - hit, resident_tokens=resident,
        ram_tokens=ram, disk_tokens=disk, queued_ms=(turn.admitted_at - turn.submitted_at) * 1e3,
    )  # fmt: skip


def _shared(turn: Turn) -> int:
    diverged = turn.report.diverged_at
    return diverged if diverged >= 0 else turn.n_prompt


def final_report(turn: Turn) -> TurnReport:
    first = turn.first_token_at
    return dataclasses.replace(
        turn.report,
        prompt_tokens=turn.n_prompt,
        completion_tokens=turn.accepted,
        preemptions=turn.preemptions,
        bytes_from_ram=turn.bytes_from_ram,
        bytes_from_disk=turn.bytes_from_disk,
        lookup_ms=turn.lookup_ms,
        read_ms=turn.read_ms,
        verify_ms=turn.verify_ms,
        copy_ms=turn.copy_ms,
        restore_ms=turn.restore_ms,
        prefill_ms=(first - turn.prefill_from) * 1e3 if first and turn.preemptions == 0 else turn.report.prefill_ms,
        ttft_ms=(first - turn.submitted_at) * 1e3 if first else 0.0,
        lost=dict(turn.lost),
    )
