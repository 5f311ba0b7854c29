"""Which rotary embedding a model was trained with: base, scaling and their parameters. No torch.

Sources: linear (kaiokendev, 2023), dynamic NTK (bloc97 and emozilla, 2023), yarn (Peng et al., arXiv 2309.00071), llama3 (the
Llama 3.1 release); the meaning of every field is that of ``rope_parameters`` of the ``transformers`` package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """``factor``: by how much the context is stretched. ``original_context``: tokens of the training before the stretching.
    ``low_freq_factor``, ``high_freq_factor``: llama3's borders in wavelengths per original context. ``beta_fast``,
    ``beta_slow``: yarn's borders in turns per original context, rounded outwards to whole dimensions with ``truncate``.
    ``attention_factor`` multiplies cosines and sines (yarn; elsewhere 1)."""

    base: float
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def fault(self) -> str:
        """What cannot be computed, "" if all can: for whoever read it from a file, to be said with the file's own names."""
        if self.kind not in KINDS:
            return f"type {self.kind!r}, supported are {', '.join(KINDS)}"
        if not (math.isfinite(self.base) and self.base > 1):
            return f"base {self.base}"
        if self.kind == "default":
            return ""
        if not (math.isfinite(self.factor) and self.factor > 0):
            return f"factor {self.factor}"
        if self.kind in ("dynamic", "yarn") and self.factor < 1:
            return f"factor {self.factor} for type {self.kind!r}"
        if self.kind != "linear" and self.original_context < 1:
            return f"original context {self.original_context}"
        if not (math.isfinite(self.attention_factor) and self.attention_factor > 0):
            return f"attention factor {self.attention_factor}"
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            return f"low_freq_factor {self.low_freq_factor} beside high_freq_factor {self.high_freq_factor}"
        if self.kind == "yarn" and not 0 < self.beta_slow <= self.beta_fast < math.inf:
            return f"beta_slow {self.beta_slow} beside beta_fast {self.beta_fast}"
        return ""

    def most_context(self, trained: int) -> int:
        """Tokens up to which the scaling stretches a model whose own context is ``trained``."""
        if self.kind in ("linear", "dynamic"):
            return max(trained, int(trained * max(1.0, self.factor)))
        if self.kind == "yarn":
            return max(trained, int(self.original_context * self.factor))
        return trained

    def describe(self, context_tokens: int) -> str:
        """One text that differs wherever the frequencies do, for the identity. ``context_tokens`` counts only where the
        frequencies depend on it."""
        text = f"base={self.base:g} scale={self.factor if self.kind == 'linear' else 1.0:g}"
        if self.kind in ("default", "linear"):
            return text
        text += f" {self.kind} factor={self.factor:g} original={self.original_context}"
        if self.kind == "dynamic":
            return f"{text} context={max(context_tokens, self.original_context)}"
        if self.kind == "llama3":
            return f"{text} low={self.low_freq_factor:g} high={self.high_freq_factor:g}"
        ends = f"fast={self.beta_fast:g} slow={self.beta_slow:g} truncate={self.truncate}"
        return f"{text} {ends} attention={self.attention_factor:.9g}"


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """What yarn multiplies cosines and sines with, so that attention stays as sharp as it was in the original context."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
