"""Building an engine's parts: one sentence for whatever keeps it from starting, nothing left behind, sizes that agree."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvalet.api import build as build_module
from kvalet.api.build import STEPS, Parts, StartError, build
from kvalet.api.config import EngineConfig
from kvalet.runtime.config import EngineConfig as RuntimeConfig
from kvalet.runtime.engine import LoadedModel, load_model
from kvalet.runtime.plan import SlotId
from kvalet.runtime.slab import Slab
from serverproc import model_path

SMALL: dict[str, Any] = {"weights": "int4", "pool_tokens": 1024, "ram_bytes": 24 << 20}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(RuntimeConfig(model=Path(model_path()), n_pages=2, weights="int4"))


@pytest.fixture
def one_load(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real model, loaded once for this file."""
    monkeypatch.setattr(build_module, "load_model", lambda config: loaded)


@pytest.fixture
def slabs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Slab]]:
    """The slabs that are open."""
    still_open: list[Slab] = []
    init, close = Slab.__init__, Slab.close

    def opening(self: Slab, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        still_open.append(self)

    def closing(self: Slab) -> None:
        close(self)
        still_open.remove(self)

    monkeypatch.setattr(Slab, "__init__", opening)
    monkeypatch.setattr(Slab, "close", closing)
    yield still_open
    assert still_open == [], "a slab was left behind"


def config(**fields: Any) -> EngineConfig:
    return EngineConfig(**{"model": model_path(), **SMALL, **fields})


def release(parts: Parts) -> None:
    parts.copier.close()
    parts.close()


def test_a_missing_model_file(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="there is no model file at"):
        build(config(model=str(tmp_path / "none.gguf")))


@pytest.mark.parametrize("content", [b"", b"not a model", b"GGUF" + b"\x03\x00\x00\x00" + b"\xff" * 100])
def test_a_damaged_model_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(StartError) as caught:
        build(config(model=str(path)))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_short_model_file(tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    with open(model_path(), "rb") as whole:
        path.write_bytes(whole.read(30_000_000))
    with pytest.raises(StartError, match="damaged or cut short"):
        build(config(model=str(path)))


def test_the_default_model_that_was_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVALET_CACHE", str(tmp_path))
    with pytest.raises(StartError, match=r"python -m kvalet\.api\.fetch_model") as caught:
        build(EngineConfig())
    assert str(tmp_path) in str(caught.value)


@pytest.mark.usefixtures("one_load")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device": "abacus"}, "'abacus'"),
        ({"weights": "int3"}, "weights must be one of"),
        ({"pool_tokens": 16}, "at least 2 pages"),
        ({"pool_tokens": 10**9}, "are available"),
        ({"deterministic": True, "lag": 3}, "lag must be 0 or 1"),
        ({"store_dir": "/proc/1/none/store", "store_bytes": 1 << 30}, "store"),
    ],
)
def test_settings_that_cannot_work(fields: dict[str, Any], message: str, slabs: list[Slab]) -> None:
    with pytest.raises(StartError, match=message) as caught:
        build(config(**fields))
    assert "\n" not in str(caught.value)
    assert slabs == []


@pytest.mark.usefixtures("one_load")
def test_what_is_built_agrees(slabs: list[Slab], loaded: LoadedModel) -> None:
    told: list[tuple[int, int, str]] = []
    parts = build(config(served_name="mine"), lambda step, of, what: told.append((step, of, what)))
    try:
        assert [(step, of) for step, of, _ in told] == [(step, STEPS) for step in range(1, STEPS + 1)]
        sched = parts.core.config
        assert (sched.n_pages, sched.ram_slots, sched.staging_slots) == (65, parts.plan.ram_slots, parts.plan.staging_slots)
        assert parts.plan.ram_slots == 4
        assert len(slabs) == 1
        assert slabs[0].n_slots == sched.ram_slots + sched.staging_slots
        assert sched.page_bytes * (sched.chunk_tokens // sched.page_tokens) + 4096 == len(parts.slot_view(SlotId(0)))
        assert sched.context_tokens == parts.context_tokens == loaded.context_tokens
        assert sched.lag == 0
        assert sched.forced_runs
        assert parts.model_id == "mine"
        assert parts.store is None
        text = "\n".join(parts.banner)
        assert "pool 1,024 tokens" in text
        assert "disk tier off (give --store DIR)" in text
        assert "note: the pool (1024 tokens) is smaller than the context" in text
    finally:
        release(parts)


@pytest.mark.usefixtures("one_load")
def test_deterministic_mode_reaches_everyone(slabs: list[Slab]) -> None:
    parts = build(config(deterministic=True, decode_rows=8, max_rows=8, ram_bytes=0))
    assert parts.core.config.deterministic
    assert parts.core.config.decode_rows == 8
    assert not parts.core.config.forced_runs
    assert slabs == [], "no tier below the pool: no slab"
    with pytest.raises(IndexError):
        parts.slot_view(SlotId(0))
    assert any("no tier below the pool" in line for line in parts.banner)
    release(parts)


@pytest.mark.usefixtures("one_load")
def test_a_store_in_use_stops_the_start_unless_it_is_optional(tmp_path: Path, slabs: list[Slab]) -> None:
    fields: dict[str, Any] = {"store_dir": str(tmp_path / "kv"), "store_bytes": 1 << 28, "store_min_free_bytes": 0}
    first = build(config(**fields))
    assert first.store is not None
    assert any("0 files found" in line for line in first.banner)
    with pytest.raises(StartError) as caught:
        build(config(**fields))
    assert str(tmp_path) in str(caught.value)
    assert len(slabs) == 1, "the refused start gave its slab back"
    without = build(config(**fields, store_optional=True))
    assert without.store is None
    assert any(line.startswith("note: disk tier off: ") for line in without.banner)
    release(without)
    release(first)
    again = build(config(**fields))
    assert again.store is not None
    release(again)


@pytest.mark.usefixtures("one_load")
def test_a_store_without_room_stops_the_start_unless_it_is_optional(tmp_path: Path, slabs: list[Slab]) -> None:
    fields: dict[str, Any] = {"store_dir": str(tmp_path / "kv"), "store_bytes": 100}
    with pytest.raises(StartError, match=r"kv'.*less than one chunk") as caught:
        build(config(**fields))
    assert "\n" not in str(caught.value)
    without = build(config(**fields, store_optional=True))
    assert without.store is None
    assert any("less than one chunk" in line for line in without.banner)
    release(without)


@pytest.mark.usefixtures("one_load")
def test_what_was_asked_of_the_store_and_the_context_is_done_or_told(tmp_path: Path, slabs: list[Slab]) -> None:
    store: dict[str, Any] = {"store_dir": str(tmp_path / "kv"), "store_bytes": 1 << 28, "store_min_free_bytes": 0}
    parts = build(config(**store, store_bytes_per_day=5 << 30, context_tokens=99_999))
    assert parts.store is not None
    assert parts.store.statistics().bytes_per_day == 5 << 30
    assert any(f"{parts.context_tokens:,} tokens, the model's own limit" in line for line in parts.banner)
    release(parts)


@pytest.mark.usefixtures("one_load")
def test_a_model_without_a_usable_template_still_completes(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    for template, note in ((None, "no chat template"), ("{% for %}", "cannot be compiled")):
        changed = replace(loaded, spec=replace(loaded.spec, chat_template=template))
        monkeypatch.setattr(build_module, "load_model", lambda config, changed=changed: changed)
        parts = build(config(ram_bytes=0))
        assert any("chat is off" in line and note in line for line in parts.banner)
        release(parts)


@pytest.mark.usefixtures("one_load")
def test_no_thread_outlives_its_parts(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    release(build(config(store_dir=str(tmp_path / "kv"), store_bytes=1 << 28, store_min_free_bytes=0)))
    gc.collect()
    assert set(threading.enumerate()) <= before
