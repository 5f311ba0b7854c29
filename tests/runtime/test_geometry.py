"""Sizes of the KV cache: worked examples, and what must hold of every shape."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvalet.runtime.geometry import (
    BLOCK_BYTES,
    CHUNK_TOKENS_CHOICES,
    DTYPE_BYTES,
    MAX_CHUNK_BYTES,
    PAGE_TOKENS,
    KVGeometry,
    round_up,
)

GEOMETRIES = st.builds(
    KVGeometry,
    n_layers=st.integers(1, 100),
    n_kv_heads=st.integers(1, 64),
    head_dim=st.integers(1, 256),
    kv_dtype=st.sampled_from(sorted(DTYPE_BYTES)),
)


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_round_up_is_the_least_multiple(value: int, multiple: int) -> None:
    found = round_up(value, multiple)
    assert found % multiple == 0
    assert value <= found < value + multiple


def test_a_small_model_by_hand() -> None:
    """30 layers, 3 KV heads of 64, bf16: 30 * 2 * 3 * 64 * 2 bytes a token."""
    geometry = KVGeometry(30, 3, 64)
    assert geometry.token_bytes == 23_040
    assert geometry.page_bytes == 368_640
    assert geometry.page_stride_bytes == 368_640, "a multiple of 4096: no padding"
    assert (geometry.chunk_tokens, geometry.chunk_pages) == (256, 16)
    assert geometry.chunk_bytes == 16 * 368_640
    assert geometry.slot_bytes == 4096 + geometry.chunk_bytes


def test_an_8b_model_by_hand() -> None:
    """36 layers, 8 KV heads of 128, bf16: 147,456 bytes a token; 256 tokens are 36 MiB, 128 are 18."""
    geometry = KVGeometry(36, 8, 128)
    assert geometry.token_bytes == 147_456
    assert (geometry.chunk_tokens, geometry.chunk_bytes) == (128, 18 << 20)


def test_pages_are_padded_to_blocks() -> None:
    geometry = KVGeometry(1, 1, 1, "fp32")
    assert (geometry.page_bytes, geometry.page_stride_bytes) == (128, 4096)
    assert geometry.chunk_bytes == 16 * 4096, "padded pages, one after the other"


@given(GEOMETRIES)
def test_what_holds_of_every_shape(geometry: KVGeometry) -> None:
    assert geometry.page_bytes == PAGE_TOKENS * geometry.token_bytes
    assert geometry.page_stride_bytes % BLOCK_BYTES == 0
    assert 0 <= geometry.page_stride_bytes - geometry.page_bytes < BLOCK_BYTES
    assert geometry.chunk_tokens in CHUNK_TOKENS_CHOICES
    assert geometry.chunk_tokens == geometry.chunk_pages * PAGE_TOKENS
    assert geometry.slot_bytes % BLOCK_BYTES == 0


@given(GEOMETRIES)
def test_a_chunk_is_the_largest_that_fits(geometry: KVGeometry) -> None:
    """At most 20 MiB, and twice as many tokens would be more; a single page beyond it is a chunk of its own."""
    if geometry.chunk_tokens > PAGE_TOKENS:
        assert geometry.chunk_bytes <= MAX_CHUNK_BYTES
    if geometry.chunk_tokens < max(CHUNK_TOKENS_CHOICES):
        assert 2 * geometry.chunk_bytes > MAX_CHUNK_BYTES


@given(st.integers(0, 10**7))
def test_pages_for_covers_and_wastes_less_than_a_page(n_tokens: int) -> None:
    pages = KVGeometry(2, 2, 8).pages_for(n_tokens)
    assert pages * PAGE_TOKENS >= n_tokens > (pages - 1) * PAGE_TOKENS


@pytest.mark.parametrize("name", ["n_layers", "n_kv_heads", "head_dim", "page_tokens"])
@pytest.mark.parametrize("size", [0, -1])
def test_sizes_must_be_positive(name: str, size: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        dataclasses.replace(KVGeometry(2, 2, 8), **{name: size})


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"bf16.*fp16.*fp32.*int8"):
        KVGeometry(2, 2, 8, "int8")
