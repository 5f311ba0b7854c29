"""The demo's figures: turns by the slowest tier they touched, bytes moved, the longest gap while they moved. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvalet.loadtest.report import none_if_nan, percentile
from kvalet.loadtest.runner import Turn

KINDS = ("resident", "ram", "disk", "restart", "cold")


def kind_of(record: Mapping[str, Any]) -> str:
    """The slowest tier that the turn's KV came from; cold where all of it was computed."""
    if record.get("disk_tokens"):
        return "disk"
    if record.get("ram_tokens"):
        return "ram"
    return "resident" if record.get("resident_tokens") else "cold"


def restored_tokens(turn: Turn) -> int:
    """Prompt tokens whose KV came back from RAM or disk."""
    return int(turn.outcome.record.get("ram_tokens", 0)) + int(turn.outcome.record.get("disk_tokens", 0))


def computed_tokens(turn: Turn) -> int:
    """Prompt tokens that were computed."""
    return int(turn.outcome.record.get("computed_tokens", 0))


def figures(turns: Sequence[Turn]) -> dict[str, Any]:
    """Count, tokens and time to first token of some turns. Milliseconds are null where there is no turn."""
    ttft = [turn.outcome.ttft_s for turn in turns if turn.outcome.ttft_s is not None]
    return {
        "count": len(turns),
        "tokens_restored": sum(map(restored_tokens, turns)),
        "tokens_resident": sum(int(turn.outcome.record.get("resident_tokens", 0)) for turn in turns),
        "tokens_computed": sum(map(computed_tokens, turns)),
        "ttft_p50_ms": none_if_nan(round(percentile(ttft, 0.5) * 1e3, 1)),
        "ttft_p90_ms": none_if_nan(round(percentile(ttft, 0.9) * 1e3, 1)),
    }


def by_kind(before: Iterable[Turn], after_restart: Sequence[Turn]) -> dict[str, dict[str, Any]]:
    """One object per kind. Turns after the restart are one kind, whatever tier they touched."""
    groups: dict[str, list[Turn]] = {kind: [] for kind in KINDS}
    for turn in before:
        groups[kind_of(turn.outcome.record)].append(turn)
    groups["restart"] = list(after_restart)
    return {kind: figures(turns) for kind, turns in groups.items()}


@dataclass(frozen=True, slots=True)
class Moment:
    """``moved``: chunks moved between tiers since the start of the server, seen at ``at_s``."""

    at_s: float
    moved: float


def moving_windows(moments: Sequence[Moment]) -> list[tuple[float, float]]:
    """(from, to) between neighbouring moments in which chunks moved."""
    return [(a.at_s, b.at_s) for a, b in pairwise(moments) if b.moved > a.moved]


def longest_gap_s(turns: Iterable[Turn], windows: Sequence[tuple[float, float]]) -> float:
    """The longest time between two content chunks of one turn that overlaps a window; 0.0 if none does."""
    longest = 0.0
    for turn in turns:
        for a, b in pairwise(turn.outcome.chunk_s):
            if b - a > longest and any(a < end and b > begin for begin, end in windows):
                longest = b - a
    return longest


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the answers were compared with the run whose pool holds everything. ``token_for_token``: turns whose ids were
    compared; ``teacher_forced``: turns whose ids were fed to the model in one piece, ``forced_tokens`` of them, of which
    ``forced_agree`` were the model's own first choice; ``forced_margin``: the most that a chosen token's logit lay below the
    largest allowed one. ``differences``: one sentence each, empty = equal."""

    token_for_token: int = 0
    teacher_forced: int = 0
    forced_tokens: int = 0
    forced_agree: int = 0
    forced_margin: float = 0.0
    differences: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        return not self.differences and self.token_for_token + self.teacher_forced > 0

    def as_json(self) -> dict[str, Any]:
        return {
            "token_for_token": self.token_for_token,
            "teacher_forced": self.teacher_forced,
            "forced_tokens": self.forced_tokens,
            "forced_agree": self.forced_agree,
            "forced_margin": round(self.forced_margin, 4),
            "differences": list(self.differences),
        }


def verdict(report: Mapping[str, Any]) -> list[str]:
    """Why the demo has failed; empty = it has not."""
    faults = []
    if not report["answers_equal"]:
        faults.append("answers differ from those of the run whose pool holds everything")
    for kind, where in (("ram", "RAM"), ("disk", "disk"), ("restart", "disk after the restart")):
        if not report[kind]["tokens_restored"]:
            faults.append(f"nothing was restored from {where}")
    if not report["requests"]["ended_once"]:
        faults.append("not every request ended exactly once")
    return faults + list(report["faults"])


def summary(report: Mapping[str, Any]) -> str:
    """The report as a person reads it."""
    lines = [f"{'turns':<16}{'count':>6}{'TTFT p50':>10}{'p90 ms':>9}{'computed':>10}{'resident':>10}{'restored':>10}"]
    labels = {"resident": "resident", "ram": "from RAM", "disk": "from disk", "restart": "after restart", "cold": "cold"}
    for kind, label in labels.items():
        f = report[kind]
        p50, p90 = (("-" if f[name] is None else f"{f[name]:.0f}") for name in ("ttft_p50_ms", "ttft_p90_ms"))
        tokens = f"{f['tokens_computed']:>10}{f['tokens_resident']:>10}{f['tokens_restored']:>10}"
        lines.append(f"{label:<16}{f['count']:>6}{p50:>10}{p90:>9}{tokens}")
    moved = report["bytes"]
    lines += [
        "MB spilled to RAM {spilled_to_ram:.0f}, to disk {spilled_to_disk:.0f}; restored from RAM {restored_from_ram:.0f}, "
        "from disk {restored_from_disk:.0f}".format(**{name: value / 1e6 for name, value in moved.items()}),
        f"longest gap between two tokens of a running agent while others moved: {report['longest_gap_ms_while_moving']:.0f} ms",
        "event loop lag: p50 {loop_lag_p50_ms:.1f} ms, p99 {loop_lag_p99_ms:.1f} ms, max {loop_lag_max_ms:.1f} ms".format(
            **report
        ),
        f"requests: {report['requests']['sent']} sent, ended by reason {report['requests']['ended']}",
        f"answers equal: {report['answers_equal']} ({report['compared']['token_for_token']} turns token for token, "
        f"{report['compared']['teacher_forced']} by teacher forcing)",
    ]
    return "\n".join(lines)
