"""Stop strings over a stream of text, whatever its pieces.

Every stop string has an automaton (Knuth, Morris and Pratt, 1977) that is fed character by character, so where a piece ends
cannot matter. The stop string that is complete first wins; of several complete at the same character, the longest.
What may still become a stop string is held back and released as soon as it cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def _fallbacks(pattern: str) -> list[int]:
    """fallbacks[k]: length of the longest proper prefix of ``pattern`` that is a suffix of its first k characters."""
    fallbacks = [0] * (len(pattern) + 1)
    length = 0
    for k in range(1, len(pattern)):
        while length and pattern[k] != pattern[length]:
            length = fallbacks[length]
        if pattern[k] == pattern[length]:
            length += 1
        fallbacks[k + 1] = length
    return fallbacks


class _Automaton:
    __slots__ = ("fallbacks", "matched", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.fallbacks = _fallbacks(pattern)
        self.matched = 0

    def feed(self, character: str) -> int:
        """Characters at the end of what was fed that are the beginning of the pattern. Not to be fed after a whole match."""
        matched = self.matched
        while matched and self.pattern[matched] != character:
            matched = self.fallbacks[matched]
        if self.pattern[matched] == character:
            matched += 1
        self.matched = matched
        return matched


@dataclass(frozen=True, slots=True)
class Released:
    """Text that may be sent now, and whether a stop string was found right after it."""

    text: str
    stopped: bool = False


class StopStrings:
    """Finds the first stop string in a text that comes in pieces.

    Holds back at most the longest stop string less one character. Empty stop strings are ignored (api refuses them).
    Cost: characters x stop strings, no more for hostile ones.
    """

    __slots__ = ("_automata", "_held")

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in stops if stop]
        self._held = ""

    def feed(self, piece: str) -> Released:
        """Release what can no longer become a stop string. After ``stopped`` the matcher must not be fed again."""
        if not self._automata:
            return Released(piece)
        text = self._held + piece
        for end in range(len(self._held) + 1, len(text) + 1):
            longest = 0
            for automaton in self._automata:
                matched = automaton.feed(text[end - 1])
                if matched == len(automaton.pattern):
                    longest = max(longest, matched)
            if longest:
                self._held = ""
                return Released(text[: end - longest], stopped=True)
        keep = len(text) - max(automaton.matched for automaton in self._automata)
        self._held = text[keep:]
        return Released(text[:keep])

    def flush(self) -> str:
        """What was held back: nothing more comes, so it cannot become a stop string."""
        held, self._held = self._held, ""
        return held
