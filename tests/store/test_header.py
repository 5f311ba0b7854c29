"""Format 1, byte for byte: golden files, every bit of a header, every field's refusal (fault plan B1, B5, H6)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvalet.store import header, layout, reading
from kvalet.store.config import BLOCK_BYTES
from kvalet.store.header import Geometry, Header, Home, Refused
from kvalet.store.ids import ChunkKey, ChunkMeta, chunk_key
from storekit import CHUNK_TOKENS, IDENTITY, PAGE_TOKENS, STRIDE, chain, payload

GOLDEN = Path(__file__).parent / "golden"
HOME = Home(bytes(range(16)), IDENTITY.digest, Geometry(PAGE_TOKENS, 4000, STRIDE, CHUNK_TOKENS))
SECRET = b"a tenant's secret, 32 bytes long"
CHUNKS = chain(SECRET, 2, tail=7)


def image(meta: ChunkMeta) -> bytes:
    data = payload(meta)
    return header.pack(HOME, meta, header.digest(data), 1_700_000_000_000_000_000) + data


def refusal(data: bytes, meta: ChunkMeta, home: Home = HOME) -> Refused | None:
    return reading.verify(home, meta, memoryview(data))


@pytest.mark.parametrize("index", range(3))
def test_golden_files_are_what_we_write_and_are_read(index: int) -> None:
    """Made once, from format 1. Never regenerate them: a change that breaks this test needs a new format version."""
    meta = CHUNKS[index]
    data = (GOLDEN / f"{'tail' if meta.tail else 'chunk'}.{index}.v1").read_bytes()
    assert data == image(meta)
    assert refusal(data, meta) is None
    found = header.unpack(data[:BLOCK_BYTES])
    assert isinstance(found, Header)
    assert (found.ids, found.key, found.parent, found.ordinal) == (meta.ids, meta.key, meta.parent, meta.ordinal)


def test_key_chain_is_frozen() -> None:
    assert CHUNKS[0].parent == IDENTITY.digest
    assert CHUNKS[1].parent == CHUNKS[0].key
    assert CHUNKS[0].key.hex() == (GOLDEN / "keys.v1").read_text().split()[0]
    assert CHUNKS[2].key.hex() == (GOLDEN / "keys.v1").read_text().split()[2]


def test_names_are_frozen() -> None:
    names = [layout.file_name(meta, layout.tenant_tag(SECRET, "")) for meta in CHUNKS]
    assert [f"{n.folder}/{n.shard}/{n.name}" for n in names] == (GOLDEN / "names.v1").read_text().split()


def test_every_bit_of_a_header_counts() -> None:
    data = bytearray(image(CHUNKS[0])[:BLOCK_BYTES])
    for bit in range(BLOCK_BYTES * 8):
        data[bit >> 3] ^= 1 << (bit & 7)
        assert isinstance(header.unpack(data), Refused), bit
        data[bit >> 3] ^= 1 << (bit & 7)
    assert isinstance(header.unpack(data), Header)


def test_every_bit_of_a_payload_counts() -> None:
    meta = CHUNKS[2]
    data = bytearray(image(meta))
    for bit in range(BLOCK_BYTES * 8, len(data) * 8):
        data[bit >> 3] ^= 1 << (bit & 7)
        refused = header.digest(memoryview(data)[BLOCK_BYTES:]) != data_digest(data)
        assert refused, bit
        data[bit >> 3] ^= 1 << (bit & 7)
    assert refusal(bytes(data), meta) is None


def data_digest(data: bytearray) -> bytes:
    found = header.unpack(data[:BLOCK_BYTES])
    assert isinstance(found, Header)
    return found.payload_digest


FIELDS = {
    "store_id": ("foreign", dataclasses.replace(HOME, store_id=b"x" * 16)),
    "identity": ("identity", dataclasses.replace(HOME, identity=b"x" * 32)),
    "page_tokens": ("identity", dataclasses.replace(HOME, geometry=Geometry(8, 4000, STRIDE, CHUNK_TOKENS))),
    "page_bytes": ("identity", dataclasses.replace(HOME, geometry=Geometry(PAGE_TOKENS, 4001, STRIDE, CHUNK_TOKENS))),
    "page_stride": ("identity", dataclasses.replace(HOME, geometry=Geometry(PAGE_TOKENS, 4000, 2 * STRIDE, CHUNK_TOKENS))),
}


@pytest.mark.parametrize("field", FIELDS)
def test_another_store_model_or_layout_is_named(field: str) -> None:
    reason, home = FIELDS[field]
    assert refusal(image(CHUNKS[0]), CHUNKS[0], home) == Refused(reason, field)


META_FIELDS = {
    "key": ("key", {"key": ChunkKey(b"k" * 32)}),
    "parent": ("key", {"parent": b"p" * 32}),
    "ordinal": ("key", {"ordinal": 5}),
    "first_token": ("key", {"first_token": 64}),
    "ids": ("key", {"ids": (*CHUNKS[0].ids[:-1], 9)}),
    "kind": ("key", {"tail": True}),
    "n_tokens": ("key", {"ids": CHUNKS[0].ids[:-1]}),
    "n_pages": ("size", {"n_pages": 1}),
}


@pytest.mark.parametrize("field", META_FIELDS)
def test_another_chunk_is_named(field: str) -> None:
    reason, change = META_FIELDS[field]
    assert refusal(image(CHUNKS[0]), dataclasses.replace(CHUNKS[0], **change)) == Refused(reason, field)


@pytest.mark.parametrize(
    ("offset", "value", "field"),
    [(8, 2, "version"), (13, 32, "header_len"), (17, 1, "codec"), (18, 2, "digest_algo"), (19, 1, "flags"), (0, 0, "magic")],
)
def test_a_newer_writer_is_foreign_not_damaged(offset: int, value: int, field: str) -> None:
    """A later version keeps magic, version and the place of the header's digest; the refusal names what is new."""
    data = bytearray(image(CHUNKS[0])[:BLOCK_BYTES])
    data[offset] = value
    data[header.DIGEST_AT :] = header.digest(bytes(data[: header.DIGEST_AT]))
    assert header.unpack(data) == Refused("foreign", field)


def test_mutant_digest_over_part_of_the_payload_is_caught() -> None:
    """B5: were the digest taken over all but the last byte, this flip would pass; it does not."""
    data = bytearray(image(CHUNKS[0]))
    data[-1] ^= 1
    assert refusal(bytes(data), CHUNKS[0]) == Refused("payload", "payload_digest")
    assert header.digest(bytes(data[BLOCK_BYTES:-1])) == header.digest(image(CHUNKS[0])[BLOCK_BYTES:-1])  # what the mutant sees


def test_mutant_header_without_its_own_digest_is_caught() -> None:
    """B5: a reader that skips the header's digest would believe a flipped created time; ours does not."""
    data = bytearray(image(CHUNKS[0]))
    data[72] ^= 1  # created: informational, compared with nothing
    assert refusal(bytes(data), CHUNKS[0]) == Refused("header", "header_digest")


@pytest.mark.parametrize(
    "change",
    [
        {"ids": ()},
        {"ids": tuple(range(33))},
        {"tail": True},
        {"ids": tuple(range(7)), "n_pages": 1},
        {"n_pages": 1},
    ],
)
def test_what_does_not_fit_the_geometry_is_not_written(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="token"):
        header.pack(HOME, dataclasses.replace(CHUNKS[0], **change), bytes(16), 0)


@pytest.mark.parametrize(
    "bad", [(16, 0, 4096, 32), (16, 4097, 4096, 32), (16, 1, 4095, 32), (0, 1, 4096, 32), (16, 1, 4096, 40)]
)
def test_geometry_is_checked(bad: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Geometry(*bad)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=CHUNK_TOKENS),
    st.integers(0, 10_000),
    st.binary(min_size=32, max_size=32),
)
def test_any_chunk_survives_the_round_trip(ids: list[int], ordinal: int, parent: bytes) -> None:
    key = chunk_key(SECRET, parent, ids)
    tail = len(ids) < CHUNK_TOKENS
    meta = ChunkMeta(key, parent, ordinal, ordinal * CHUNK_TOKENS, tuple(ids), -(-len(ids) // PAGE_TOKENS), tail)
    assert refusal(image(meta), meta) is None


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=2 * BLOCK_BYTES))
def test_noise_is_refused_without_an_exception(noise: bytes) -> None:
    assert isinstance(header.unpack(noise), Refused)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=120))
def test_only_our_own_names_parse(text: str) -> None:
    for folder in ("c", "t"):
        parsed = layout.parse_name(folder, text[:2], text)
        assert parsed is None or parsed.name == text


def test_names_in_the_wrong_shard_are_not_ours() -> None:
    for meta in CHUNKS:
        file = layout.file_name(meta, "00000000")
        again = layout.parse_name(file.folder, file.shard, file.name)
        assert again is not None
        assert again.index_key == layout.index_key(meta)
        assert layout.parse_name(file.folder, "zz", file.name) is None
        assert layout.parse_name(file.folder, file.shard, file.name + ".x") is None
        assert layout.parse_name(file.folder, file.shard, file.name.upper()) is None


@pytest.mark.parametrize("text", ["../../etc", "a\0b", "line\nbreak", "x" * 10_000, "unicode ☃", "\ud800"])
def test_tenant_names_never_reach_a_path(text: str) -> None:
    """X1."""
    tag = layout.tenant_tag(SECRET, text)
    assert len(tag) == 8
    assert set(tag) <= set("0123456789abcdef")
