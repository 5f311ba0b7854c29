"""The wheel and the editable install, each as a stranger gets them: right files, right metadata, and a server that answers."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from kvalet.api.demo_server import ServerProcess, serve_command
from kvalet.loadtest.client import Call, complete

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("api", "loadtest", "runtime", "sched", "store")


def run(*command: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Output of a command that must succeed."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1", **(env or {})}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=240
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree as it is, without what was built in it (a build writes into its source folder)."""
    copy = tmp_path_factory.mktemp("source") / "kvalet"
    copy.mkdir()
    for folder in (*FOLDERS, "tests", "docs"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "py.typed", "__init__.py", "__main__.py"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def built(source: Path) -> Path:
    """Folder with the wheel and the source archive, the wheel built from that archive."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(source / "dist"), ".", cwd=source)
    return source / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


def bare_environment(folder: Path) -> Path:
    """A fresh environment's interpreter. It sees the heavy packages of this one (pip and setuptools too) through a path file
    of its own, and not this one's kvalet: path files inside those folders (editable installs) are not followed."""
    run(sys.executable, "-m", "venv", "--without-pip", str(folder), cwd=folder.parent)
    python = folder / "bin" / "python"
    target = run(str(python), "-c", "import site; print(site.getsitepackages()[0])", cwd=folder.parent).strip()
    Path(target, "outer.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert {name.partition("/")[0] for name in names} == {"kvalet"}
    have = {name.removeprefix("kvalet/") for name in names}
    want = {str(p.relative_to(ROOT)) for folder in FOLDERS for p in (ROOT / folder).glob("*.py")}
    assert have == want | {"__init__.py", "__main__.py", "py.typed"}


def test_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    head = HeaderParser().parsestr(archive.read(name).decode())
    from kvalet import __version__

    assert (head["Name"], head["Version"], head["License-Expression"]) == ("kvalet", __version__, "Apache-2.0")
    assert head["Requires-Python"] == ">=3.11"
    assert set(head.get_all("Provides-Extra") or ()) == {"cuda", "dev", "hub"}
    needs = [need for need in head.get_all("Requires-Dist") or () if "extra ==" not in need]
    assert "torch>=2.11" in needs
    assert head.get_payload().lstrip().startswith("# kvalet")
    assert any(n.endswith("licenses/LICENSE") for n in archive.namelist())


def test_what_is_imported_is_declared(wheel: Path) -> None:
    """Every third-party package that the source imports is a dependency by name, or optional and named here."""
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    lines = HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or ()
    declared = {re.split(r"[^\w.-]", line)[0].lower().replace("-", "_") for line in lines}
    imported: set[str] = set()
    for member in (n for n in archive.namelist() if n.endswith(".py")):
        for node in ast.walk(ast.parse(archive.read(member))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0].lower() for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0].lower())
    outside = imported - {n.lower() for n in sys.stdlib_module_names} - {"kvalet", "triton"}
    renamed = {"flashinfer": "flashinfer_python", "pydantic_core": "pydantic"}
    assert {n for n in outside if renamed.get(n, n) not in declared} == set()


def test_the_source_archive_builds_the_wheel(built: Path) -> None:
    """``build`` made the wheel from the archive, so that holds all it needs; no environment, cache or model is in it."""
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = archive.getnames()
    assert not [n for n in names if "/.venv" in n or "__pycache__" in n or n.endswith(".gguf")]


async def answers(python: Path, model: Path, tmp_path: Path) -> None:
    """A server of that environment, started outside the repository, answers a chat."""
    server = ServerProcess(serve_command([str(model), "--pool-tokens", "2048", "--ram-bytes", "0"], str(python)))
    async with server:
        body = {
            "model": "any",
            "messages": [{"role": "user", "content": "Say hello."}],
            "max_tokens": 8,
            "temperature": 0,
            "stream": True,
        }
        models = await complete(server.endpoint, Call("/v1/chat/completions", body))
        assert models.status == 404
        outcome = await complete(server.endpoint, Call("/v1/chat/completions", {**body, "model": await model_id(server)}))
        assert outcome.ok, (outcome.error, server.log)
        assert outcome.text
        assert await server.terminate() == 0


async def model_id(server: ServerProcess) -> str:
    from kvalet.loadtest.client import fetch

    _, raw = await fetch(server.endpoint, "/v1/models")
    return str(json.loads(raw)["data"][0]["id"])


@pytest.mark.anyio
async def test_an_installed_wheel_serves(wheel: Path, model_path: Path, tmp_path: Path) -> None:
    python = bare_environment(tmp_path / "venv")
    run(str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel), cwd=tmp_path)
    where = run(str(python), "-c", "import kvalet; print(kvalet.__file__)", cwd=tmp_path)
    assert str(tmp_path / "venv") in where
    assert run(str(tmp_path / "venv" / "bin" / "kvalet"), "--version", cwd=tmp_path).startswith("kvalet ")
    await answers(python, model_path, tmp_path)


@pytest.mark.anyio
async def test_an_editable_install_serves(source: Path, model_path: Path, tmp_path: Path) -> None:
    python = bare_environment(tmp_path / "venv")
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    run(str(python), "-m", "pip", "install", *options, "-e", str(source), cwd=tmp_path)
    where = run(str(python), "-c", "import kvalet.sched, sched; print(kvalet.sched.__file__, sched.__file__)", cwd=tmp_path)
    assert str(source / "sched") in where.split()[0]
    assert str(source) not in where.split()[1], "the standard library's sched is hidden by ours"
    await answers(python, model_path, tmp_path)
