"""What the device engine keeps of open rows and of steps in flight."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from kvalet.runtime.cuda_graphs import DecodeGraph
from kvalet.runtime.device_ops import DeviceEvent
from kvalet.runtime.plan import Row, StepPlan, StepResult
from kvalet.runtime.rows import RowState
from torch import Tensor

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
RING = 4
"""Pinned buffers per kind. A step's are free again when it has finished; at most two steps are in flight."""


class Where(Enum):
    """Where a row's next id is chosen."""

    GREEDY = auto()
    """On the device, the largest logit."""
    DRAWN = auto()
    """On the device, by ``device_sampler``."""
    HOST = auto()
    """At ``finish``, from edited logits."""


@dataclass(slots=True)
class OpenRow:
    """An open row: its text state, page table and place in ``last_ids``. ``on_device``: the position whose id stands there."""

    state: RowState
    slot: int
    pages: list[int]
    where: Where
    seed: int
    on_device: int = -1


Work = tuple[Row, OpenRow]


@dataclass(slots=True)
class Launched:
    """A step in flight. ``sampled``: (index in ``work``, index in ``ids``) of rows sampled on the device; ``hosted``: (index in
    ``work``, logits) of those that the host samples; ``taken``: how many of ``ids`` are given away."""

    plan: StepPlan
    work: list[Work]
    ids: Tensor
    event: DeviceEvent
    started: float
    sampled: list[tuple[int, int]] = field(default_factory=list)
    hosted: list[tuple[int, Tensor]] = field(default_factory=list)
    taken: int = 0
    result: StepResult | None = None


@dataclass(slots=True)
class Call:
    """One forward of a step: its rows (indices in ``work``) and, once planned, its inputs. ``graph`` None: a packed prefill.
    ``asking``: (index in ``work``, row of the call's logits) of the rows that want a token."""

    at: list[int]
    asking: list[tuple[int, int]]
    graph: DecodeGraph | None = None
    packed: Tensor | None = None
    picks: Tensor | None = None
    draws: Tensor | None = None


def buckets_for(max_rows: int) -> tuple[int, ...]:
    """The batch sizes that get a graph: all up to the first that takes ``max_rows`` (or the largest: a step of more rows
    replays it more than once)."""
    limit = min((b for b in BUCKETS if b >= max_rows), default=BUCKETS[-1])
    return tuple(b for b in BUCKETS if b <= limit)
