"""Named sessions over the end of a real server: SIGTERM, SIGKILL after a checkpoint, and what a turn pays afterwards."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from scriptedproc import until
from serverproc import Server

COMMON = ("--weights", "int4", "--pool-tokens", "2048", "--ram-bytes", "0", "--max-rows", "4")


def new_ids(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(n)]


class Talk:
    """One agent on one session name; its histories end wherever they end, never at a chunk."""

    def __init__(self, server: Server, name: str, first: int) -> None:
        self.server, self.name, self.turns = server, name, 0
        self.history = new_ids(sum(name.encode()), first)

    def turn(self, new: int) -> dict[str, Any]:
        """The KV record of a turn that brings ``new`` tokens. ``fed``: what a server that lost nothing computes of it."""
        self.turns += 1
        self.history += new_ids(100 * self.turns + len(self.history), new)
        reply = self.server.complete(self.history, 7, session=self.name)
        self.history += reply["choices"][0]["token_ids"]
        record: dict[str, Any] = reply["kvalet"]
        return record


def test_a_session_goes_on_after_sigterm_and_after_sigkill_at_the_token_where_it_stopped(tmp_path: Path) -> None:
    """The prompt of the next turn is its history and new tokens: computed are these and the one that was never fed."""
    store = str(tmp_path / "a store, mit Umlaut ü")
    with Server(*COMMON, "--store", store) as server:
        one, two = Talk(server, "agent-1", 300), Talk(server, "agent-2", 40)
        for talk in (one, two):
            talk.turn(0)
            assert talk.turn(23)["computed_tokens"] == 24
        assert server.terminate() == 0

        server.args = (*COMMON, "--store", store, "--checkpoint", "idle")
        server.start()
        assert server.metric("kvalet_disk_records") == 2
        for talk in (one, two):
            record = talk.turn(11)
            assert record["computed_tokens"] == 12, record
            assert record["disk_tokens"] == record["prompt_tokens"] - 12
            assert record["diverged_at"] == -1
        assert server.metric("kvalet_read_records_total") == 2
        until("both are checkpointed", lambda: server.metric("kvalet_written_records_total") >= 2, 60)
        server.kill()

        server.start()
        for talk in (one, two):
            record = talk.turn(5)
            assert record["computed_tokens"] == 6, record
            assert record["disk_tokens"] == record["prompt_tokens"] - 6
        assert server.metric("kvalet_record_read_failures_total") == 0
        assert server.metric("kvalet_disk_refusals_total") == 0
        assert "Traceback" not in server.log, server.log[-3000:]
