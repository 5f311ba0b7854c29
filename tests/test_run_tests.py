"""`make test` (.ci/run_tests.py): which stages, what of ARGS goes where, whose exit status counts, what the last line says."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from lanes import SECONDS, SPREAD, longest_first, seconds_of, unit_of

ROOT = Path(__file__).resolve().parent.parent


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_tests", ROOT / ".ci" / "run_tests.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_tests"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


run_tests = load()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ([], [], "")),
        (["-k", "tests", "-x"], ([], ["-k", "tests", "-x"], "")),
        (["tests/api", "-m", "long", "-n0"], (["tests/api"], ["-n0"], "long")),
        (["--maxfail", "3", "tests/a.py::b", "-p", "no:x"], (["tests/a.py::b"], ["--maxfail", "3", "-p", "no:x"], "")),
        (["-k"], ([], ["-k"], "")),
    ],
)
def test_arguments_are_sorted_out(arguments: list[str], expected: tuple[list[str], list[str], str]) -> None:
    assert run_tests.sorted_out(arguments) == expected


@pytest.mark.parametrize(
    ("paths", "torchless", "others"),
    [
        ([], (), ()),
        (["tests"], (), ("tests",)),
        (["."], (), (".",)),
        (["tests/sched"], ("tests/sched",), None),
        (["tests/store/test_ids.py::test_x", "tests/sched/"], ("tests/store/test_ids.py::test_x", "tests/sched/"), None),
        (["tests/api"], None, ("tests/api",)),
        (["tests/api", "tests/sched/a.py"], ("tests/sched/a.py",), ("tests/api",)),
        (["tests/schedule"], None, ("tests/schedule",)),
    ],
)
def test_paths_go_to_their_environment(
    paths: list[str], torchless: tuple[str, ...] | None, others: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: this environment has nothing to do. Each has its lanes first and what is alone in the end."""
    monkeypatch.chdir(ROOT)
    stages = list(run_tests.stages(paths))
    for environment, wanted in ((True, torchless), (False, others)):
        found = [(stage.alone, stage.paths) for stage in stages if stage.torchless is environment]
        assert found == ([] if wanted is None else [(False, wanted), (True, wanted)])
    assert [stage.alone for stage in stages] == sorted(stage.alone for stage in stages)


def test_commands(tmp_path: Path) -> None:
    report = tmp_path / "r.xml"
    lanes = run_tests.Stage("x", torchless=True, alone=False).command(["-k", "a b"], "", 3, report)
    assert lanes[0] == ".venv-notorch/bin/python"
    assert lanes[lanes.index("-n") + 1] == "3"
    assert lanes[-4:] == ["-k", "a b", "tests/sched", "tests/store"]
    alone = run_tests.Stage("x", False, True, ("tests/api",)).command(["-n", "5"], "slow", 2, report)
    assert "(not long and not gpu) and alone and (slow)" in alone
    assert alone[-2:] == ["-n0", "tests/api"], "whatever was asked for, here it is one after the other"
    assert "--ignore=tests/sched" in alone


@pytest.mark.parametrize(
    ("statuses", "everything", "expected"),
    [
        ([0, 0, 0, 0], True, 0), ([0, 5, 0, 5], False, 0), ([0, 5, 0, 0], True, 5), ([5, 5], False, 5), ([0, 1, 2], False, 1),
        ([5, 3], False, 3), ([], True, 0),
    ],
)  # fmt: skip
def test_whose_exit_status_counts(statuses: list[int], everything: bool, expected: int) -> None:
    assert run_tests.verdict(statuses, everything) == expected


TREE = {
    "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['long: x', 'gpu: x', 'alone: x']\n",
    "tests/sched/test_a.py": "def test_one(): pass\ndef test_two(): pass\n",
    "tests/store/test_b.py": "def test_three(): pass\n",
    "tests/api/test_c.py": "import os\ndef test_four(): pass\n"
    "def test_five(): assert 'PYTEST_XDIST_WORKER' in os.environ\ndef test_six(): assert 0\n",
    "tests/test_d.py": "import os, pytest\n@pytest.mark.alone\n"
    "def test_seven(): assert 'PYTEST_XDIST_WORKER' not in os.environ\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small repository, both of whose environments are this one."""
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for environment in (".venv", ".venv-notorch"):
        python = tmp_path / environment / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
    return tmp_path


def outcome(tree: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / ".ci" / "run_tests.py"), *arguments]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL
    )
    return done.returncode, done.stdout


def test_a_red_test_is_seen_and_the_rest_still_runs(tree: Path) -> None:
    status, said = outcome(tree)
    last = said.splitlines()[-1]
    assert status == 1
    assert last.startswith("== make test: FAILED (exit 1), 6 passed, 1 failed after "), said
    assert said.count("== tests of sched and store, where torch cannot be imported") == 4
    assert "all other tests: FAILED (exit 1) after" in said
    assert "all other tests, alone on the machine: done after" in said
    assert "test_six" in said
    assert "slowest files: tests/" in said


def test_a_green_run_may_have_nothing_that_runs_alone(tree: Path) -> None:
    (tree / "tests/api/test_c.py").write_text("def test_four(): pass\n")
    status, said = outcome(tree)
    assert status == 0, said
    assert "where torch cannot be imported, alone on the machine: no tests after" in said
    assert said.splitlines()[-1].startswith("== make test: 5 passed after ")


def test_arguments_choose(tree: Path) -> None:
    status, said = outcome(tree, "-k", "test_one or test_three")
    assert status == 0, said
    assert said.splitlines()[-1].startswith("== make test: 2 passed after ")
    assert "no tests after" in said
    status, said = outcome(tree, "tests/api", "-k", "nothing_has_this_name")
    assert status == 5
    assert "where torch cannot" not in said
    assert said.splitlines()[-1].startswith("== make test: FAILED (exit 5), 0 passed after ")


def test_units_and_order() -> None:
    """Files stay together but for those that share nothing; every file that the tables name is there."""
    for file in [*SECONDS, *SPREAD]:
        assert (ROOT / file).is_file(), f"{file} is named in tests/support/lanes.py"
    spread = min(SPREAD)
    assert unit_of(f"{spread}::test_x[1]") == f"{spread}::test_x[1]"
    assert unit_of("tests/api/test_body.py::test_x") == "tests/api/test_body.py"
    assert seconds_of("tests/whole/test_new.py") > seconds_of("tests/api/test_new.py") > 0

    class Item:
        def __init__(self, nodeid: str) -> None:
            self.nodeid = nodeid

    items = [Item(f"{file}::test_{i}") for i in range(2) for file in ("tests/api/test_new.py", "tests/whole/test_new.py")]
    ordered = [item.nodeid for item in longest_first(items)]  # type: ignore[arg-type]
    assert ordered == [
        "tests/whole/test_new.py::test_0", "tests/whole/test_new.py::test_1",
        "tests/api/test_new.py::test_0", "tests/api/test_new.py::test_1",
    ]  # fmt: skip
