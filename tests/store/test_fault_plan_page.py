"""Every test that docs/store.md names exists, and every row of the fault plan has one."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
PAGE = (TESTS.parent / "docs" / "store.md").read_text()
ROWS = "K1 K2 K3 K4 P1 P2 P3 B1 B2 B3 B4 B5 B6 B7 E1 E2 E3 E4 E5 E6 E7 C1 C2 C3 C4 C5 C6 R1 R2 R3 R4 R5 R6 I1 I2 I3 G1 G2 G3 G4"
ROWS += " T1 X1 X2 X3 X4 L1 L2 L3 S1"


def functions(path: Path) -> list[str]:
    return re.findall(r"^(?:async )?(?:def|class) (\w+)", path.read_text(), re.MULTILINE)


def test_every_named_test_exists() -> None:
    """A name without a file belongs to the last file that was named in its line."""
    missing = []
    for line in PAGE.splitlines():
        path = None
        for word in re.findall(r"`([^`]+)`", line):
            file, _, name = word.partition("::")
            if file.endswith(".py") and file.rpartition("/")[2].startswith("test_"):
                path = TESTS / (file if "/" in file else f"store/{file}")
            elif word.startswith("test_"):
                name = word
            else:
                continue
            if path is None or not path.is_file() or (name and not fnmatch.filter(functions(path), name)):
                missing.append(word)
    assert missing == []


def test_every_row_of_the_plan_has_a_test() -> None:
    table = PAGE.partition("## Fault plan")[2].partition("\n## ")[0]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("|") and "test_" in line]
    named = {row for cell in first for row in re.findall(r"\b[A-Z]\d\b", cell)}
    assert set(ROWS.split()) - named == set()
