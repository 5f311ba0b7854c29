"""The core's memory of what just happened: a ring of the last events and commands, told when something is wrong."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

STORY_LINES = 200
LINE_CHARS = 400


class CoreDefect(RuntimeError):
    """The core found itself in a state that must not exist, or was told something that cannot be.

    Always a defect of kvalet (or of an engine or store that breaks its contract), never a user's fault. The message ends
    with the story. After it the core's state is not to be trusted: the loop ends every turn with ``internal``.
    """


@dataclass(slots=True)
class Story:
    """Bound: the last ``STORY_LINES`` lines, each cut at ``LINE_CHARS``; older ones are forgotten.

    Values are kept as they came and only made into text when the story is told, so that telling nothing costs little.
    """

    lines: deque[tuple[str, object]] = field(default_factory=lambda: deque(maxlen=STORY_LINES))

    def add(self, kind: str, what: object) -> None:
        self.lines.append((kind, what))

    def tell(self) -> str:
        """Oldest first, one line each."""
        return "\n".join(f"  {kind:>7} {str(what)[:LINE_CHARS]}" for kind, what in self.lines)

    def defect(self, message: str) -> CoreDefect:
        """The exception to raise: ``message`` and the story."""
        return CoreDefect(f"{message}\nstory, oldest first:\n{self.tell()}")
