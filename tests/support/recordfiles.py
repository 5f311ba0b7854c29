"""Session records put on disk by hand, as the store names and writes them, for tests of what reads them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvalet.store import layout
from kvalet.store.ids import ChunkMeta, Identity
from kvalet.store.record import Record, RecordHome, encode
from kvalet.store.storefiles import parse_store_line
from storekit import IDENTITY

NOW_NS = 1_790_000_000 * 10**9


def record_of(session: str, metas: Sequence[ChunkMeta], *, branch: str = "00000000000000b1", **fields: Any) -> Record:
    """A record that names exactly ``metas``: whole chunks, then perhaps a tail."""
    chunks = [meta for meta in metas if not meta.tail]
    tails = [meta for meta in metas if meta.tail]
    ids = tuple(token for meta in metas for token in meta.ids)
    fields = {"ids": ids, "boundary": len(ids) // 2, "kv_len": len(ids), "tenant": "", "last_use_ns": NOW_NS} | fields
    return Record(
        session=session,
        branch=branch,
        chunk_keys=tuple(meta.key for meta in chunks),
        tail_key=tails[0].key if tails else None,
        **fields,
    )


def put_record(directory: Path, record: Record, identity: Identity = IDENTITY) -> Path:
    """Writes it into a closed store, whole, with the modes of a store. Its path."""
    secret = (directory / layout.SECRET_FILE).read_bytes()
    tenant = layout.tenant_hash(secret, record.tenant)
    session = layout.session_hash(secret, tenant, record.session)
    store_id = parse_store_line("", (directory / layout.STORE_FILE).read_bytes())
    name = layout.record_name(session, record)
    path = directory / name.folder / name.shard / name.name
    path.parent.parent.mkdir(mode=0o700, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_bytes(encode(record, RecordHome(store_id, identity.digest, tenant, session), NOW_NS))
    path.chmod(0o600)
    os.utime(path, ns=(record.last_use_ns, record.last_use_ns))
    return path
