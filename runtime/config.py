"""Settings of one engine. Frozen; only api/settings.py fills it from the outside."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

WEIGHTS_MODES = ("auto", "bf16", "fp32", "int4")
LOAD_FORMATS = ("auto", "dummy")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """``model``: a GGUF file or a Hugging Face folder. ``load_format``: "dummy" takes random weights of the folder's shape.

    ``weights``: "fp32" and "bf16" dequantise; "int4" computes from the file's own 4-bit blocks, whatever the batch; "auto"
    is int4 for few rows and bf16 for many, as measured at start (under ``deterministic``, where one path must serve all, bf16;
    also where the file has no 4-bit blocks).

    ``n_pages`` counts the scratch page 0. ``context_tokens`` 0: the model's. ``max_step_tokens``: the most tokens of one step
    (beyond it EngineError). ``arena_tokens``: room for contiguous copies of running rows (token_bytes each, on top of the
    pool); rows beyond it run on the slower plain path; 0: all do. ``threads`` 0: all cores this process may use.
    ``decode_rows``: under ``deterministic``, rows of every decode call, padded. ``forced_runs``: accept a grammar's forced
    tokens together with the sampled one. ``cache_dir``: weight digests and the rebuilt tokenizer are kept there; None: not.
    """

    model: Path
    n_pages: int
    weights: str = "auto"
    context_tokens: int = 0
    max_step_tokens: int = 2304
    arena_tokens: int = 32_768
    threads: int = 0
    deterministic: bool = False
    decode_rows: int = 16
    forced_runs: bool = False
    cache_dir: Path | None = None
    load_format: str = "auto"

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS_MODES:
            raise ValueError(f"weights must be one of {', '.join(WEIGHTS_MODES)}, not {self.weights!r}")
        if self.load_format not in LOAD_FORMATS:
            raise ValueError(f"load_format must be one of {', '.join(LOAD_FORMATS)}, not {self.load_format!r}")
        if self.n_pages < 2:
            raise ValueError("n_pages must be at least 2: page 0 is scratch")
        if min(self.max_step_tokens, self.decode_rows) < 1 or min(self.arena_tokens, self.threads, self.context_tokens) < 0:
            raise ValueError(f"sizes must not be negative, max_step_tokens and decode_rows at least 1: {self}")
        if self.deterministic and self.forced_runs:
            raise ValueError("deterministic feeds one token a step: forced_runs must be off")

    @property
    def kv_dtype(self) -> str:
        return "fp32" if self.weights == "fp32" else "bf16"
