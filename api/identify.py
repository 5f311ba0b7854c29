"""Which conversation a request belongs to, as far as its client says so. A hint for placement, never a cache key.

Agents name their conversation in many ways; the order below takes the most deliberate one first. Two branches of one
conversation may carry the same name, and two requests of it may be in flight: neither is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

MAX_SESSION_CHARS = 256
HEADER_ORDER = (
    "x-session-id",
    "x-session-affinity",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "thread-id",
    "x-dynamo-session-id",
    "x-opencode-session-id",
    "x-opencode-session",
)
AGENT_HEADER = "x-claude-code-agent-id"
"""Appended to the Claude Code session: a sub-agent is a conversation of its own."""
BODY_ORDER = ("prompt_cache_key", "conversation", "previous_response_id")
MAX_USER_ID_CHARS = 4096
"""``metadata.user_id`` that is longer is not looked into."""


def session_hint(headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
    """The first name found, "" if there is none. ``headers`` has lower-case names.

    At most 256 characters, printable ones only: what is longer or holds others is no name and the next source is asked.
    """
    for name in HEADER_ORDER:
        hint = usable(headers.get(name))
        if hint and name == "x-claude-code-session-id" and usable(headers.get(AGENT_HEADER)):
            return usable(f"{hint}/{headers[AGENT_HEADER]}") or hint
        if hint:
            return hint
    for name in BODY_ORDER:
        hint = usable(_identity(body.get(name)))
        if hint:
            return hint
    metadata = body.get("metadata")
    return _from_metadata(metadata) if isinstance(metadata, Mapping) else ""


def usable(value: Any) -> str:
    """``value`` if it can name a session, else ""."""
    if not isinstance(value, str):
        return ""
    name = value.strip()
    return name if len(name) <= MAX_SESSION_CHARS and name.isprintable() else ""


def _identity(value: Any) -> Any:
    """``conversation`` may be an id or an object with one."""
    return value.get("id") if isinstance(value, Mapping) else value


def _from_metadata(metadata: Mapping[str, Any]) -> str:
    hint = usable(metadata.get("session_id"))
    if hint:
        return hint
    user = metadata.get("user_id")
    if not isinstance(user, str) or len(user) > MAX_USER_ID_CHARS or not user.lstrip().startswith("{"):
        return ""
    try:
        inner = orjson.loads(user)
    except orjson.JSONDecodeError:
        return ""
    return usable(inner.get("session_id")) if isinstance(inner, dict) else ""
