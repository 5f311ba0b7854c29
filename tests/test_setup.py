"""What the set-up promises a stranger: no CUDA unasked, the size said first, stamps written last, failures in one sentence."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


torch_plan = load("torch_plan")


def entry(name: str, version: str = "1", url: str = "file:///nowhere") -> dict[str, Any]:
    return {"metadata": {"name": name, "version": version}, "download_info": {"url": url}}


@pytest.mark.parametrize("name", ["nvidia-cublas", "nvidia-cudnn-cu13", "cuda-pathfinder", "triton"])
def test_a_plan_with_cuda_is_seen(name: str) -> None:
    assert torch_plan.wants_cuda([entry("torch"), entry(name)])
    assert not torch_plan.wants_cuda([entry("torch"), entry("sympy")])


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [({}, False), ({"TORCH": ""}, False), ({"ALLOW_CUDA": "1"}, True), ({"TORCH": "torch==2.12.*"}, True)],
)
def test_cuda_has_to_be_asked_for(environment: dict[str, str], wanted: bool, tmp_path: Path) -> None:
    assert torch_plan.cuda_is_wanted(environment, tmp_path / "no-device") is wanted


def test_a_device_is_asking(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    assert torch_plan.cuda_is_wanted({}, tmp_path / "nvidiactl")


def test_the_size_is_that_of_the_files(tmp_path: Path) -> None:
    wheels = {name: tmp_path / f"{name}.whl" for name in ("torch", "nvidia-x")}
    wheels["torch"].write_bytes(b"x" * 3_000_000)
    wheels["nvidia-x"].write_bytes(b"x" * 2_000_000)
    entries = [entry(name, "2.13.0", path.as_uri()) for name, path in wheels.items()]
    assert torch_plan.describe(entries[:1]) == "torch 2.13.0 (CPU build): 3 MB to download"
    assert torch_plan.describe(entries) == "torch 2.13.0 (CUDA build): 5 MB to download"


def test_an_unknown_size_is_said_roughly() -> None:
    closed = entry("torch", "2.13.0", "http://127.0.0.1:9/torch.whl")
    assert "some 200 MB" in torch_plan.describe([closed])
    assert "some 3,000 MB" in torch_plan.describe([closed, entry("triton", url="http://127.0.0.1:9/t.whl")])


@pytest.mark.parametrize(("environment", "status"), [({}, 1), ({"ALLOW_CUDA": "1"}, 0)])
def test_the_download_is_refused_before_it_begins(
    environment: dict[str, str], status: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "w.whl").write_bytes(b"x" * 1_000_000)
    url = (tmp_path / "w.whl").as_uri()
    monkeypatch.setattr(torch_plan, "plan", lambda arguments: [entry("torch", "2.13.0", url), entry("nvidia-nccl", url=url)])
    monkeypatch.setattr(torch_plan, "cuda_is_wanted", lambda env: environment.get("ALLOW_CUDA") == "1")
    assert torch_plan.main(["torch"]) == status
    out, err = capfd.readouterr()
    assert "CUDA build): 2 MB" in out
    assert ("https://pytorch.org/get-started/locally/" in err) is bool(status)


def test_nothing_to_download_is_said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch_plan, "plan", lambda arguments: [])
    assert torch_plan.main(["torch"]) == 0
    assert "already there" in capfd.readouterr().out


def test_pip_itself_makes_the_plan() -> None:
    """The real plan for what is installed here: nothing to do."""
    assert torch_plan.plan(["pytest"]) == []


def test_a_requirement_that_cannot_be_met_ends_the_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SystemExit, match="finds no way"):
        torch_plan.plan(["--ignore-installed", "kvalet-no-such-package"])


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, stdin=subprocess.DEVNULL, cwd=ROOT)


def test_a_stage_keeps_the_exit_status() -> None:
    done = run(".ci/stage", "a name", "sh", "-c", "echo inside; exit 7")
    assert done.returncode == 7
    assert "== a name\ninside\n== a name: FAILED (exit 7) after" in done.stdout
    assert run(".ci/stage", "x", "true").returncode == 0


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A copy of the set-up script where nothing has been set up."""
    (tmp_path / ".ci").mkdir()
    for name in (".ci/setup", ".ci/notorch.txt", ".ci/bench.txt", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / ".ci/setup").chmod(0o755)
    return tmp_path


def fake_python(folder: Path, script: str) -> str:
    path = folder / "fake-python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_without_ensurepip_the_apt_line_is_printed(bare: Path) -> None:
    script = f'case "$*" in *ensurepip*) exit 1 ;; esac\nexec {sys.executable} "$@"'
    done = run(str(bare / ".ci/setup"), "notorch", PYTHON=fake_python(bare, script))
    assert done.returncode == 1
    assert "apt-get install python3." in done.stderr
    assert "-venv" in done.stderr


def test_an_old_python_is_refused(bare: Path) -> None:
    path = bare / "bin"
    path.mkdir()
    for tool in ("sh", "dirname", "cat"):
        (path / tool).symlink_to(Path("/bin") / tool if (Path("/bin") / tool).exists() else Path("/usr/bin") / tool)
    done = run(str(bare / ".ci/setup"), "notorch", PYTHON=fake_python(bare, "exit 1"), PATH=str(path))
    assert done.returncode == 1
    assert "Python 3.11 or newer is needed" in done.stderr


def test_an_interrupted_set_up_leaves_no_stamp_and_is_taken_up_again(bare: Path) -> None:
    """pip fails: no stamp. The next call works on it again instead of believing it done."""
    (bare / ".ci/bench.txt").write_text("kvalet-no-such-package\n")
    for _ in range(2):
        done = run(str(bare / ".ci/setup"), "bench", PIP_NO_INDEX="1", PYTHON=sys.executable)
        assert done.returncode == 1
        assert "could not install" in done.stderr
        assert not (bare / ".venv-bench" / ".kvalet-stamp").exists()


def test_a_current_environment_is_left_alone_and_a_changed_list_is_seen(bare: Path) -> None:
    (bare / ".ci/bench.txt").write_text("# nothing\n")
    first = run(str(bare / ".ci/setup"), "bench", PYTHON=sys.executable)
    assert first.returncode == 0, first.stderr
    assert "1/2" in first.stdout
    again = run(str(bare / ".ci/setup"), "bench", PYTHON=sys.executable)
    assert "1/2" not in again.stdout
    (bare / ".ci/bench.txt").write_text("# still nothing\n")
    assert "1/2" in run(str(bare / ".ci/setup"), "bench", PYTHON=sys.executable).stdout
