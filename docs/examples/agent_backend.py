"""An agent back end in one process: kvalet runs the model, this file runs the tools.

    python docs/examples/agent_backend.py "How many files are there, and what is 17 * 3?"

Every agent has a session. A turn streams text and tool calls; the tools run here, for real, while the engine is free to park
the agent's KV and serve others; their results go back as the next turn of the same session, whose history is then restored
instead of computed. The example shows sessions, tool results, a fork, a cancelled turn and closing.
"""

from __future__ import annotations

import argparse
import asyncio
import fnmatch
import json
import operator
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import kvalet

OPERATORS: Mapping[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}


@dataclass(frozen=True)
class AgentTool:
    """What the model is told of a tool, and the function behind it. ``run`` gets the arguments as keywords."""

    name: str
    description: str
    properties: dict[str, Any]
    run: Callable[..., object]

    def described(self) -> dict[str, Any]:
        schema = {
            "type": "object",
            "properties": self.properties,
            "required": list(self.properties),
            "additionalProperties": False,
        }
        return {"type": "function", "function": {"name": self.name, "description": self.description, "parameters": schema}}


def calculate(a: float, operation: str, b: float) -> float:
    return OPERATORS[operation](a, b)


def clock(utc_offset_hours: int) -> str:
    return datetime.now(timezone(timedelta(hours=utc_offset_hours))).isoformat(timespec="seconds")


def file_lister(folder: Path) -> Callable[[str], list[str]]:
    """Lists names in ``folder`` itself; a pattern cannot lead out of it."""

    def list_files(pattern: str) -> list[str]:
        return sorted(path.name for path in folder.iterdir() if fnmatch.fnmatch(path.name, pattern))

    return list_files


def default_tools(folder: Path) -> list[AgentTool]:
    number = {"type": "number", "minimum": -1_000_000, "maximum": 1_000_000}
    return [
        AgentTool("calculate", "Do one calculation with two numbers.",
                  {"a": number, "operation": {"type": "string", "enum": list(OPERATORS)}, "b": number}, calculate),
        AgentTool("clock", "The current date and time.",
                  {"utc_offset_hours": {"type": "integer", "minimum": -12, "maximum": 14}}, clock),
        AgentTool("list_files", "The files in the working folder whose names match a pattern such as *.txt.",
                  {"pattern": {"type": "string", "minLength": 1, "maxLength": 16}}, file_lister(folder)),
    ]  # fmt: skip


@dataclass
class Agent:
    """One conversation. ``history`` grows by what the model said and what the tools returned, nothing is ever changed in it:
    that is what lets its KV be used again."""

    session: kvalet.Session
    tools: dict[str, AgentTool]
    history: list[dict[str, Any]]
    say: Callable[[str], None]
    ran: list[tuple[str, str]] = field(default_factory=list)
    """Tool calls and their results, for whoever wants to look."""

    async def ask(self, question: str, *, tool_rounds: int = 1, max_tokens: int = 80) -> kvalet.TurnEnd:
        """One question: ``tool_rounds`` turns in which the model must use tools, then a turn in which it must answer.
        (A large model decides by itself: leave ``tool_choice`` at "auto" and loop while it calls tools.)"""
        self.history.append({"role": "user", "content": question})
        for _ in range(tool_rounds):
            await self._turn("required", max_tokens)
        return await self._turn("none", max_tokens)

    async def _turn(self, tool_choice: str, max_tokens: int) -> kvalet.TurnEnd:
        turn = self.session.turn(
            self.history,
            [tool.described() for tool in self.tools.values()],
            tool_choice=tool_choice,
            parallel_tool_calls=False,
            max_tokens=max_tokens,
            temperature=0.0,
        )
        async for piece in turn:
            if isinstance(piece, kvalet.TextDelta):
                self.say(piece.text)
            elif isinstance(piece, kvalet.TurnEnd):
                if piece.finish_reason == "error":
                    raise RuntimeError(f"the turn ended with {piece.reason}: {piece.message}")
                self._take(piece)
                return piece
        raise AssertionError("a turn always ends with a TurnEnd")

    def _take(self, end: kvalet.TurnEnd) -> None:
        # A call that was cut off by the token limit is not run.
        calls = [call for call in end.tool_calls if end.finish_reason != "length" or _is_json(call.arguments)]
        self.history.append(
            {
                "role": "assistant",
                "content": end.text,
                "tool_calls": [
                    {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                    for call in calls
                ],
            }
        )
        for call in calls:
            self.history.append({"role": "tool", "tool_call_id": call.id, "content": self._run(call)})

    def _run(self, call: kvalet.ToolCall) -> str:
        """The result as JSON text. What goes wrong in a tool is told to the model, it does not end the agent."""
        try:
            result = json.dumps(self.tools[call.name].run(**json.loads(call.arguments)), ensure_ascii=False)
        except (ArithmeticError, OSError, ValueError) as error:
            result = json.dumps({"error": str(error)})
        self.ran.append((f"{call.name}({call.arguments})", result))
        self.say(f"[{call.name}({call.arguments}) -> {result}]\n")
        return result

    def fork(self) -> Agent:
        """Another agent with the same past: it shares this one's KV until their histories differ."""
        return Agent(self.session.fork(), self.tools, list(self.history), self.say)

    async def ask_and_interrupt(self, question: str, after_pieces: int) -> kvalet.TurnEnd:
        """Ask, read a few pieces, then change one's mind: the turn ends at once and the history is as before."""
        turn = self.session.turn([*self.history, {"role": "user", "content": question}], temperature=0.0)
        read = 0
        async for piece in turn:
            if isinstance(piece, kvalet.TurnEnd):
                return piece
            read += 1
            if read == after_pieces:
                turn.cancel()
        raise AssertionError("a turn always ends with a TurnEnd")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


class AgentBackend:
    """Agents over one engine, all with the same instructions and tools (whose KV they share)."""

    def __init__(self, engine: kvalet.Engine, tools: list[AgentTool], say: Callable[[str], None]) -> None:
        self._engine = engine
        self._tools = {tool.name: tool for tool in tools}
        self._say = say

    def agent(self, name: str = "") -> Agent:
        instructions = {"role": "system", "content": "You are a helpful assistant. Use the tools."}
        return Agent(self._engine.session(name), self._tools, [instructions], self._say)


def fill(folder: Path) -> None:
    for name in ("notes.txt", "plan.txt", "data.csv"):
        (folder / name).write_text(name)


async def run(config: kvalet.EngineConfig, question: str, say: Callable[[str], None]) -> Agent:
    with tempfile.TemporaryDirectory(prefix="agent-") as folder:
        fill(Path(folder))
        async with kvalet.Engine(config) as engine:
            backend = AgentBackend(engine, default_tools(Path(folder)), say)
            agent = backend.agent("example")
            first = await agent.ask(question)
            say(f"\n({first.report.computed_tokens} of {first.report.prompt_tokens} prompt tokens were computed)\n")
            twin = agent.fork()
            await asyncio.gather(agent.ask("What time is it in Tokyo?"), twin.ask("What is 12 / 5?"))
            interrupted = await twin.ask_and_interrupt("Tell me a long story.", after_pieces=3)
            say(f"\n(interrupted: {interrupted.reason})\n")
            await twin.session.close()
            await agent.session.close()
    return agent


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("question", nargs="?", default="How many text files are there?")
    parser.add_argument("--model", default="", help="a GGUF file; default: the fetched default model")
    options = parser.parse_args(arguments)
    config = kvalet.EngineConfig(model=options.model)
    asyncio.run(run(config, options.question, lambda text: print(text, end="", flush=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
