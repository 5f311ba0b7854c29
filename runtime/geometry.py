"""Every size formula of the KV cache, in one place. Pure: no torch, no numpy.

Words (docs/architecture.md, section "Words"): a page is 16 consecutive tokens of one sequence, K and V of all layers in
one contiguous run of bytes; a chunk is ``chunk_tokens`` tokens, the unit of storage below the device.
"""

from __future__ import annotations

from dataclasses import dataclass

PAGE_TOKENS = 16
BLOCK_BYTES = 4096
"""Alignment of page payloads, slots and files: what direct I/O and DMA both accept."""

MAX_CHUNK_BYTES = 20 * 1024 * 1024
CHUNK_TOKENS_CHOICES = (256, 128, 64, 32, 16)
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def round_up(value: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is >= ``value`` (both in the same unit)."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Shape of one token's KV and what follows from it.

    ``kv_dtype`` is one of ``DTYPE_BYTES``. All ``*_bytes`` are bytes, all ``*_tokens`` tokens, all ``*_pages`` pages.
    """

    n_layers: int
    n_kv_heads: int
    head_dim: int
    kv_dtype: str = "bf16"
    page_tokens: int = PAGE_TOKENS

    def __post_init__(self) -> None:
        if min(self.n_layers, self.n_kv_heads, self.head_dim, self.page_tokens) < 1:
            raise ValueError(f"geometry needs positive sizes: {self}")
        if self.kv_dtype not in DTYPE_BYTES:
            raise ValueError(f"kv_dtype must be one of {sorted(DTYPE_BYTES)}, not {self.kv_dtype!r}")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V over all layers."""
        return self.n_layers * 2 * self.n_kv_heads * self.head_dim * DTYPE_BYTES[self.kv_dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page's payload, without padding."""
        return self.page_tokens * self.token_bytes

    @property
    def page_stride_bytes(self) -> int:
        """Bytes from one page to the next, in the pool, in a slot and in a file: the payload padded to ``BLOCK_BYTES``."""
        return round_up(self.page_bytes, BLOCK_BYTES)

    @property
    def chunk_tokens(self) -> int:
        """Tokens per chunk: the largest of 16..256 whose payload is at most 20 MiB; 16 where a single page exceeds that."""
        for tokens in CHUNK_TOKENS_CHOICES:
            if tokens // self.page_tokens * self.page_stride_bytes <= MAX_CHUNK_BYTES:
                return tokens
        return self.page_tokens

    @property
    def chunk_pages(self) -> int:
        return self.chunk_tokens // self.page_tokens

    @property
    def chunk_bytes(self) -> int:
        """Payload bytes of one whole chunk (padded pages)."""
        return self.chunk_pages * self.page_stride_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slab slot: a header block and one chunk."""
        return BLOCK_BYTES + self.chunk_bytes

    def pages_for(self, n_tokens: int) -> int:
        """Pages that hold ``n_tokens`` tokens: ceil(n / page_tokens); 0 tokens take 0 pages."""
        return -(-n_tokens // self.page_tokens)
