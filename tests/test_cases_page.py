"""docs/testing.md and the tests name each other: every named test exists, and says the number of its case."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROW = re.compile(r"^\| (P\d\d) \|.*\| (`.+`) \|$")
NAME = re.compile(r"`([\w/]+\.py)::(\w+)`")


def rows(repository: Path) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    for line in (repository / "docs" / "testing.md").read_text().splitlines():
        if found := ROW.match(line):
            yield found.group(1), NAME.findall(found.group(2))


def functions_of(path: Path) -> dict[str, str]:
    """Test function -> its docstring, with that of its file before it."""
    tree = ast.parse(path.read_text())
    about = ast.get_docstring(tree) or ""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name: f"{about} {ast.get_docstring(node) or ''}" for node in functions if node.name.startswith("test_")}


def test_every_case_names_tests_that_exist_and_name_it(repository: Path) -> None:
    seen = []
    for case, names in rows(repository):
        seen.append(case)
        assert names, f"{case} names no test"
        for file, name in names:
            path = repository / "tests" / file
            assert path.is_file(), f"{case}: there is no tests/{file}"
            tests = functions_of(path)
            assert name in tests, f"{case}: tests/{file} has no {name}"
        assert any(case in functions_of(repository / "tests" / file)[name] for file, name in names), (
            f"no test of {case} says so"
        )
    assert seen == sorted(set(seen)), "one row per case, in order"
    assert len(seen) >= 25


def test_every_case_that_a_test_names_has_a_row(repository: Path) -> None:
    known = {case for case, _ in rows(repository)}
    for path in sorted((repository / "tests" / "whole").glob("*.py")):
        for name, text in functions_of(path).items():
            assert set(re.findall(r"\bP\d\d\b", text)) <= known, (path.name, name)
