"""API keys: who is asking. No keys configured = everybody is the tenant ""."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from kvalet.api.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready"})
"""For probes: they hold no secret and no work."""


def key_name(key: str) -> str:
    """Tenant name of a key that was configured without one: stable over restarts, says nothing about the key."""
    return "key-" + hashlib.sha256(key.encode()).hexdigest()[:16]


def presented_key(headers: Mapping[str, str]) -> str:
    """From ``Authorization: Bearer`` or ``x-api-key``; "" if neither is there."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        return credentials.strip()
    return headers.get("x-api-key", "").strip()


def tenant_of(headers: Mapping[str, str], keys: Sequence[tuple[str, str]]) -> str:
    """Name of the tenant whose key was presented. All keys are compared, each in constant time. ApiError 401."""
    if not keys:
        return ""
    shown = presented_key(headers).encode()
    tenant: str | None = None
    for name, key in keys:
        if hmac.compare_digest(shown, key.encode()):
            tenant = name
    if tenant is None:
        what = "The API key is not known here." if shown else "An API key is needed: send 'Authorization: Bearer KEY'."
        raise ApiError(what, status=401, code="invalid_api_key")
    return tenant
