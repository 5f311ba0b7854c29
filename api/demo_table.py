"""What a person sees while the demo runs: a table that is redrawn in a terminal, one line per finished turn elsewhere."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import TracebackType

from kvalet.loadtest.runner import Turn, Watcher
from kvalet.loadtest.workload import Conversation
from rich.console import Console
from rich.live import Live
from rich.table import Table

REDRAWS_PER_S = 4


@dataclass(slots=True)
class AgentRow:
    """One agent as the table shows it. Tokens of the last finished turn's prompt, by where their KV came from."""

    state: str = ""
    turn: int = 0
    prompt: int = 0
    resident: int = 0
    ram: int = 0
    disk: int = 0
    computed: int = 0
    ttft_ms: float = 0.0


class AgentTable(Watcher):
    """A ``Watcher`` that shows what it sees. Bounded by the number of agents."""

    def __init__(self, names: list[str], title: str, console: Console | None = None) -> None:
        self.rows = {name: AgentRow() for name in names}
        self._title = title
        self._console = console or Console(file=sys.stdout)
        self._live = self._console.is_terminal

    def __enter__(self) -> AgentTable:
        self._console.print(f"\n{self._title}", highlight=False, soft_wrap=True)
        self._screen = Live(get_renderable=self.render, refresh_per_second=REDRAWS_PER_S, console=self._console)
        if self._live:
            self._screen.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._screen.stop()

    def waiting(self, conversation: Conversation, pause_s: float) -> None:
        self.rows[conversation.script.name].state = "tool runs"

    def sent(self, conversation: Conversation) -> None:
        self.rows[conversation.script.name].state = "waits"

    def content(self, conversation: Conversation, now_s: float) -> None:
        self.rows[conversation.script.name].state = "answers"

    def finished(self, conversation: Conversation, turn: Turn) -> None:
        row = self.rows[turn.agent]
        row.state = turn.fault or "done"
        record, outcome = turn.outcome.record, turn.outcome
        row.turn = turn.number + 1
        row.prompt = outcome.prompt_tokens or 0
        row.resident, row.ram, row.disk, row.computed = (
            int(record.get(f"{source}_tokens", 0)) for source in ("resident", "ram", "disk", "computed")
        )
        row.ttft_ms = (outcome.ttft_s or 0.0) * 1e3
        if not self._live:
            self._console.print(self.line(turn.agent), highlight=False, soft_wrap=True)

    def line(self, name: str) -> str:
        row = self.rows[name]
        return (
            f"{name} turn {row.turn}: {row.prompt} tokens = {row.resident} resident + {row.ram} from RAM + {row.disk} from "
            f"disk + {row.computed} computed; first token after {row.ttft_ms:.0f} ms; {row.state}"
        )

    def render(self) -> Table:
        table = Table(box=None)
        for head in ("agent", "state", "turn", "tokens", "resident", "RAM", "disk", "computed", "TTFT ms"):
            table.add_column(head, justify="left" if head in ("agent", "state") else "right")
        for name, row in self.rows.items():
            counts = (row.turn, row.prompt, row.resident, row.ram, row.disk, row.computed)
            table.add_row(name, row.state, *map(str, counts), f"{row.ttft_ms:.0f}")
        return table
