"""Seeded agents: one shared system prompt and tool set, a history of its own each, tool results that make it grow.

Pure: a seed in, requests out. ``Conversation`` holds one agent's history and turns outcomes into the next request. The same
seed gives the same agents on every machine; what the model answers becomes part of the history as an OpenAI client sends it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvalet.loadtest.outcome import Outcome

SERVICES = ("gateway", "billing", "search", "mailer", "scheduler", "storage", "identity", "reports")
METRICS = ("latency", "errors", "memory", "requests")
TOPICS = ("deployments", "incidents", "owners", "limits")
WORDS = (
    "queue", "worker", "request", "cache", "replica", "shard", "timeout", "retry", "backlog", "handler", "session",
    "token", "budget", "leader", "follower", "snapshot", "upstream", "connection", "pool", "index", "writer", "reader",
    "region", "release", "rollback", "probe", "threshold", "saturation",
)  # fmt: skip


def tool(name: str, description: str, **parameters: dict[str, Any]) -> dict[str, Any]:
    """An OpenAI function tool; all parameters are required."""
    schema = {"type": "object", "properties": parameters, "required": list(parameters), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS: tuple[dict[str, Any], ...] = (
    tool(
        "read_log",
        "Read the newest lines of a service's log.",
        service={"type": "string", "enum": list(SERVICES)},
        level={"type": "string", "enum": ["info", "warning", "error"]},
    ),
    tool(
        "query_metric",
        "Read one metric of a service over the last hour.",
        service={"type": "string", "enum": list(SERVICES)},
        metric={"type": "string", "enum": list(METRICS)},
    ),
    tool("search_notes", "Search the team's notes.", topic={"type": "string", "enum": list(TOPICS)}),
)

SYSTEM = (
    "You are the operations agent of a small team. You look into problems of their services with the tools you have: read a "
    "log, read a metric, search the notes. Call one tool at a time and wait for its result. When you know enough, say in a few "
    "sentences what is wrong, how you know, and what should be done next. Never guess at a number that a tool can tell you."
)


@dataclass(frozen=True, slots=True)
class AgentScript:
    """What one agent will be told, whatever the model answers. ``results``: one tool result per tool turn; ``pauses_s``: how
    long each of these tools takes; ``follow_ups``: user messages after the first answer."""

    name: str
    task: str
    results: tuple[str, ...]
    pauses_s: tuple[float, ...]
    follow_ups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """``tool_turns``: turns that call a tool, before the one that answers. ``result_chars``: length of a tool result.
    ``pause_s``: shortest and longest tool pause."""

    seed: int = 1
    agents: int = 12
    tool_turns: int = 5
    result_chars: int = 900
    pause_s: tuple[float, float] = (0.2, 1.0)
    follow_ups: int = 1


def make_agents(spec: WorkloadSpec) -> tuple[AgentScript, ...]:
    """The workload's agents, by seed. Agent k is the same for every number of agents above k."""
    return tuple(make_agent(spec, number) for number in range(spec.agents))


def make_agent(spec: WorkloadSpec, number: int) -> AgentScript:
    rng = random.Random(f"{spec.seed}/{number}")
    service = SERVICES[number % len(SERVICES)]
    ticket = rng.randrange(1000, 9999)
    return AgentScript(
        name=f"agent-{number + 1:02d}",
        task=f"Ticket {ticket}: the {service} service has become {rng.choice(('slow', 'unreliable', 'expensive'))}. "
        f"It began after {rng.choice(('a release', 'a change of limits', 'a move to new machines'))}. Find out why.",
        results=tuple(log_lines(rng, service, spec.result_chars) for _ in range(spec.tool_turns)),
        pauses_s=tuple(round(rng.uniform(*spec.pause_s), 3) for _ in range(spec.tool_turns)),
        follow_ups=tuple(
            f"Write one sentence for the team about ticket {ticket}, part {k + 1}." for k in range(spec.follow_ups)
        ),
    )


def log_lines(rng: random.Random, service: str, n_chars: int) -> str:
    """At least ``n_chars`` characters of log lines, cut at a line's end."""
    lines: list[str] = []
    while sum(map(len, lines)) < n_chars:
        words = " ".join(rng.choice(WORDS) for _ in range(6))
        lines.append(f"{rng.choice(('info', 'warning', 'error'))} {service}: {words} {rng.randrange(10, 900)} ms")
    return "\n".join(lines)


class Conversation:
    """One agent's history. ``turn`` counts the turns that were accepted, from 0."""

    def __init__(self, script: AgentScript, model: str, max_tokens: int = 64, answer_tokens: int = 0) -> None:
        """``answer_tokens``: bound of answers in text, 0 = ``max_tokens``, which bounds tool calls."""
        self.script = script
        self.model = model
        self.max_tokens = max_tokens
        self.answer_tokens = answer_tokens or max_tokens
        self.turn = 0
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": script.task},
        ]

    @property
    def wants_tool(self) -> bool:
        """Whether the coming turn is one that must call a tool."""
        return self.turn < len(self.script.results)

    @property
    def pause_s(self) -> float:
        """How long the tool runs whose result the coming turn brings; 0.0 where there is none."""
        return self.script.pauses_s[self.turn - 1] if 0 < self.turn <= len(self.script.pauses_s) else 0.0

    def body(self, **extra: Any) -> dict[str, Any]:
        """The coming turn as a streamed chat completion, greedy. ``extra`` fields are added."""
        return {
            "model": self.model,
            "messages": list(self.messages),
            "tools": list(TOOLS),
            "tool_choice": "required" if self.wants_tool else "none",
            "parallel_tool_calls": False,
            "max_tokens": self.max_tokens if self.wants_tool else self.answer_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extra,
        }

    def accept(self, outcome: Outcome) -> str:
        """Takes a whole answer into the history, with what the script says comes next. Returns "" or, where the answer is not
        what the turn asked for, one sentence; the history is then unchanged."""
        if not outcome.ok:
            return outcome.error
        if self.wants_tool:
            if not outcome.tool_calls:
                return "a tool had to be called and was not"
            self.messages.append({"role": "assistant", "content": None, "tool_calls": as_openai(outcome)})
            result = self.script.results[self.turn]
            self.messages += [{"role": "tool", "tool_call_id": c.id, "content": result} for c in outcome.tool_calls]
        else:
            if outcome.tool_calls:
                return "a tool was called although none was allowed"
            self.messages.append({"role": "assistant", "content": outcome.text})
            self._follow_up()
        self.turn += 1
        return ""

    def _follow_up(self) -> None:
        done = self.turn - len(self.script.results)
        if done < len(self.script.follow_ups):
            self.messages.append({"role": "user", "content": self.script.follow_ups[done]})


def as_openai(outcome: Outcome) -> Sequence[dict[str, Any]]:
    """The outcome's tool calls as a client sends them back."""
    calls = outcome.tool_calls
    return [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls]
