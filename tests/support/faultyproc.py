"""A real server process whose device can be made to fail (faulty_server.py)."""

from __future__ import annotations

from pathlib import Path

from serverproc import Server


class FaultyServer(Server):
    """``point``: where the device fails once the file ``trigger`` exists."""

    def __init__(self, model: Path, point: str, trigger: Path, *args: str) -> None:
        super().__init__(*args, served=str(model))
        self._point, self.trigger = point, trigger

    def program(self) -> list[str]:
        script = Path(__file__).with_name("faulty_server.py")
        return [str(script), self._point, str(self.trigger)]
