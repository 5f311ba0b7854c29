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
    "tests/api/test_build.py": 15.0,
    "tests/api/test_build_cuda.py": 15.0,
    "tests/api/test_cli.py": 10.0,
    "tests/api/test_engine_crowd.py": 10.0,
    "tests/api/test_engine_model.py": 45.0,
    "tests/api/test_http_connections.py": 10.0,
    "tests/api/test_http_engine.py": 12.0,
    "tests/api/test_serve_end.py": 15.0,
    "tests/bench/test_gpu_rotation.py": 12.0,
    "tests/runtime/test_attention.py": 15.0,
    "tests/runtime/test_deterministic.py": 12.0,
    "tests/runtime/test_grammar.py": 13.0,
    "tests/runtime/test_oracle.py": 34.0,
    "tests/runtime/test_sampler.py": 6.0,
    "tests/sched/test_deterministic.py": 5.0,
    "tests/sched/test_loop_crowd.py": 15.0,
    "tests/sched/test_loop_turns.py": 9.0,
    "tests/sched/test_mutants.py": 9.0,
    "tests/sched/test_simulation.py": 4.0,  # each of its tests
    "tests/store/test_crash.py": 12.0,
    "tests/store/test_kill.py": 26.0,
    "tests/test_packaging.py": 25.0,
    "tests/test_run_tests.py": 15.0,
    "tests/test_setup.py": 20.0,
    "tests/whole/test_cases_answers.py": 60.0,
    "tests/whole/test_cases_clients.py": 45.0,
    "tests/whole/test_cases_store.py": 25.0,
    "tests/whole/test_cases_tiers.py": 109.0,
    "tests/whole/test_cases_tools.py": 55.0,
    "tests/whole/test_device_loss.py": 27.0,
    "tests/whole/test_oracle.py": 40.0,
    "tests/whole/test_restored.py": 57.0,
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
