"""Records and states of format 1, byte for byte: golden files, every byte, every length, every field (B1, B2, H6)."""

from __future__ import annotations

import dataclasses
import struct
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvalet.store import header, layout, reading
from kvalet.store.config import BLOCK_BYTES
from kvalet.store.header import Geometry, Home, Refused
from kvalet.store.ids import ChunkKey, ChunkMeta
from kvalet.store.record import (
    DIGEST_AT,
    MAX_RECORD_BYTES,
    RECORD_HEADER_BYTES,
    Record,
    RecordHead,
    RecordHome,
    Span,
    decode,
    encode,
    refuse_home,
    size_bound,
    unpack,
    verify,
)
from kvalet.store.recordmap import Taker, rest_bytes, rest_of
from recordkit import BRANCH, SESSION, SPANS, TENANT, record_of, state_bytes, state_meta
from storekit import CHUNK_TOKENS, IDENTITY, PAGE_TOKENS, STRIDE, chain

GOLDEN = Path(__file__).parent / "golden"
SECRET = b"a tenant's secret, 32 bytes long"
STORE_SECRET = b"the store's secret, 32 bytes lon"
METAS = chain(SECRET, 2, tail=7)
TENANT_HASH = layout.tenant_hash(STORE_SECRET, TENANT)
SESSION_HASH = layout.session_hash(STORE_SECRET, TENANT_HASH, SESSION)
HOME = RecordHome(bytes(range(16)), IDENTITY.digest, TENANT_HASH, SESSION_HASH)
WRITTEN_NS = 1_700_000_000_000_000_000
RECORD = record_of(
    METAS,
    after=3,
    parent="ffeeddccbbaa9988",
    fork_at=17,
    pinned=True,
    ttl_s=86_400,
    last_use_ns=WRITTEN_NS - 1,
    state_keys=(ChunkKey(b"\x11" * 32), ChunkKey(b"\x22" * 32)),
    spans=SPANS,
    rest=b'{"learned":{"wait_s":1.5},"of a later version":[1,null,"x"]}',
)
IMAGE = encode(RECORD, HOME, WRITTEN_NS)
STATE = state_meta(SECRET, METAS[-1], 5000, 1, 2)
STATE_HOME = Home(bytes(range(16)), IDENTITY.digest, Geometry(PAGE_TOKENS, 4000, STRIDE, CHUNK_TOKENS))


def state_image(meta: ChunkMeta = STATE) -> bytes:
    data = state_bytes(meta).ljust(STATE_HOME.geometry.bytes_of(meta) - BLOCK_BYTES, b"\0")
    return header.pack(STATE_HOME, meta, header.digest(data), WRITTEN_NS) + data


def test_the_golden_record_is_what_we_write_and_is_read() -> None:
    """Made once, from format 1. Never regenerate it: a change that breaks this test needs a new format version."""
    data = (GOLDEN / "record.v1").read_bytes()
    assert data == IMAGE
    assert decode(data, tenant=TENANT) == RECORD
    head = verify(data)
    assert isinstance(head, RecordHead)
    assert (head.home, head.written_ns, head.ttl_s) == (HOME, WRITTEN_NS, 86_400)


def test_the_golden_state_is_what_we_write_and_is_read() -> None:
    data = (GOLDEN / "state.v1").read_bytes()
    assert data == state_image()
    assert reading.verify(STATE_HOME, STATE, memoryview(data)) is None


def test_names_are_frozen() -> None:
    plain = dataclasses.replace(RECORD, pinned=False)
    names = [layout.record_name(SESSION_HASH, one) for one in (RECORD, plain, dataclasses.replace(plain, kind="meta"))]
    names.append(layout.file_name(STATE, layout.tenant_tag(STORE_SECRET, "")))
    assert [f"{n.folder}/{n.shard}/{n.name}" for n in names] == (GOLDEN / "names2.v1").read_text().split()
    assert len({name.index_key for name in names[:3]}) == 1
    for name in names:
        again = layout.parse_name(name.folder, name.shard, name.name)
        assert again is not None
        assert (again.index_key, again.session, again.branch, again.head, again.pinned) == (
            name.index_key, name.session, name.branch, name.head, name.pinned,
        )  # fmt: skip
        assert layout.is_bad_name(layout.bad_name(WRITTEN_NS, name.name))
        for wrong in (name.name + ".x", name.name.upper(), name.name[:-1], "../" + name.name, name.name + "\n"):
            assert layout.parse_name(name.folder, name.shard, wrong) is None
        assert layout.parse_name(name.folder, "zz", name.name) is None


def test_every_bit_of_a_record_counts() -> None:
    data = bytearray(IMAGE)
    for bit in range(8 * len(data)):
        data[bit >> 3] ^= 1 << (bit & 7)
        found = decode(data)
        assert isinstance(found, Refused), bit
        assert found.reason == ("header" if bit < 8 * RECORD_HEADER_BYTES else "payload"), bit
        data[bit >> 3] ^= 1 << (bit & 7)
    assert decode(data, tenant=TENANT) == RECORD  # the positive control, on the same buffer


def test_every_byte_of_a_state_counts() -> None:
    data = bytearray(state_image())
    view = memoryview(data)
    for at in range(len(data)):
        data[at] ^= 0x40
        refused = reading.verify(STATE_HOME, STATE, view)
        assert refused is not None, at
        assert refused.reason == ("header" if at < BLOCK_BYTES else "payload"), at
        data[at] ^= 0x40
    assert reading.verify(STATE_HOME, STATE, view) is None


def test_every_length_of_a_record_but_its_own_is_refused() -> None:
    for n in (*range(len(IMAGE)), *(len(IMAGE) + more for more in (1, 2, 511, 4096))):
        found = decode(IMAGE[:n].ljust(n, b"\0"))
        assert isinstance(found, Refused), n
        assert found.reason == "size", n


def test_a_file_that_claims_more_than_it_is_sizes_nothing() -> None:
    """The lengths of a damaged or hostile header are compared, never used to allocate."""
    for field_at in (24, 32, 40):
        fixed = bytearray(IMAGE[:DIGEST_AT])
        struct.pack_into("<Q", fixed, field_at, 1 << 62)
        found = decode(bytes(fixed) + header.digest(fixed) + IMAGE[RECORD_HEADER_BYTES:])
        assert found == Refused("size", "file size")
    assert decode(bytes(MAX_RECORD_BYTES + 1)) == Refused("size", "file size")


FOREIGN = {
    "magic": (0, b"kvaletXX"),
    "version": (8, b"\x02"),
    "header_len": (12, b"\x00\x02"),
    "kind": (16, b"\x03"),
    "codec": (17, b"\x01"),
    "digest_algo": (18, b"\x02"),
    "flags": (19, b"\x02"),
}


@pytest.mark.parametrize("field", FOREIGN)
def test_another_version_is_refused_by_name(field: str) -> None:
    at, value = FOREIGN[field]
    fixed = bytearray(IMAGE[:DIGEST_AT])
    fixed[at : at + len(value)] = value
    assert unpack(bytes(fixed) + header.digest(fixed)) == Refused("foreign", field)


@pytest.mark.parametrize(
    ("field", "reason"), [("store_id", "foreign"), ("identity", "identity"), ("tenant", "key"), ("session", "key")]
)
def test_whose_record_it_is_is_compared(field: str, reason: str) -> None:
    other = dataclasses.replace(HOME, **{field: bytes(len(getattr(HOME, field)))})
    assert refuse_home(other, HOME) == Refused(reason, field)
    assert refuse_home(HOME, HOME) is None


WRONG: dict[str, Any] = {
    "session": 5, "branch": None, "boundary": -1, "kv_len": 1.5, "decoded": [[1]], "space": "xyz", "tail": "00",
    "states": ["zz"], "parent": [], "fork_at": True, "last_use_ns": "1", "spans": [{"text": 5}],
}  # fmt: skip


@pytest.mark.parametrize("field", [*WRONG, *(f"no {name}" for name in WRONG if name != "tail")])
def test_a_map_of_another_program_is_refused_by_field(field: str) -> None:
    """Digests right, contents not ours."""
    head = unpack(IMAGE[:RECORD_HEADER_BYTES])
    assert isinstance(head, RecordHead)
    fields = orjson.loads(IMAGE[RECORD_HEADER_BYTES : RECORD_HEADER_BYTES + head.map_bytes])
    name = field.removeprefix("no ")
    fields.pop(name)
    if name == field:
        fields[name] = WRONG[name]
    assert decode(with_map(orjson.dumps(fields), head)) == Refused("foreign", name)


@pytest.mark.parametrize("text", [b"[]", b"{", b"null", b'{"a":' * 3000 + b"1" + b"}" * 3000, b"\xff"])
def test_a_map_that_is_none_is_refused(text: bytes) -> None:
    head = unpack(IMAGE[:RECORD_HEADER_BYTES])
    assert isinstance(head, RecordHead)
    assert decode(with_map(text, head)) == Refused("payload", "map")


def with_map(text: bytes, head: RecordHead) -> bytes:
    """The golden record with another map, and digests that fit it."""
    body = text + IMAGE[RECORD_HEADER_BYTES + head.map_bytes :]
    fixed = bytearray(IMAGE[:DIGEST_AT])
    struct.pack_into("<Q", fixed, 24, len(text))
    fixed[56:72] = header.digest(body)
    return bytes(fixed) + header.digest(fixed) + body


def test_what_a_later_version_adds_is_kept() -> None:
    """Also inside spans, and also by a version that only rewrites what it read."""
    head = unpack(IMAGE[:RECORD_HEADER_BYTES])
    assert isinstance(head, RecordHead)
    fields = orjson.loads(IMAGE[RECORD_HEADER_BYTES : RECORD_HEADER_BYTES + head.map_bytes])
    fields["new"] = {"deep": [1, {"x": None}]}
    fields["spans"][0]["mood"] = "curious"
    first = decode(with_map(orjson.dumps(fields), head))
    assert isinstance(first, Record)
    again = decode(encode(dataclasses.replace(first, pinned=False), HOME, 5))
    assert isinstance(again, Record)
    assert rest_of(again.rest) == rest_of(RECORD.rest) | {"new": {"deep": [1, {"x": None}]}}
    assert rest_of(again.spans[0].rest) == {"mood": "curious"}
    assert again.spans[0].text == SPANS[0].text


@pytest.mark.parametrize(
    "change",
    [
        {"session": "\ud800"},
        {"ids": (2**32,)},
        {"ids": (-1,)},
        {"ids": (0,) * (MAX_RECORD_BYTES // 4)},
        {"spans": (Span("x" * MAX_RECORD_BYTES, 0, 1),)},
        {"rest": b"[1, 2]"},
    ],
    ids=["half a pair", "id too large", "negative id", "too many ids", "too much text", "rest is no map"],
)
def test_what_cannot_be_told_is_not_written(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"record|dictionary|convert"):
        encode(dataclasses.replace(RECORD, **change), HOME, 0)


@pytest.mark.parametrize("branch", ["", "0" * 15, "0" * 17, "g" * 16, "../../../../etc/", "0" * 15 + "A", "\n" * 16])
def test_a_branch_that_is_no_name_reaches_no_path(branch: str) -> None:
    """X1."""
    with pytest.raises(ValueError, match="16 hex"):
        layout.record_name(SESSION_HASH, dataclasses.replace(RECORD, branch=branch))


@pytest.mark.parametrize("text", ["../../etc", "a\0b", "line\nbreak", "x" * 10_000, "unicode \u2603", "\ud800"])
def test_client_ids_are_hashed_before_they_reach_a_path(text: str) -> None:
    """X1. Tenant and session are told apart wherever the one ends and the other begins."""
    name = layout.record_name(layout.session_hash(STORE_SECRET, layout.tenant_hash(STORE_SECRET, text), text), RECORD)
    assert layout.parse_name(name.folder, name.shard, name.name) is not None
    assert set(name.name) <= set("0123456789abcdef.p")
    other = layout.session_hash(STORE_SECRET, layout.tenant_hash(STORE_SECRET, text + "y"), "")
    assert other != layout.session_hash(STORE_SECRET, layout.tenant_hash(STORE_SECRET, text), "y")


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
SPAN = st.builds(Span, TEXT, st.integers(0, 99), st.integers(0, 99), st.lists(TEXT, max_size=2).map(tuple))
KEY = st.binary(min_size=32, max_size=32).map(ChunkKey)
RECORDS = st.builds(
    Record,
    tenant=st.just(TENANT),
    session=TEXT,
    branch=st.just(BRANCH),
    ids=st.lists(st.integers(0, 2**32 - 1), max_size=40).map(tuple),
    boundary=st.integers(0, 2**40),
    kv_len=st.integers(0, 2**40),
    decoded=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=4).map(tuple),
    space=st.binary(max_size=8),
    chunk_keys=st.lists(KEY, max_size=4).map(tuple),
    tail_key=st.none() | KEY,
    parent=TEXT,
    fork_at=st.integers(0, 2**40),
    pinned=st.booleans(),
    ttl_s=st.none() | st.integers(1, 2**32 - 1),
    last_use_ns=st.integers(0, 2**63 - 1),
    state_keys=st.lists(KEY, max_size=2).map(tuple),
    spans=st.lists(SPAN, max_size=3).map(tuple),
    kind=st.sampled_from(["session", "meta"]),
    rest=st.dictionaries(TEXT.map(lambda name: f"x-{name}"), st.integers(0, 9) | TEXT, max_size=3).map(rest_bytes),
)


@settings(max_examples=300, deadline=None)
@given(RECORDS)
def test_any_record_survives_the_round_trip_within_its_bound(record: Record) -> None:
    data = encode(record, HOME, 1)
    assert len(data) <= size_bound(record)
    assert decode(data, tenant=TENANT) == record
    assert record.head == (bytes(record.keys[0][:8]) if record.keys else bytes(8))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=2 * RECORD_HEADER_BYTES))
def test_noise_is_refused_without_an_exception(noise: bytes) -> None:
    assert isinstance(decode(noise), Refused)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from("abc"), st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers())))
def test_a_taker_never_raises_and_names_the_first_wrong_field(fields: dict[str, Any]) -> None:
    take = Taker(fields)
    text, number, items = take.text("a"), take.number("b"), take.items("c")
    good = [isinstance(fields.get("a"), str), isinstance(fields.get("b"), int) and fields["b"] >= 0, "c" in fields]
    good[2] = isinstance(fields.get("c"), list)
    assert take.wrong == next((name for name, fine in zip("abc", good, strict=True) if not fine), "")
    assert (text, number, items) == tuple(
        fields[name] if fine else empty for name, fine, empty in zip("abc", good, ("", 0, []), strict=True)
    )


def test_a_record_of_143k_tokens_is_read_in_a_few_milliseconds() -> None:
    """CPU time, one try of five: 7 ms on a busy machine."""
    keys = tuple(ChunkKey(i.to_bytes(32, "little")) for i in range(558))
    data = encode(Record("", "s", BRANCH, tuple(range(143_000)), 142_000, 142_900, chunk_keys=keys), HOME, 0)
    took = []
    for _ in range(5):
        begun = time.thread_time()
        assert isinstance(decode(data), Record)
        took.append(time.thread_time() - begun)
    assert min(took) < 0.1
