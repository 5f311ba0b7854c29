"""How tests are spread over processes (`pytest -n 2`): whole files, so that a module's server is started once; the longest
first, so that the lanes end together.

``make test`` names the slowest files in its last lines: what has grown past a few seconds belongs into SECONDS. A wrong or
missing figure costs balance and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

SPREAD = frozenset(("tests/sched/test_simulation.py", "tests/store/test_faults.py"))
"""Long files whose tests share nothing: their unit is the test."""

SECONDS: dict[str, float] = {
    "tests/whole/test_cases_tiers.py": 109,
    "tests/whole/test_restored.py": 57,
    "tests/whole/test_cases_clients.py": 51,
    "tests/whole/test_cases_tools.py": 49,
    "tests/whole/test_oracle.py": 48,
    "tests/whole/test_cases_answers.py": 44,
    "tests/api/test_engine_model.py": 37,
    "tests/runtime/test_oracle.py": 34,
    "tests/whole/test_device_loss.py": 27,
    "tests/store/test_kill.py": 26,
    "tests/whole/test_cases_store.py": 25,
    "tests/sched/test_simulation.py": 8,
}
"""File -> seconds on a machine with nothing else to do, where that is more than about five."""

SECONDS_OF_A_FILE = {"tests/whole/": 12.0, "tests/": 1.0}
"""By the beginning of its path, for files not named above: those of whole processes start servers."""


def unit_of(nodeid: str) -> str:
    """What must stay in one process together with this test."""
    file = nodeid.partition("::")[0]
    return nodeid if file in SPREAD else file


def seconds_of(file: str) -> float:
    return SECONDS.get(file) or next(seconds for start, seconds in SECONDS_OF_A_FILE.items() if file.startswith(start))


def longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The same tests; files by their seconds, the order within a file kept."""
    return sorted(items, key=lambda item: -seconds_of(item.nodeid.partition("::")[0]))


class FileScheduling(LoadScopeScheduling):
    """Hands a lane its next unit when it has nearly done the last one, in the order of the collection."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)
