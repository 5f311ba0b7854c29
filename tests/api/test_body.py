"""Bodies from the wire: limits, slowness, leaving, and JSON that is none."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvalet.api.body import (
    INLINE_BYTES,
    BodyBudget,
    ClientGone,
    check_headers,
    deeper_than,
    off_loop,
    parse_object,
    read_body,
)
from kvalet.api.errors import ApiError
from kvalet.api.json_text import nesting
from starlette.types import Message

pytestmark = pytest.mark.anyio

JSON = {"content-type": "application/json"}


def free(n_bytes: int) -> None:
    """A budget without a bound."""


class Client:
    """An ASGI ``receive`` that gives pieces and then, if ``leaves``, a disconnect; else nothing more."""

    def __init__(self, pieces: Sequence[bytes], *, leaves: bool = False, finished: bool = True) -> None:
        more = [True] * (len(pieces) - 1) + [not finished]
        self.messages: list[Message] = [
            {"type": "http.request", "body": piece, "more_body": m} for piece, m in zip(pieces, more, strict=True)
        ]
        if leaves:
            self.messages.append({"type": "http.disconnect"})
        self.taken = 0

    async def receive(self) -> Message:
        if self.taken == len(self.messages):
            await asyncio.Event().wait()
        self.taken += 1
        return self.messages[self.taken - 1]


async def test_pieces_are_joined() -> None:
    assert await read_body(Client([b"ab", b"", b"c"]).receive, JSON, 3, 1.0, free) == b"abc"


@pytest.mark.parametrize("declared", [{}, {"content-length": "10"}, {"content-length": "nonsense"}])
async def test_the_limit_holds_whatever_was_declared(declared: dict[str, str]) -> None:
    client = Client([b"x" * 60, b"x" * 60, b"x" * 60])
    with pytest.raises(ApiError) as error:
        await read_body(client.receive, {**JSON, **declared}, 100, 1.0, free)
    assert error.value.status == 413
    assert client.taken == 2  # nothing beyond the limit was asked for


async def test_a_declared_length_over_the_limit_is_refused_unread() -> None:
    client = Client([b"x"])
    with pytest.raises(ApiError) as error:
        await read_body(client.receive, {**JSON, "content-length": "101"}, 100, 1.0, free)
    assert (error.value.status, client.taken) == (413, 0)


async def test_a_body_that_stalls() -> None:
    with pytest.raises(ApiError) as error:
        await read_body(Client([b"{"], finished=False).receive, JSON, 100, 0.02, free)
    assert error.value.status == 408


async def test_a_client_that_leaves() -> None:
    with pytest.raises(ClientGone):
        await read_body(Client([b"{"], finished=False, leaves=True).receive, JSON, 100, 1.0, free)


async def test_all_bodies_together_are_bounded() -> None:
    budget = BodyBudget(100)
    with budget.holding() as first:
        assert await read_body(Client([b"x" * 60]).receive, JSON, 100, 1.0, first) == b"x" * 60
        with pytest.raises(ApiError) as error, budget.holding() as second:
            await read_body(Client([b"x" * 30, b"x" * 30]).receive, JSON, 100, 1.0, second)
        assert (error.value.status, error.value.code) == (429, "bodies_full")
        assert budget.held_bytes == 60
    assert budget.held_bytes == 0
    with budget.holding() as third:
        third(100)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/json-seq"}, 415),
        ({**JSON, "content-encoding": "gzip"}, 415),
        ({**JSON, "content-encoding": "br, gzip"}, 415),
        ({**JSON, "content-length": "101"}, 413),
    ],
)
def test_headers_that_are_refused(headers: dict[str, str], status: int) -> None:
    with pytest.raises(ApiError) as error:
        check_headers(headers, 100)
    assert error.value.status == status


@pytest.mark.parametrize(
    "headers", [JSON, {"content-type": "application/json;charset=UTF-8"}, {**JSON, "content-encoding": ""}]
)
def test_headers_that_are_taken(headers: dict[str, str]) -> None:
    check_headers(headers, 100)


@pytest.mark.parametrize("data", [b'{"a": 1}', b' {"a":1}\n', b'\xef\xbb\xbf{"a":1}', b'{"a":2,"a":1}'])
def test_objects(data: bytes) -> None:
    assert parse_object(data, 10) == {"a": 1}


@pytest.mark.parametrize(
    "data", [b"", b" \n", b"\xef\xbb\xbf", b"[]", b"1", b'"x"', b"null", b"{", b"{'a':1}", b"\xff\xfe{\x00}\x00"]
)
def test_what_is_no_object(data: bytes) -> None:
    with pytest.raises(ApiError) as error:
        parse_object(data, 10)
    assert (error.value.status, error.value.code) == (400, "invalid_json")


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("depth", [9, 10, 11, 200, 254, 255, 1024, 1025, 100_000])
def test_nesting(opening: str, depth: int) -> None:
    """The limit counts the body's own level. Beyond the parser's own limit the words are the same."""
    inner = depth - 1
    closing = "]" if opening == "[" else "}"
    data = ('{"x":' + opening * inner + "1" * (opening != "[") + closing * inner + "}").encode()
    if depth <= 10:
        assert parse_object(data, 10)
        return
    with pytest.raises(ApiError) as error:
        parse_object(data, 10)
    assert error.value.code == "nesting_too_deep"


NESTED = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=30,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(value=NESTED)
def test_depth_equals_its_plain_twin(value: Any) -> None:
    depth = plain_depth(value)
    assert nesting(value) == depth
    for limit in range(max(0, depth - 2), depth + 2):
        assert deeper_than(value, limit) == (depth > limit)


def plain_depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(plain_depth, value), default=0) if isinstance(value, list) else 0


async def test_large_work_leaves_the_loop() -> None:
    def thread_of(data: bytes) -> str:
        return threading.current_thread().name

    here = threading.current_thread().name
    assert await off_loop(b"x" * INLINE_BYTES, thread_of) == here
    assert await off_loop(b"x" * (INLINE_BYTES + 1), thread_of) != here


async def test_errors_come_back_from_the_thread() -> None:
    with pytest.raises(ApiError):
        await off_loop(json.dumps(["x" * INLINE_BYTES]).encode(), lambda data: parse_object(data, 10))
