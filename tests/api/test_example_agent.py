"""docs/examples/agent_backend.py as its readers would run it: real model, real tools."""

from __future__ import annotations

import importlib.util
import json
import sys
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import kvalet
import pytest
from serverproc import model_path

PATH = Path(__file__).parents[2] / "docs" / "examples" / "agent_backend.py"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("agent_backend", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["agent_backend"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.anyio
async def test_the_example_runs_real_tools(example: ModuleType) -> None:
    said: list[str] = []
    config = kvalet.EngineConfig(model=model_path(), weights="int4", pool_tokens=6144, ram_bytes=0, max_rows=4)
    agent = await example.run(config, "How many text files are there?", said.append)
    assert len(agent.ran) >= 2, "each question ran a tool"
    for call, result in agent.ran:
        name = call.partition("(")[0]
        assert name in ("calculate", "clock", "list_files")
        json.loads(result)
    roles = [message["role"] for message in agent.history]
    assert roles.count("user") == 2
    assert roles.count("tool") == len(agent.ran)
    assert roles[-1] == "assistant"
    for message in agent.history:
        for call in message.get("tool_calls", []):
            answers = [other for other in agent.history if other.get("tool_call_id") == call["id"]]
            assert len(answers) == 1, "every call has one result, under its own id"
    text = "".join(said)
    assert "(interrupted: cancelled)" in text
    assert "prompt tokens were computed" in text
    assert "None" not in text


def tools(example: ModuleType, folder: Path) -> dict[str, Any]:
    return {tool.name: tool for tool in example.default_tools(folder)}


def test_the_tools_are_real(example: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.csv").write_text("x")
    ready = tools(example, tmp_path)
    assert ready["calculate"].run(a=17, operation="*", b=3) == 51
    assert ready["list_files"].run(pattern="*.txt") == ["a.txt"]
    assert ready["list_files"].run(pattern="../*") == []
    clock = datetime.fromisoformat(ready["clock"].run(utc_offset_hours=9))
    offset = clock.utcoffset()
    assert offset is not None
    assert offset.total_seconds() == 9 * 3600


def test_a_tool_that_fails_tells_the_model(example: ModuleType, tmp_path: Path) -> None:
    agent = example.Agent(None, tools(example, tmp_path), [], lambda text: None)
    call = kvalet.ToolCall("call_1", "calculate", '{"a": 1, "operation": "/", "b": 0}')
    assert "division by zero" in json.loads(agent._run(call))["error"]


def test_public_names_are_lazy_and_there(example: ModuleType) -> None:
    assert set(kvalet.__all__) == set(dir(kvalet))
    for name in kvalet.__all__:
        assert getattr(kvalet, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kvalet.nothing
