"""An engine as it is built for a GPU, on plain torch instead of one: real scheduler, copies, slab, one step behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from devicekit import CPU, SMALL
from kvalet.api.build import StartError, build
from kvalet.api.build_config import resolved
from kvalet.api.build_cuda import memlock_notes, numerics, unsupported
from kvalet.api.config import EngineConfig
from kvalet.api.device_choice import PIP_LINE, choose_device, missing_packages
from kvalet.api.device_plan import DeviceMemory
from kvalet.api.doctor import Verdict, device_finding
from kvalet.api.engine import Engine
from kvalet.api.memory_plan import MemoryPlan
from kvalet.api.requests import CompletionRequest
from kvalet.runtime.cuda_engine import CudaEngine
from kvalet.runtime.plain_ops import PlainOps
from kvalet.runtime.plan import SamplingParams
from tinymodel import TOKENS, Tiny, write

GIB = 1 << 30


@dataclass
class PlainKit:
    """``DeviceKit`` of plain torch; ``memory``: what the card would have."""

    total: int = 8 * GIB
    free: int = 8 * GIB
    registered: int = 0

    def ops(self) -> PlainOps:
        return PlainOps(CPU)

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self.total, self.free)

    def host_memory(self) -> PlainKit:
        return self

    def register(self, address: int, length: int) -> int:
        self.registered += length
        return 0

    def unregister(self, address: int) -> int:
        return 0

    def arithmetic(self) -> str:
        return "plain"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64, as the kernels want them."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write(
        path,
        Tiny(n_layers=2, hidden=128, n_q_heads=4, n_kv_heads=2, head_dim=64, context=2048, qk_norm=True, architecture="qwen3"),
    )
    return path


def config(model: Path, **fields: Any) -> EngineConfig:
    return EngineConfig(
        **{"model": str(model), "device": "cuda", "pool_tokens": 1024, "ram_bytes": 32 << 20, "max_rows": 6, **fields}
    )


@asynccontextmanager
async def served(asked: EngineConfig, kit: PlainKit | None = None) -> AsyncIterator[Engine]:
    async with Engine(asked, builder=partial(build, kit=kit if kit is not None else PlainKit())) as engine:
        yield engine


async def ask(engine: Engine, prompt: list[int], n: int, session: str = "", **params: Any) -> tuple[list[int], Any]:
    request = CompletionRequest(
        prompt, SamplingParams(**{"temperature": 0.0, "max_tokens": n, "ignore_eos": True, **params}), session=session
    )
    turn = await engine.start_completion(request)
    end = await turn.result()
    return list(end.ids), end.report


def prompt(seed: int, n: int = 300) -> list[int]:
    return random.Random(seed).choices(range(3, len(TOKENS)), k=n)


@pytest.mark.anyio
async def test_sessions_leave_the_pool_and_come_back_the_same(model: Path) -> None:
    """Six sessions in a pool of three, twice: what came from RAM gives the tokens of an engine that never spilled."""
    async with served(config(model, pool_tokens=8192, ram_bytes=0)) as roomy:
        assert isinstance(roomy._open_parts().step_engine, CudaEngine)
        expected = {}
        for seed in range(6):
            first, _ = await ask(roomy, prompt(seed), 12, f"s{seed}")
            again, report = await ask(roomy, [*prompt(seed), *first, 5, 6], 12, f"s{seed}")
            assert report.resident_tokens > 250
            expected[seed] = (first, again)
    kit = PlainKit()
    async with served(config(model), kit) as engine:
        firsts = await asyncio.gather(*(ask(engine, prompt(seed), 12, f"s{seed}") for seed in range(6)))
        assert [ids for ids, _ in firsts] == [expected[seed][0] for seed in range(6)]
        agains = await asyncio.gather(*(ask(engine, [*prompt(s), *firsts[s][0], 5, 6], 12, f"s{s}") for s in range(6)))
        assert [ids for ids, _ in agains] == [expected[seed][1] for seed in range(6)]
        assert sum(report.ram_tokens for _, report in agains) >= 256
        plan = engine.statistics().memory
        assert kit.registered == plan.ram_bytes + plan.staging_bytes
        assert any("cuda-bf16" in line for line in engine.banner())
        assert not any("arena" in line for line in engine.banner())


@pytest.mark.anyio
async def test_every_kind_of_sampling_is_served_and_follows_its_seed(model: Path) -> None:
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "seed": 4, "top_p": 0.8},
        {"temperature": 0.7, "top_k": 5, "seed": 5},
        {"temperature": 1.0, "seed": 6, "logprobs": 2}, {"temperature": 1.0, "seed": 7, "repetition_penalty": 1.2},
    ]  # fmt: skip
    async with served(config(model, pool_tokens=4096, ram_bytes=0)) as engine:
        alone = [(await ask(engine, prompt(20 + n, 40), 10, **kind))[0] for n, kind in enumerate(kinds)]
        together = await asyncio.gather(*(ask(engine, prompt(20 + n, 40), 10, **kind) for n, kind in enumerate(kinds)))
        assert [len(ids) for ids in alone] == [10] * len(kinds)
        assert sum(ids == other for ids, (other, _) in zip(alone, together, strict=True)) >= len(kinds) - 1


@pytest.mark.anyio
async def test_deterministic_on_the_device(model: Path, tmp_path: Path) -> None:
    """Alone, together, from RAM and from disk after a restart: the same ids; the store's identity names the mode."""
    asked = config(
        model, deterministic=True, decode_rows=4, store_dir=str(tmp_path / "kv"), store_bytes=1 << 28, store_min_free_bytes=0
    )
    async with served(asked) as engine:
        alone = [(await ask(engine, prompt(seed), 20, f"s{seed}"))[0] for seed in range(5)]
        together = await asyncio.gather(*(ask(engine, prompt(seed), 20, f"t{seed}") for seed in range(5)))
        assert [ids for ids, _ in together] == alone
        assert any("deterministic-rows4" in line and "plain" in line for line in engine.banner())
        await engine.drain(60)
    async with served(asked) as engine:
        back = [await ask(engine, prompt(seed), 20, f"s{seed}") for seed in range(5)]
        assert [ids for ids, _ in back] == alone
        assert sum(report.disk_tokens for _, report in back) >= 256


@pytest.mark.parametrize(
    ("fields", "kit", "message"),
    [
        ({"weights": "int4"}, PlainKit(), "--weights int4 is for the CPU"),
        ({"pool_tokens": 10**9}, PlainKit(), "A pool of 1,000,000,000 tokens takes"),
        ({"pool_tokens": 0}, PlainKit(total=GIB, free=GIB), "The model does not fit: the device has 1.00 GiB"),
        ({"deterministic": True, "decode_rows": 300}, PlainKit(), "more than the 256 rows"),
    ],
)
def test_what_a_gpu_cannot_serve_is_refused_by_name(model: Path, fields: dict[str, Any], kit: PlainKit, message: str) -> None:
    with pytest.raises(StartError, match=message) as caught:
        build(config(model, **fields), kit=kit)
    assert "\n" not in str(caught.value)


def test_unsupported() -> None:
    fine = replace(SMALL, head_dim=128)
    assert unsupported(EngineConfig(), fine) == ""
    assert "heads of 16" in unsupported(EngineConfig(), SMALL)
    assert "3 KV heads" in unsupported(EngineConfig(), replace(fine, n_q_heads=4, n_kv_heads=3))


def test_the_numerics_family_names_what_makes_the_bits() -> None:
    assert numerics(EngineConfig(), "card") == "cuda-bf16"
    exact = numerics(EngineConfig(deterministic=True, decode_rows=8), "card")
    assert "rows8" in exact
    assert exact.endswith("card")
    assert exact != numerics(EngineConfig(deterministic=True, decode_rows=8), "other")


def test_the_device_decides_what_is_left_open() -> None:
    cpu, gpu = resolved(EngineConfig(), "cpu"), resolved(EngineConfig(), "cuda")
    assert (cpu.max_rows, cpu.lag, cpu.idle_step_tokens) == (16, 0, 2048)
    assert (gpu.max_rows, gpu.lag, gpu.idle_step_tokens) == (256, 1, 8192)
    given = EngineConfig(max_rows=3, lag=0, step_tokens=70, idle_step_tokens=80)
    assert replace(resolved(given, "cuda"), device="cpu") == given


def test_which_device_is_chosen() -> None:
    assert choose_device("cpu", lambda: pytest.fail("not asked")) == ("cpu", "")
    assert choose_device("cuda", lambda: "") == choose_device("auto", lambda: "") == ("cuda", "")
    assert choose_device("auto", lambda: "no card") == ("cpu", "device: cpu, because no card")
    with pytest.raises(ValueError, match="cuda cannot be used: no card"):
        choose_device("cuda", lambda: "no card")
    with pytest.raises(ValueError, match="'abacus'"):
        choose_device("abacus", lambda: "")


def test_missing_packages_come_with_the_line_that_installs_them() -> None:
    assert missing_packages(lambda name: True) == ""
    assert missing_packages(lambda name: name == "triton") == f"flashinfer not installed: {PIP_LINE}"
    assert "flashinfer and triton" in missing_packages(lambda name: False)


def test_the_memlock_limit_is_told_where_it_is_too_small() -> None:
    made = MemoryPlan(3, 32, 1, 0, 4, 400 << 20, 3, 100 << 20, 0)
    assert memlock_notes(made, 500 << 20) == memlock_notes(made, -1) == ()
    (note,) = memlock_notes(made, 8 << 20)
    assert "8 MiB" in note
    assert "500 MiB" in note


def test_what_the_doctor_says_about_a_gpu() -> None:
    fine, broken, none = (
        device_finding("H200", ""),
        device_finding("H200", f"no kernels: {PIP_LINE}"),
        device_finding("", "no card"),
    )
    assert (fine.verdict, broken.verdict, none.verdict) == (Verdict.OK, Verdict.NOTE, Verdict.OK)
    assert "--device cuda" in fine.found
    assert PIP_LINE in broken.advice
    assert "cpu only: no card" in none.found


@pytest.mark.anyio
@pytest.mark.parametrize("device", ["plain twin of the GPU", "cpu"])
async def test_restored_is_never_spilled_bit_for_bit(model: Path, tmp_path: Path, device: str) -> None:
    """The digest of a session's KV in a pool that holds all, after RAM, and after a restart from disk."""
    asked = config(
        model, device="cpu", deterministic=True, decode_rows=4, weights="bf16", store_dir=str(tmp_path / "kv"),
        store_bytes=1 << 28, store_min_free_bytes=0, threads=1,
    )  # fmt: skip
    kit = PlainKit() if device != "cpu" else None

    def engine_of(**fields: Any) -> Engine:
        return Engine(replace(asked, **fields), builder=partial(build, kit=kit))

    async def two_turns(engine: Engine, seed: int) -> None:
        ids, _ = await ask(engine, prompt(seed), 12, f"s{seed}")
        await ask(engine, [*prompt(seed), *ids, 5, 6, 7], 12, f"s{seed}")

    async with engine_of(pool_tokens=8192, ram_bytes=0, store_dir="") as roomy:
        for seed in range(5):
            await two_turns(roomy, seed)
        expected = [await roomy.state_hash(f"s{seed}") for seed in range(5)]
        assert len({digest for digest, _ in expected}) == 5
        assert (await roomy.state_hash("nobody"))[1] == 0
    async with engine_of() as engine:
        firsts = [(await ask(engine, prompt(seed), 12, f"s{seed}"))[0] for seed in range(5)]
        for seed in range(5):
            _, report = await ask(engine, [*prompt(seed), *firsts[seed], 5, 6, 7], 12, f"s{seed}")
            assert seed > 1 or report.ram_tokens >= 256
            assert await engine.state_hash(f"s{seed}") == expected[seed]
        await engine.drain(60)
    async with engine_of() as engine:
        for seed in range(5):
            history = [*prompt(seed), *firsts[seed], 5, 6, 7]
            _, report = await ask(engine, history, 12, f"s{seed}")
            assert report.disk_tokens >= 256
            assert await engine.state_hash(f"s{seed}") == expected[seed]
