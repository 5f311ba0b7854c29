"""Fixtures that every folder's tests may use. No torch here: tests/sched and tests/store run without it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported: lanes side by side share the cores, one thread each
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")

import pytest
from kvalet.api.fetch_model import model_path as default_model_path
from lanes import FileScheduling, longest_first


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling:
    """`pytest -n 2`: by files, the longest first."""
    return FileScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # in a lane
        items[:] = longest_first(items)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Async tests run on what the server runs on."""
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's file; fails (never skips) when it is not there."""
    path = Path(os.environ.get("KVALET_MODEL") or default_model_path())
    if not path.is_file():
        pytest.fail(f"the default model is not at {path}: run `make model`")
    return path


@pytest.fixture(scope="session")
def repository() -> Path:
    """The repository's root."""
    return Path(__file__).resolve().parent.parent
