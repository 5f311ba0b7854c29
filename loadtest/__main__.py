"""python -m kvalet.loadtest URL: seeded agents against any OpenAI-compatible server; a table, then one JSON line."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

import orjson
from kvalet.loadtest.client import Endpoint, ProtocolError, fetch
from kvalet.loadtest.report import summarise
from kvalet.loadtest.runner import Turn, Watcher, play_all, sender
from kvalet.loadtest.workload import Conversation, WorkloadSpec, make_agents


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m kvalet.loadtest", description=__doc__)
    p.add_argument("url", help="http://host:port; the key, if one is needed, comes from OPENAI_API_KEY")
    p.add_argument("--model", default="", help="default: the first that the server lists")
    p.add_argument("--agents", type=int, default=12)
    p.add_argument("--tool-turns", type=int, default=5, help="turns with a tool call before the one that answers")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--max-tokens", type=int, default=64)
    p.add_argument("--result-chars", type=int, default=900, help="length of a tool's result")
    p.add_argument("--pause", type=float, nargs=2, default=(0.2, 1.0), metavar=("MIN", "MAX"), help="seconds that a tool takes")
    return p


async def first_model(endpoint: Endpoint) -> str:
    status, raw = await fetch(endpoint, "/v1/models")
    if status != 200:
        raise ProtocolError(f"/v1/models answers with status {status}")
    return str(orjson.loads(raw)["data"][0]["id"])


async def run(arguments: argparse.Namespace) -> list[Turn]:
    endpoint = Endpoint.of(arguments.url, os.environ.get("OPENAI_API_KEY", ""))
    model = arguments.model or await first_model(endpoint)
    spec = WorkloadSpec(
        seed=arguments.seed,
        agents=arguments.agents,
        tool_turns=arguments.tool_turns,
        result_chars=arguments.result_chars,
        pause_s=tuple(arguments.pause),
    )
    conversations = [Conversation(script, model, arguments.max_tokens) for script in make_agents(spec)]
    return await play_all(sender(endpoint), conversations, spec.tool_turns + 1, Watcher(), {})


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 every turn was answered as asked, 1 some were not, 2 the server could not be used at all."""
    try:
        turns = asyncio.run(run(parser().parse_args(arguments)))
    except (OSError, ProtocolError, ValueError, KeyError, IndexError) as error:
        print(f"kvalet.loadtest: {error}", file=sys.stderr)
        return 2
    summary = summarise([turn.outcome for turn in turns])
    print(summary.table())
    faults = [f"{turn.agent} turn {turn.number + 1}: {turn.fault}" for turn in turns if turn.fault]
    for fault in faults:
        print(fault)
    print(orjson.dumps(summary.as_json() | {"faults": len(faults)}).decode())
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
