"""Session hints: order, bounds, and keys."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from kvalet.api.auth import key_name, presented_key, tenant_of
from kvalet.api.errors import ApiError
from kvalet.api.identify import BODY_ORDER, HEADER_ORDER, MAX_SESSION_CHARS, session_hint

CLAUDE_USER = '{"device_id":"d","session_id":"from-user"}'


@pytest.mark.parametrize(("first", "second"), list(itertools.pairwise(HEADER_ORDER)))
def test_headers_in_their_order(first: str, second: str) -> None:
    assert session_hint({second: "b", first: "a"}, {"prompt_cache_key": "c"}) == "a"
    assert session_hint({second: "b"}, {"prompt_cache_key": "c"}) == "b"


@pytest.mark.parametrize(("first", "second"), list(itertools.pairwise(BODY_ORDER)))
def test_body_fields_in_their_order(first: str, second: str) -> None:
    assert session_hint({}, {second: "b", first: "a"}) == "a"


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        ({}, ""),
        ({"conversation": {"id": "conv"}}, "conv"),
        ({"metadata": {"session_id": "m", "user_id": CLAUDE_USER}}, "m"),
        ({"metadata": {"user_id": CLAUDE_USER}}, "from-user"),
        ({"metadata": {"user_id": "plain"}}, ""),
        ({"metadata": {"user_id": "{broken"}}, ""),
        ({"metadata": {"user_id": "[" * 3000}}, ""),
        ({"metadata": {"user_id": "{" + " " * 5000 + "}"}}, ""),
        ({"metadata": {"user_id": "[1]"}}, ""),
        ({"metadata": []}, ""),
        ({"prompt_cache_key": 5, "metadata": {"session_id": "m"}}, "m"),
    ],
)
def test_bodies(body: dict[str, Any], hint: str) -> None:
    assert session_hint({}, body) == hint


def test_a_sub_agent_is_a_session_of_its_own() -> None:
    main = {"x-claude-code-session-id": "s"}
    assert session_hint(main, {}) == "s"
    assert session_hint({**main, "x-claude-code-agent-id": "a"}, {}) == "s/a"
    assert session_hint({**main, "x-claude-code-agent-id": "a" * 256}, {}) == "s"


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "a\x00", "x" * (MAX_SESSION_CHARS + 1)])
def test_what_is_no_name_is_passed_over(name: str) -> None:
    assert session_hint({"x-session-id": name, "session-id": "next"}, {}) == "next"


def test_the_longest_name() -> None:
    assert session_hint({"x-session-id": "x" * MAX_SESSION_CHARS}, {}) == "x" * MAX_SESSION_CHARS


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"authorization": "Bearer k"}, "k"),
        ({"authorization": "bearer  k "}, "k"),
        ({"authorization": "Basic k", "x-api-key": "x"}, "x"),
        ({"x-api-key": " x "}, "x"),
        ({"authorization": "Bearer ", "x-api-key": "x"}, "x"),
        ({}, ""),
    ],
)
def test_where_keys_come_from(headers: dict[str, str], key: str) -> None:
    assert presented_key(headers) == key


def test_tenants() -> None:
    keys = (("a", "ka"), ("b", "kb"))
    assert tenant_of({}, ()) == ""
    assert tenant_of({"x-api-key": "kb"}, keys) == "b"
    for headers in ({}, {"x-api-key": "k"}, {"x-api-key": ""}, {"x-api-key": "ké"}):
        with pytest.raises(ApiError) as error:
            tenant_of(headers, keys)
        assert error.value.status == 401


def test_a_key_s_name_says_nothing_about_it() -> None:
    assert key_name("secret") == key_name("secret") != key_name("secret2")
    assert "secret" not in key_name("secret")
