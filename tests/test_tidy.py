"""The house rules (docs/style.md), as tests. A rule is either checked here or it is not a rule."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("api", "loadtest", "sched", "runtime", "store")
MAY_IMPORT = {
    "api": {"api", "sched", "runtime", "store", "loadtest"},
    "loadtest": {"loadtest"},
    "sched": {"sched", "runtime", "store"},
    "runtime": {"runtime"},
    "store": {"store"},
}
LOADTEST_USERS = {"api/demo.py", "__main__.py"}
"""The demo drives the load client; nothing else in api does (``startswith`` of the demo's other files is allowed too)."""

TORCH_FREE = ("store/", "loadtest/", "sched/", "runtime/plan.py", "runtime/geometry.py", "runtime/fake")
IMPORTED_IN_ONE_PLACE = {"flashinfer": "runtime/attn_flashinfer.py", "jinja2": "api/template"}
BANNED = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
PURE_BANNED = {"asyncio", "anyio", "time", "torch", "os", "pathlib", "threading", "uvloop"}
BROAD_EXCEPT = {
    "api/gate.py": "one request's defect must not end the server",
    "api/listener.py": "one connection's defect must not end the server",
    "api/metrics.py": "a figure's defect must not take the whole page",
    "api/template.py": "a chat template is a stranger's program",
    "runtime/hf_tokenizer.py": "the tokenizers package raises a bare Exception for what it cannot parse",
    "runtime/transfer.py": "the copy thread's border: the copy must end",
    "sched/engine_thread.py": "the engine thread's border: the turns must end",
    "sched/in_flight.py": "a port that raises becomes a failed transfer",
    "sched/record_jobs.py": "a store that raises becomes a failed record",
    "sched/tick.py": "the scheduler's border: the turns must end",
    "store/chores.py": "a chore fails, the janitor lives",
    "store/workers.py": "a job fails, the worker lives",
}
"""Where the border of a thread or task needs it, and why. Elsewhere a broad except may only clean up and ``raise``."""

SOURCE_LINES, TEST_LINES, FUNCTION_LINES = 300, 400, 70
ROOT_FOLDERS = {*ROOMS, "tests", "docs", ".ci"}
NAMED_ROOMS = re.compile(r"^(utils?|common|helpers?|misc)\.py$")
MACHINE_WORDS = (r"/w[o]rk/", r"/tmp/b[r]ief", r"(?<![./\w])sh[a]red/[a-z]", r"pythonh[o]sted", r"/opt/p[y]pi")
MACHINE = re.compile("|".join(MACHINE_WORDS))
UNFINISHED = re.compile(r"\b(T[O]DO|F[I]XME|X[X]X)\b")


@dataclass(frozen=True)
class Source:
    """One Python file: its path relative to the root, its text, its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.path.partition("/")[0] if "/" in self.path else ""


def read(paths: Iterator[Path]) -> list[Source]:
    return [Source(str(p.relative_to(ROOT)), p.read_text(), ast.parse(p.read_text(), str(p))) for p in sorted(paths)]


SOURCES = read(p for folder in ("", *ROOMS, ".ci") for p in (ROOT / folder).glob("*.py"))
TESTS = read(p for p in (ROOT / "tests").rglob("*.py") if "__pycache__" not in p.parts)


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of everything imported anywhere in the tree, ``from a import b`` as a and as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or ""), node.lineno
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def calls(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(dotted name as written, line) of every call whose function is a name or an attribute chain."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node.lineno


def direction_faults(source: Source) -> list[str]:
    if source.room not in MAY_IMPORT:
        return []
    faults = []
    for name, line in imports(source.tree):
        if name.startswith("."):
            faults.append(f"{source.path}:{line} imports relatively")
        if name.split(".")[0] in ROOMS:
            faults.append(f"{source.path}:{line} imports {name}: write kvalet.{name}")
        parts = name.split(".")
        if parts[0] == "kvalet" and len(parts) > 1 and parts[1] in ROOMS:
            demo = source.path.startswith("api/demo") or source.path in LOADTEST_USERS
            allowed = MAY_IMPORT[source.room] - (set() if demo or source.room == "loadtest" else {"loadtest"})
            if parts[1] not in allowed:
                faults.append(f"{source.path}:{line} imports {name}")
    return faults


def banned_import_faults(source: Source) -> list[str]:
    faults = []
    for name, line in imports(source.tree):
        top = name.split(".")[0]
        where = f"{source.path}:{line} imports {name}"
        if top in BANNED:
            faults.append(where)
        if top in IMPORTED_IN_ONE_PLACE and not source.path.startswith(IMPORTED_IN_ONE_PLACE[top]):
            faults.append(f"{where}: only {IMPORTED_IN_ONE_PLACE[top]} may")
        if top == "torch" and source.path.startswith(TORCH_FREE):
            faults.append(where)
    return faults


def task_and_sleep_faults(source: Source) -> list[str]:
    """Fire-and-forget tasks and waiting by sleeping. A task kept in a name is fine; a bare statement is not."""
    faults = [f"{source.path}:{line} {name}" for name, line in calls(source.tree) if name in ("time.sleep", "sleep")]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            name = ast.unparse(node.value.func)
            if name.endswith(("create_task", "ensure_future")):
                faults.append(f"{source.path}:{node.lineno} bare {name}")
    return faults


def broad_except_faults(source: Source) -> list[str]:
    faults = []
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        names = (
            {"BaseException"} if node.type is None else {ast.unparse(n) for n in ast.walk(node.type) if isinstance(n, ast.Name)}
        )
        passed_on = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
        if names & {"Exception", "BaseException"} and source.path not in BROAD_EXCEPT and not passed_on:
            faults.append(f"{source.path}:{node.lineno} catches {sorted(names)}")
    return faults


def long_function_faults(source: Source) -> list[str]:
    return [
        f"{source.path}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES
    ]


def text_faults(source: Source) -> list[str]:
    lines = enumerate(source.text.splitlines(), 1)
    return [f"{source.path}:{n} {line.strip()[:80]}" for n, line in lines if MACHINE.search(line) or UNFINISHED.search(line)]


def undocumented_faults(source: Source) -> list[str]:
    return [] if ast.get_docstring(source.tree) else [f"{source.path} has no docstring"]


SOURCE_CHECKS = (
    direction_faults,
    banned_import_faults,
    task_and_sleep_faults,
    broad_except_faults,
    long_function_faults,
    text_faults,
    undocumented_faults,
)


@pytest.mark.parametrize("check", SOURCE_CHECKS, ids=lambda check: check.__name__)
def test_source_keeps_the_rule(check) -> None:
    assert [fault for source in SOURCES for fault in check(source)] == []


@pytest.mark.parametrize("check", [text_faults, undocumented_faults], ids=lambda check: check.__name__)
def test_tests_keep_the_rule(check) -> None:
    assert [fault for source in TESTS for fault in check(source)] == []


MUTANTS = {
    "store meets runtime": ("store/x.py", "from kvalet.runtime.plan import Row", direction_faults),
    "loadtest knows the server": ("loadtest/x.py", "import kvalet.api.requests", direction_faults),
    "api drives the load client": ("api/chat.py", "from kvalet.loadtest import client", direction_faults),
    "bare folder import": ("sched/x.py", "import sched.core", direction_faults),
    "relative import": ("sched/x.py", "from .core import Core", direction_faults),
    "torch in the store": ("store/x.py", "def f():\n    import torch", banned_import_faults),
    "pickle": ("api/x.py", "from pickle import loads", banned_import_faults),
    "a second jinja2": ("api/chat.py", "import jinja2", banned_import_faults),
    "fire and forget": ("sched/x.py", "async def f(g):\n    g.create_task(f(g))", task_and_sleep_faults),
    "sleep": ("store/x.py", "import time\ntime.sleep(1)", task_and_sleep_faults),
    "swallow": ("store/x.py", "try:\n    pass\nexcept Exception:\n    pass", broad_except_faults),
    "bare except": ("runtime/x.py", "try:\n    pass\nexcept:\n    pass", broad_except_faults),
    "long function": ("api/x.py", "def f():\n" + "    pass\n" * 70, long_function_faults),
    "machine path": ("api/x.py", "P = '/" + "work/main'", text_faults),
    "unfinished": ("api/x.py", "# TO" + "DO later", text_faults),
    "no docstring": ("api/x.py", "x = 1", undocumented_faults),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_each_rule_can_fail(name: str) -> None:
    path, text, check = MUTANTS[name]
    assert check(Source(path, text, ast.parse(text)))


def test_files_are_short() -> None:
    def long(sources: list[Source], limit: int) -> list[str]:
        return [f"{s.path}: {len(s.text.splitlines())}" for s in sources if len(s.text.splitlines()) > limit]

    assert long(SOURCES, SOURCE_LINES) == []
    assert long(TESTS, TEST_LINES) == []


def test_no_room_for_everything() -> None:
    assert [s.path for s in SOURCES + TESTS if NAMED_ROOMS.match(Path(s.path).name)] == []


def test_folder_inits_are_docstrings() -> None:
    for source in SOURCES:
        if source.path.endswith("/__init__.py"):
            assert len(source.tree.body) == 1, source.path
            assert ast.get_docstring(source.tree), source.path


def test_at_least_as_many_lines_of_tests_as_of_source() -> None:
    source = sum(len(s.text.splitlines()) for s in SOURCES)
    tests = sum(len(s.text.splitlines()) for s in TESTS)
    assert tests >= source, f"{tests} lines of tests, {source} of source"


def test_root_folders_are_fixed() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {path.partition("/")[0] for path in listed if "/" in path} <= ROOT_FOLDERS


def reachable(module: str) -> set[str]:
    """Paths of the kvalet files that importing ``module`` (dotted, without kvalet) brings in."""
    by_name = {s.path.removesuffix(".py").replace("/", "."): s for s in SOURCES}
    found: set[str] = set()
    open_ = [module]
    while open_:
        name = open_.pop()
        if name in by_name and by_name[name].path not in found:
            found.add(by_name[name].path)
            open_ += [n.removeprefix("kvalet.") for n, _ in imports(by_name[name].tree) if n.startswith("kvalet.")]
    return found


def is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def test_the_core_is_pure() -> None:
    """No await, no clock, no file, no thread, no torch in sched/core.py and all it uses."""
    paths = reachable("sched.core")
    assert "sched/core.py" in paths
    faults = []
    for source in (s for s in SOURCES if s.path in paths):
        faults += [f"{source.path}:{line} {n}" for n, line in imports(source.tree) if n.split(".")[0] in PURE_BANNED]
        program = [node for node in source.tree.body if not is_main_guard(node)]
        faults += [
            f"{source.path}:{line} {name}"
            for node in program
            for name, line in calls(node)
            if name in ("open", "print", "input")
        ]
        awaits = ast.Await | ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith
        faults += [f"{source.path}:{node.lineno} await" for node in ast.walk(source.tree) if isinstance(node, awaits)]
    assert faults == []


@pytest.mark.parametrize("module", ["kvalet.sched.core", "kvalet.store.store", "kvalet.runtime.fake"])
def test_imports_where_torch_cannot_be(module: str) -> None:
    program = f"import sys; sys.modules['torch'] = None; import {module}; assert sys.modules['torch'] is None"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


FILE_NAME = re.compile(r"`((?:api|loadtest|sched|runtime|store|tests|docs)/[\w./-]+\.(?:py|md))`")


def test_architecture_names_files_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = FILE_NAME.findall(text)
    assert [name for name in named if not (ROOT / name).is_file()] == []
    steps = re.findall(r"^\d+\. .+$", text, re.MULTILINE)
    assert len(steps) >= 20, "the numbered paths of a token and of a page"
    assert [step for step in steps if not FILE_NAME.search(step)] == []


def test_documents_name_no_machine() -> None:
    pages = [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        ROOT / "Makefile",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / ".ci").iterdir(),
    ]
    faults = []
    for page in (p for p in pages if p.is_file()):
        for number, line in enumerate(page.read_text().splitlines(), 1):
            if MACHINE.search(line) or UNFINISHED.search(line):
                faults.append(f"{page.relative_to(ROOT)}:{number} {line[:80]}")
    assert faults == []
