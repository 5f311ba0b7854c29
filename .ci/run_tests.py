"""`make test`: every test, in stages, two files at a time, and one line with the total.

    run_tests.py [PYTEST ARGUMENT ...]

Run with .venv's interpreter; standard library only. The stages are in docs/testing.md. Without arguments lanes that find no
test are a failure; with arguments (a path, -k ...) only a run that finds none in any stage is. Stages go on after one that
failed, so that one run shows all that is red; not after -x, an interruption or a wrong argument. Exit status: that of the first
stage that failed.

LANES=N in the environment: test processes side by side (2; one per core is right, each computes on one thread).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SHORT = "not long and not gpu"
TORCHLESS = ("tests/sched", "tests/store")
WITH_VALUE = frozenset(("-k", "-m", "-p", "-c", "-o", "-n", "-W", "-r", "--ignore", "--deselect", "--maxfail", "--durations"))
NO_TESTS, INTERRUPTED, WRONG_USE = 5, 2, 4
SLOWEST = 12


@dataclass(frozen=True)
class Stage:
    """One pytest run. ``alone``: the tests that need the machine for themselves, one after the other; else the others, in
    lanes. ``paths`` empty: all of this environment's tests."""

    name: str
    torchless: bool
    alone: bool
    paths: tuple[str, ...] = ()

    def command(self, options: Sequence[str], marks: str, lanes: int, report: Path) -> list[str]:
        python = ".venv-notorch/bin/python" if self.torchless else ".venv/bin/python"
        which = f"({SHORT}) and {'alone' if self.alone else 'not alone'}" + (f" and ({marks})" if marks else "")
        command = [python, "-m", "pytest", "-q", "-m", which, f"--junitxml={report}"]
        command += ["-n", str(lanes)]
        if not self.torchless:
            command += [f"--ignore={folder}" for folder in TORCHLESS]
        command += [*options, *(["-n0"] if self.alone else [])]
        return [*command, *(self.paths or (TORCHLESS if self.torchless else ()))]


@dataclass
class Total:
    """Sums over stages: tests by outcome, seconds by file, processor seconds of everything that was started and waited for."""

    outcomes: Counter[str] = field(default_factory=Counter)
    files: Counter[str] = field(default_factory=Counter)
    processor_s: float = 0.0
    statuses: list[int] = field(default_factory=list)

    def read(self, report: Path) -> None:
        """Adds a junit report; none is there when pytest found its arguments wrong."""
        if not report.is_file():
            return
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            bad = {name: int(suite.get(name, 0)) for name in ("failures", "errors", "skipped")}
            self.outcomes.update(bad)
            self.outcomes["passed"] += max(0, int(suite.get("tests", 0)) - sum(bad.values()))
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            self.files[file_of(case.get("classname") or "?")] += float(case.get("time", 0))

    def line(self, seconds: float) -> str:
        counts = [f"{self.outcomes['passed']:,} passed"]
        words = {"failures": "failed", "errors": "with errors", "skipped": "skipped"}
        counts += [f"{self.outcomes[name]} {word}" for name, word in words.items() if self.outcomes[name]]
        return f"{', '.join(counts)} after {seconds:.0f} s ({self.processor_s:.0f} s of processor time)"


def file_of(classname: str) -> str:
    """tests.sched.test_x -> tests/sched/test_x.py; a class behind the module is left out."""
    parts = classname.split(".")
    while len(parts) > 1 and not parts[-1].startswith("test_"):
        parts.pop()
    return "/".join(parts) + ".py"


def sorted_out(arguments: Sequence[str]) -> tuple[list[str], list[str], str]:
    """(paths, options, expression of the last -m). A word that is neither an option nor an option's value is a path."""
    paths, options, marks = list[str](), list[str](), ""
    words = iter(arguments)
    for word in words:
        if word == "-m":
            marks = next(words, "")
        elif word in WITH_VALUE:
            options += [word, *(value for value in [next(words, None)] if value is not None)]
        elif word.startswith("-"):
            options.append(word)
        else:
            paths.append(word)
    return paths, options, marks


def holds(folder: str, path: str) -> bool:
    """Whether ``path`` (perhaps with ::names) is ``folder`` or lies in it. Both relative to the repository, or absolute."""
    return Path(path.partition("::")[0]).resolve().is_relative_to(Path(folder).resolve())


def stages(paths: Sequence[str]) -> Iterator[Stage]:
    """In lanes first, then alone. With paths: only the environments that these belong to; a folder above both means both."""
    torchless = tuple(path for path in paths if any(holds(folder, path) for folder in TORCHLESS))
    others = tuple(path for path in paths if path not in torchless)
    above = any(holds(path, folder) for path in others for folder in TORCHLESS)
    for alone in (False, True):
        last = ", alone on the machine" if alone else ""
        if not paths or above or torchless:
            name = f"tests of sched and store, where torch cannot be imported{last}"
            yield Stage(name, True, alone, () if above else torchless)
        if not paths or others:
            yield Stage(f"all other tests{last}", False, alone, others)


def run(command: Sequence[str]) -> tuple[int, float]:
    """(exit status, processor seconds of the command and of all that it waited for). Ctrl-C is the command's to handle."""
    process = subprocess.Popen(command)
    while True:
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except KeyboardInterrupt:
            continue
        process.returncode = os.waitstatus_to_exitcode(status)
        return process.returncode, usage.ru_utime + usage.ru_stime


def verdict(statuses: Sequence[int], everything: bool) -> int:
    """The exit status of the whole run. ``everything``: no arguments were given, so no stage may be without tests."""
    bad = [status for status in statuses if status and (status != NO_TESTS or everything)]
    if bad:
        return bad[0]
    return NO_TESTS if statuses and all(status == NO_TESTS for status in statuses) else 0


def main(arguments: Sequence[str]) -> int:
    paths, options, marks = sorted_out(arguments)
    lanes = int(os.environ.get("LANES") or 2)
    total, began = Total(), time.monotonic()
    stop_at_once = any(option in ("-x", "--exitfirst") or option.startswith("--maxfail") for option in options)
    with tempfile.TemporaryDirectory() as folder:
        for number, stage in enumerate(stages(paths)):
            report = Path(folder) / f"{number}.xml"
            print(f"\n== {stage.name}", flush=True)
            start = time.monotonic()
            status, processor_s = run(stage.command(options, marks, lanes, report))
            word = {0: "done", NO_TESTS: "no tests"}.get(status, f"FAILED (exit {status})")
            seconds = time.monotonic() - start
            print(f"== {stage.name}: {word} after {seconds:.0f} s ({processor_s:.0f} s of processor time)", flush=True)
            total.read(report)
            total.processor_s += processor_s
            total.statuses.append(0 if status == NO_TESTS and stage.alone and not arguments else status)
            if status in (INTERRUPTED, WRONG_USE) or (status not in (0, NO_TESTS) and stop_at_once):
                break
    status = verdict(total.statuses, everything=not arguments)
    print("\nslowest files: " + ", ".join(f"{file} {seconds:.0f} s" for file, seconds in total.files.most_common(SLOWEST)))
    failed = f"FAILED (exit {status}), " if status else ""
    print(f"== make test: {failed}{total.line(time.monotonic() - began)}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
