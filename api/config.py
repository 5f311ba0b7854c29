"""Configuration of an ``Engine``: one frozen value. Read from arguments, files and the environment only in api/settings.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes: bytes or tokens as named; 0 means "choose and print why".

    ``model``: a GGUF file, a Hugging Face folder, or "owner/name" of a repository that was pulled; "" = the default one in the
    cache folder. ``load_format``: "dummy" takes random weights of the folder's shape. ``device``: "cpu", "cuda", or
    "auto" = cuda where it can be used. ``device_share``: of the GPU's memory, what may be used in all, weights included.
    ``weights``: auto, bf16, fp32 or int4 (CPU). ``pool_tokens``: device pool, in tokens of KV. ``ram_bytes``: RAM tier,
    -1 = choose, 0 = off. ``store_dir`` "" = no disk tier; ``store_bytes`` its cap; ``store_min_free_bytes`` what must stay free
    on that disk. ``store_bytes_per_day``: most bytes written in a day (checkpoints stop first), 0 = any. ``checkpoint``: "off"
    writes idle sessions to disk when their room is needed and at the end, "idle" after each turn as well, at the lowest class
    (pinned sessions always). ``store_optional``: serve without the tier when it cannot be opened (the reason is kept).
    ``max_rows``: sequences in a step, 0 = choose. ``threads``: of the model's arithmetic. ``lag`` -1 = the
    device's default. ``decode_rows``: fixed row count of decode calls under ``deterministic``.
    """

    model: str = ""
    served_name: str = ""
    device: str = "cpu"
    device_share: float = 0.92
    weights: str = "auto"
    load_format: str = "auto"
    context_tokens: int = 0
    pool_tokens: int = 0
    ram_bytes: int = -1
    store_dir: str = ""
    store_bytes: int = 0
    store_min_free_bytes: int = 1 << 30
    store_optional: bool = False
    store_bytes_per_day: int = 0
    checkpoint: str = "off"
    store_readers: int = 4
    store_writers: int = 8
    max_rows: int = 0
    step_tokens: int = 0
    idle_step_tokens: int = 0
    queue_limit: int = 256
    max_sessions: int = 10_000
    threads: int = 0
    lag: int = -1
    deterministic: bool = False
    decode_rows: int = 16
    write_timeout_s: float = 60.0
    drain_s: float = 30.0
    default_max_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the HTTP server needs beside the engine. Seconds and bytes as named.

    ``port`` 0 lets the system choose. ``api_keys`` are (tenant name, key) pairs; none = no authentication. ``ping_s``: the
    longest silence on a stream. At a bound: a body over ``max_body_bytes`` is refused with 413, one with which the bodies in
    flight would exceed ``max_bodies_bytes`` with 429, JSON nested deeper than ``max_nesting`` with 400, a body that stalls for
    ``body_timeout_s`` with 408; a connection over ``max_connections`` is closed at once, and a client that takes nothing for
    ``write_timeout_s`` is cut off. ``drain_s``: for running turns and spills at the end; ``flush_s``: for what RAM holds after
    the device was lost.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[tuple[str, str], ...] = ()
    max_body_bytes: int = 16 << 20
    max_bodies_bytes: int = 256 << 20
    max_nesting: int = 200
    max_connections: int = 4096
    body_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    keep_alive_s: float = 75.0
    ping_s: float = 10.0
    drain_s: float = 30.0
    flush_s: float = 30.0
    ready_file: str = ""
