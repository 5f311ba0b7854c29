"""Errors of the store. Jobs never raise: their outcome carries a reason. These are raised by ``DiskStore.open`` only."""

from __future__ import annotations


class StoreError(Exception):
    """Base. The message is one sentence a person can act on."""


class StoreRefused(StoreError):
    """The directory cannot be used as a store; nothing in it was changed."""


class StoreLocked(StoreRefused):
    """Another process (or another opener in this one) holds the store."""


class StoreNewer(StoreRefused):
    """A later version of kvalet made the store."""
