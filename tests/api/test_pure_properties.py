"""Properties of the API's pure parts over many inputs: memory plan, narrowed schemas, remembered calls, refusals, tools."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from kvalet.api.call_memory import CallMemory
from kvalet.api.config import EngineConfig
from kvalet.api.errors import RETRY_AFTER_MAX_S, RETRY_AFTER_MIN_S, ApiError, ended_badly, error_body, error_type, retry_after
from kvalet.api.machine import available_memory
from kvalet.api.memory_plan import (
    ARENA_SHARE,
    MAX_ARENA_TOKENS,
    MAX_STAGING_BYTES,
    MIN_STAGING_SLOTS,
    MOST_SHARE,
    POOL_SHARE,
    RAM_SHARE,
    MemoryPlan,
    PlanError,
    plan_memory,
)
from kvalet.api.normalise import PastCall
from kvalet.api.refusals import STATUS, refusal_error
from kvalet.api.schema_bounds import narrowed
from kvalet.api.schema_check import compile_error
from kvalet.api.schemas import ChatBody
from kvalet.api.tools import CHOICES, MAX_TOOLS, allowed_tools, parse_tools
from kvalet.api.validation import validated
from kvalet.runtime.geometry import KVGeometry
from kvalet.sched.errors import Refused
from kvalet.sched.turns import EndReason, Refusal

MIB = 1 << 20
GIB = 1 << 30

# memory plan

geometries = st.builds(
    KVGeometry, n_layers=st.integers(1, 80), n_kv_heads=st.integers(1, 16), head_dim=st.sampled_from([64, 128, 256]),
    kv_dtype=st.sampled_from(["bf16", "fp32"]),
)  # fmt: skip
configs = st.builds(
    EngineConfig,
    pool_tokens=st.sampled_from([0, 16, 17, 1000, 100_000]), ram_bytes=st.sampled_from([-1, 0, 1, 100 * MIB, 8 * GIB]),
    store_dir=st.sampled_from(["", "/x"]), store_bytes=st.sampled_from([0, 1, GIB, 500 * GIB]),
    store_min_free_bytes=st.sampled_from([0, GIB]), store_readers=st.integers(1, 64), store_writers=st.integers(1, 8),
    max_rows=st.integers(1, 64),
)  # fmt: skip


@settings(max_examples=250, deadline=None)
@given(configs, geometries, st.sampled_from([512, 8192, 131_072]), st.integers(20, 42), st.integers(0, 200 * GIB))
def test_a_plan_keeps_every_promise_or_is_refused(
    config: EngineConfig, geometry: KVGeometry, context: int, bits: int, disk: int
) -> None:
    available = 3 * (1 << bits) // 2
    try:
        made = plan_memory(config, geometry, context_tokens=context, available_bytes=available, free_disk_bytes=disk)
    except PlanError:
        return
    arena_bytes = made.arena_tokens * geometry.token_bytes
    assert made.pool_bytes + arena_bytes + made.ram_bytes + made.staging_bytes <= MOST_SHARE * available
    assert made.arena_tokens <= MAX_ARENA_TOKENS
    assert arena_bytes <= ARENA_SHARE * available
    assert (made.pool_tokens, made.n_pages >= 3) == ((made.n_pages - 1) * geometry.page_tokens, True)
    assert made.ram_bytes == made.ram_slots * geometry.slot_bytes
    assert made.staging_bytes <= MAX_STAGING_BYTES
    assert (made.staging_slots >= MIN_STAGING_SLOTS) is bool(made.ram_slots or made.store_bytes)
    _sizes_are_those_asked_for(config, geometry, made, available)
    _everything_unasked_is_told(config, made, context)


def _sizes_are_those_asked_for(config: EngineConfig, geometry: KVGeometry, made: MemoryPlan, available: int) -> None:
    if config.pool_tokens:
        assert 0 <= made.pool_tokens - config.pool_tokens < geometry.page_tokens
    else:
        assert (made.n_pages - 1) * geometry.page_stride_bytes <= POOL_SHARE * available
    if config.ram_bytes >= 0:
        assert 0 <= config.ram_bytes - made.ram_bytes < geometry.slot_bytes
    else:
        assert made.ram_bytes <= min(RAM_SHARE * available, 4 * made.pool_bytes)
    if config.store_dir and config.store_bytes:
        assert made.store_bytes in (0, config.store_bytes)
    if not config.store_dir:
        assert made.store_bytes == 0


def _everything_unasked_is_told(config: EngineConfig, made: MemoryPlan, context: int) -> None:
    """One note per choice, clamp and useless tier."""
    said = "\n".join(made.notes)
    assert any(note.startswith("pool: ") for note in made.notes) is (config.pool_tokens == 0)
    assert ("RAM tier: " in said) is (config.ram_bytes < 0)
    assert ("RAM tier off" in said) is (config.ram_bytes != 0 and made.ram_slots == 0)
    assert ("disk tier off" in said) is (config.store_dir != "" and made.store_bytes == 0)
    assert ("no tier below" in said) is (not made.ram_slots and not made.store_bytes)
    assert ("smaller than the context" in said) is (made.pool_tokens < context)


@settings(max_examples=100, deadline=None)
@given(geometries, st.integers(0, 3), st.integers(1, 40))
def test_what_fits_by_far_is_never_refused(geometry: KVGeometry, tiers: int, rows: int) -> None:
    """Half of what may be taken, asked for in parts."""
    assume(MIN_STAGING_SLOTS * geometry.slot_bytes <= MAX_STAGING_BYTES)
    config = EngineConfig(
        pool_tokens=4096, ram_bytes=(tiers & 1) * 10 * geometry.slot_bytes, store_dir="/x" * (tiers >> 1), max_rows=rows
    )
    asked = 4112 * geometry.page_stride_bytes // geometry.page_tokens + 10 * geometry.slot_bytes + MAX_STAGING_BYTES
    made = plan_memory(config, geometry, context_tokens=2048, available_bytes=3 * asked, free_disk_bytes=900 * GIB)
    assert made.pool_tokens == 4096
    assert made.ram_slots == (tiers & 1) * 10
    assert bool(made.store_bytes) is (tiers > 1)


# narrowed schemas

scalars = st.sampled_from([
    {"type": "string"}, {"type": "string", "maxLength": 2}, {"type": "string", "minLength": 6}, {"type": "integer"},
    {"type": ["string", "null"]}, {"type": "string", "enum": ["a", "bb"]}, {"type": "boolean"}, {"const": "c"},
])  # fmt: skip


def _objects(children: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    properties = st.dictionaries(st.sampled_from("abc"), children, max_size=3)
    extras = st.sampled_from(
        [{}, {"additionalProperties": True}, {"additionalProperties": {"type": "string"}}, {"required": ["a"]}]
    )
    plain = st.builds(lambda props, extra: {"type": "object", "properties": props, **extra}, properties, extras)
    lists = st.builds(
        lambda item, extra: {"type": "array", "items": item, **extra}, children, st.sampled_from([{}, {"minItems": 1}])
    )
    return plain | lists | st.builds(lambda parts: {"anyOf": parts}, st.lists(children, min_size=1, max_size=3))


schemas = st.recursive(scalars, _objects, max_leaves=6).filter(lambda schema: "type" in schema or "anyOf" in schema)
texts = st.sampled_from(["", "a", "bb", "c", "x" * 4, "x" * 6, "x" * 40])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=6,
)


def valid(value: Any, schema: dict[str, Any]) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(schemas, values)
def test_narrowing_never_widens_changes_no_input_and_is_done_once(schema: dict[str, Any], value: Any) -> None:
    before = json.dumps(schema)
    tight = narrowed(schema, 5)
    assert json.dumps(schema) == before
    assert narrowed(tight, 5) == tight
    if valid(value, tight):
        assert valid(value, schema), "a value of the narrowed schema is none of the client's"


@settings(max_examples=200, deadline=None)
@given(scalars, texts)
def test_short_values_stay_allowed(schema: dict[str, Any], value: str) -> None:
    """Narrowing costs long strings only, and never those that the client's own minimum asks for."""
    assume(valid(value, schema))
    assert valid(value, narrowed(schema, 5)) is (len(value) <= max(5, schema.get("minLength", 0)) or "enum" in schema)


def test_branches_that_overlap_are_refused_before_and_after_narrowing() -> None:
    """Closing one of them would make a value fit exactly one branch that fits two of the client's: the one way to widen."""
    first, second = ({"type": "object", "properties": {name: {"type": "integer"}}} for name in "ab")
    either = {"oneOf": [first, second]}
    assert not valid({"a": 1}, either)
    assert valid({"a": 1}, narrowed(either, 300)), "the narrowed schema alone would let it through"
    assert "oneOf" in compile_error(either)
    assert "oneOf" in compile_error(narrowed(either, 300))
    assert compile_error(narrowed({"oneOf": [{"type": "string"}, {"type": "integer"}]}, 300)) == ""


# remembered calls


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["", "t"]), st.sampled_from("abcd"), st.integers(0, 12), st.booleans()), max_size=40),
    st.integers(1, 4), st.integers(1, 30),
)  # fmt: skip
def test_call_memory_equals_a_plain_recency_list(steps: list[tuple[str, str, int, bool]], calls: int, chars: int) -> None:
    memory = CallMemory(calls, chars)
    model: OrderedDict[tuple[str, str], str] = OrderedDict()
    for tenant, call_id, n, ask in steps:
        if ask:
            known = model.get((tenant, call_id))
            same = known if known is not None else '"x"'
            assert memory.original(tenant, PastCall(call_id, "f", same)) == same
            if known is not None:
                model.move_to_end((tenant, call_id))
        else:
            model.pop((tenant, call_id), None)
            model[tenant, call_id] = json.dumps("x" * n)
            memory.remember(tenant, call_id, model[tenant, call_id])
            while len(model) > calls or sum(map(len, model.values())) > chars:
                model.popitem(last=False)
        assert memory.statistics() == {"calls": len(model), "chars": sum(map(len, model.values()))}
    for (tenant, call_id), text in model.items():
        spaced = f" {text}\n"
        assert memory.original(tenant, PastCall(call_id, "f", spaced)) == text


# refusals and errors


@pytest.mark.parametrize("refusal", Refusal)
def test_every_refusal_has_a_status_and_only_passing_ones_ask_to_come_back(refusal: Refusal) -> None:
    status, code, seconds = STATUS[refusal]
    assert status in (400, 429, 503)
    assert (seconds > 0) is (status != 400)
    error = refusal_error(Refused(refusal, "because"), 900, 800, "messages")
    assert (error.status, error.code, error.retry_after_s) == (status, code, seconds)
    assert "because" in error.message
    if refusal is Refusal.NEVER_FITS:
        assert error.param == "messages"
        assert re.match(r"This model's maximum context length is 800 tokens\. However, you requested 900 tokens", error.message)
    else:
        assert refusal_error(Refused(refusal, "x", 7.5), 1, 1, "prompt").retry_after_s == 7.5


@pytest.mark.parametrize("reason", [reason for reason in EndReason if reason not in (EndReason.STOP, EndReason.LENGTH)])
def test_every_bad_end_is_an_error_object(reason: EndReason) -> None:
    error = ended_badly(reason)
    body = error_body(error)["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"].endswith(".")
    assert (error.retry_after_s > 0) is (error.status == 503)
    assert ended_badly(reason, "own words").message == "own words"
    assert (body["type"] == "server_error") is (error.status >= 500)


@settings(max_examples=100, deadline=None)
@given(st.floats(-10, 1e6))
def test_retry_after_is_whole_seconds_within_its_bounds_and_never_early(seconds: float) -> None:
    said = int(retry_after(seconds))
    assert RETRY_AFTER_MIN_S <= said <= RETRY_AFTER_MAX_S
    assert said >= min(seconds, RETRY_AFTER_MAX_S)


def test_types_of_errors_by_status() -> None:
    assert [error_type(s) for s in (400, 401, 404, 408, 429, 413, 500, 503)] == [
        "invalid_request_error", "authentication_error", "not_found_error", "timeout_error", "rate_limit_error",
        "invalid_request_error", "server_error", "server_error",
    ]  # fmt: skip


@pytest.mark.parametrize("field", ["model", "messages"])
@pytest.mark.parametrize("bad", [None, 5, {"x": 1}, True, 1.5])
def test_the_first_bad_field_is_named_in_jsons_words(field: str, bad: Any) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], field: bad}
    with pytest.raises(ApiError) as told:
        validated(ChatBody, body)
    assert (told.value.status, told.value.param, told.value.code) == (400, field, "invalid_value")
    assert re.fullmatch(rf"'{field}' must be a (string|list)\.", told.value.message)
    del body[field]
    with pytest.raises(ApiError, match=f"'{field}' is required") as missing:
        validated(ChatBody, body)
    assert missing.value.code == "missing_required_parameter"


# tools


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "c.d", "e/f"]), unique=True, max_size=4),
    st.sampled_from(CHOICES),
    st.sampled_from(["a", "z"]),
)
def test_allowed_tools_are_some_of_the_clients_in_its_order(names: list[str], choice: str, name: str) -> None:
    tools = parse_tools([{"type": "function", "function": {"name": one}} for one in names])
    assert [tool.name for tool in tools] == names
    if (choice == "required" and not names) or (choice == "named" and name not in names):
        with pytest.raises(ApiError) as told:
            allowed_tools(tools, choice, name)
        assert (told.value.param or "").startswith("tool_choice")
        return
    allowed = allowed_tools(tools, choice, name)
    expected = {"none": [], "named": [name]}.get(choice, names)
    assert [tool.name for tool in allowed] == expected


def test_the_number_of_tools_is_bounded_and_others_count_too() -> None:
    many = [{"type": "web_search"}] * MAX_TOOLS
    assert parse_tools(many) == ()
    with pytest.raises(ApiError, match=f"at most {MAX_TOOLS}"):
        parse_tools([*many, {"type": "web_search"}])
    assert len(parse_tools([{"function": {"name": "n" * 128, "parameters": None}}])) == 1
    for bad in ("", "n" * 129, "a b", "a\n", "é", 5, None):
        with pytest.raises(ApiError) as told:
            parse_tools([{"type": "web_search"}, {"function": {"name": bad}}])
        assert told.value.param == "tools[1].function.name"


# the machine


def test_a_machine_that_tells_nothing_gives_half_of_its_memory(tmp_path: Path) -> None:
    found = available_memory(tmp_path)
    assert found.limited_by == "machine"
    assert found.available_bytes > 0
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/../../a\n")
    (tmp_path / "sys/fs/cgroup/a").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/a/memory.max").write_text("5000\n")
    assert available_memory(tmp_path) == found, "a limit without a figure of use is no limit"
    (tmp_path / "sys/fs/cgroup/a/memory.current").write_text("1000\n")
    limited = available_memory(tmp_path)
    assert (limited.available_bytes, limited.limited_by) == (4000, "/sys/fs/cgroup/a"), "steps up are not followed"
