"""Fixtures that every folder's tests may use. No torch here: tests/sched and tests/store run without it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kvalet.api.fetch_model import model_path as default_model_path


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
