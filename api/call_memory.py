"""The arguments of recent tool calls exactly as the model wrote them, by call id.

Clients parse arguments and write them again with their own spacing and escapes; the stored KV is of the model's own text. A
call that comes back by its id with equal JSON gets that text again, so that the history matches token for token.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from kvalet.api.json_text import NOT_JSON, parse_json, respaced, same_value
from kvalet.api.normalise import PastCall

MAX_CALLS = 50_000
MAX_CHARS = 16_000_000


class CallMemory:
    """Bounded: over ``max_calls`` or ``max_chars`` the least recently used are forgotten, which costs at most the re-use of
    KV after such a call. Call ids are unguessable and kept per tenant. Thread-safe (rendering runs on worker threads)."""

    def __init__(self, max_calls: int = MAX_CALLS, max_chars: int = MAX_CHARS) -> None:
        self._max_calls = max_calls
        self._max_chars = max_chars
        self._calls: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._chars = 0
        self._lock = threading.Lock()

    def remember(self, tenant: str, call_id: str, arguments: str) -> None:
        with self._lock:
            self._chars += len(arguments) - len(self._calls.pop((tenant, call_id), ""))
            self._calls[tenant, call_id] = arguments
            while len(self._calls) > self._max_calls or self._chars > self._max_chars:
                self._chars -= len(self._calls.popitem(last=False)[1])

    def original(self, tenant: str, call: PastCall) -> str:
        """The model's text if the id is known and the JSON is equal; else the client's text in the model's spacing."""
        with self._lock:
            known = self._calls.get((tenant, call.id))
            if known is not None:
                self._calls.move_to_end((tenant, call.id))
        if known is not None and _equal(known, call.arguments):
            return known
        return respaced(call.arguments)

    def statistics(self) -> dict[str, int]:
        with self._lock:
            return {"calls": len(self._calls), "chars": self._chars}


def _equal(one: str, other: str) -> bool:
    if one == other:
        return True
    value = parse_json(one)
    return value is not NOT_JSON and same_value(value, parse_json(other))
