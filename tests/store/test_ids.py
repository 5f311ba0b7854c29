"""Names of stored bytes: everything that decides what bytes mean changes the name, and nothing else does."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvalet.store.ids import Identity, chunk_key, ids_le, tenant_secret

token_ids = st.lists(st.integers(0, (1 << 32) - 1), max_size=12)
mappings = st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=4)
secrets = st.binary(min_size=32, max_size=32)


@settings(max_examples=150, deadline=None)
@given(mappings, mappings)
def test_identities_are_equal_exactly_when_their_fields_are(one: dict[str, str], other: dict[str, str]) -> None:
    first, second = Identity.of(one), Identity.of(other)
    assert (first.digest == second.digest) is (one == other)
    assert dict(first.fields) == one
    assert Identity.of(dict(reversed(one.items()))) == first
    assert len(first.digest) == 32


def test_names_and_values_do_not_run_into_each_other() -> None:
    digests = [
        Identity.of(fields).digest for fields in ({"ab": "c"}, {"a": "bc"}, {"abc": ""}, {"": "abc"}, {"a": "", "b": "c"}, {})
    ]
    assert len(set(digests)) == len(digests)


@settings(max_examples=100, deadline=None)
@given(token_ids)
def test_ids_are_little_endian_words_on_every_platform(ids: list[int]) -> None:
    assert ids_le(ids) == struct.pack(f"<{len(ids)}I", *ids)


@pytest.mark.parametrize("bad", [-1, 1 << 32])
def test_ids_that_do_not_fit_are_refused_not_cut(bad: int) -> None:
    with pytest.raises(OverflowError):
        ids_le([1, bad])


@settings(max_examples=100, deadline=None)
@given(secrets, secrets, token_ids, st.integers(0, 100), st.binary(max_size=4))
def test_a_key_depends_on_every_part(secret: bytes, parent: bytes, ids: list[int], more: int, extras: bytes) -> None:
    key = chunk_key(secret, parent, ids, extras)
    assert key == chunk_key(bytes(secret), bytes(parent), tuple(ids), extras)
    flipped = bytes([secret[0] ^ 1]) + secret[1:]
    others = [
        chunk_key(flipped, parent, ids, extras),
        chunk_key(secret, parent[:-1] + bytes([parent[-1] ^ 0x80]), ids, extras),
        chunk_key(secret, parent, [*ids, more], extras),
        chunk_key(secret, key, ids, extras),
        chunk_key(secret, parent, ids, extras + b"x"),
    ]
    assert len({key, *others}) == 6
    assert all(len(one) == 32 for one in others)


@settings(max_examples=100, deadline=None)
@given(secrets, st.text(max_size=4), st.text(max_size=4), st.text(max_size=4))
def test_tenants_and_salts_split_and_never_meet(store: bytes, tenant: str, other: str, salt: str) -> None:
    own = tenant_secret(store, tenant)
    assert len(own) == 32
    assert (tenant_secret(store, other) == own) is (tenant == other)
    assert tenant_secret(store, tenant, "") == own
    salted = tenant_secret(store, tenant, salt)
    assert (salted == own) is (salt == "")
    assert (tenant_secret(store, other, salt) == salted) is (tenant == other)
    assert tenant_secret(store + b"x", tenant, salt) != salted
    assert (tenant_secret(store, tenant, other) == salted) is (salt == other)
    if salt:
        assert tenant_secret(store, tenant + salt) != salted, "a salt is not a longer tenant name"
