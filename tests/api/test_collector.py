"""The collector after start-up: what exists is exempt, full collections are rare, young garbage still goes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from kvalet.api.collector import RARELY, calm


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


class Knot:
    def __init__(self) -> None:
        self.me = self


def test_start_up_is_frozen_and_full_collections_are_rare() -> None:
    young, middle, _ = gc.get_threshold()
    calm()
    assert gc.get_freeze_count() > 1_000
    assert gc.get_threshold() == (young, middle, RARELY)


def test_young_cycles_still_go() -> None:
    calm()
    gone = weakref.ref(Knot())
    gc.collect(1)
    assert gone() is None


def test_a_cycle_in_what_is_frozen_is_kept_until_it_is_thawed() -> None:
    knot = Knot()
    gone = weakref.ref(knot)
    calm()
    del knot
    gc.collect()
    assert gone() is not None
    gc.unfreeze()
    gc.collect()
    assert gone() is None
