"""What `kvalet store` prints, for people and for programs: the words and the names of fields, which others build upon."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from damagekit import flip
from recordfiles import put_record, record_of
from storekit import Rig
from storetool import tool

TIME = 1_764_590_000
STAMP = "2025-12-01 11:53:20"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A session with a tail, another tenant's chunks of which the last is damaged, a leftover and a stranger."""
    with Rig(tmp_path / "s") as rig:
        metas, other = rig.chain(2, tail=5), rig.chain(3, seed=1, ns="bob")
        rig.write([*metas, *other])
        flip(rig.path(other[2]), 300)
        flip(rig.path(other[0]), 5000)
    put_record(tmp_path / "s", record_of("plan", metas, pinned=True))
    for path in (tmp_path / "s").rglob("*"):
        os.utime(path, (TIME, TIME))
    (tmp_path / "s" / "tmp" / "12.3.0123456789abcdef").write_bytes(b"x")
    (tmp_path / "s" / "c" / "notes.txt").write_bytes(b"")
    return tmp_path / "s"


def plain(text: str) -> list[str]:
    """Lines with everything that differs from run to run replaced."""
    text = re.sub(r"[0-9a-f]{64}", "KEY", text)
    text = re.sub(r"[0-9.]+ [kMGT]?B free", "SPACE free", text)
    text = re.sub(r"c/[0-9a-f]{2}/", "c/XX/", text)
    return [" ".join(line.split()) for line in re.sub(r"\b[0-9a-f]{8}\b", "TAG", text).splitlines()]


def test_ls_for_people(store: Path) -> None:
    assert plain(tool("ls", store).out) == [
        "bytes files kind tenant oldest use newest use",
        f"36.9 kB 3 chunks TAG {STAMP} {STAMP}",
        f"24.6 kB 2 chunks TAG (default) {STAMP} {STAMP}",
        f"8.2 kB 1 tails TAG (default) {STAMP} {STAMP}",
        f"4.1 kB 1 records - {STAMP} {STAMP}",
        "",
        "7 files, 73.7 kB in all; SPACE free on this disk",
        "in tmp/: 1 file, 4.1 kB",
        "the cap is a setting of the server (--store-bytes) and stands in no file",
        "findings: 1 (`kvalet store check` names them)",
        "",
        "tokens chunks on disk last use tenant branch session",
        f"69 2 of 2, tail {STAMP} pinned TAG 00000000000000b1 plan",
    ]


def test_check_for_people(store: Path) -> None:
    counted = [
        "chunks: 5 files, 61.4 kB",
        "records: 1 file, 4.1 kB",
        "tails: 1 file, 8.2 kB",
    ]
    assert plain(tool("check", store).out) == [
        "c/XX/KEY.2.TAG: header (header_digest)",
        "c/notes.txt: foreign (name)",
        "7 of 7 files, 73.7 kB: headers read",
        *counted,
        "left in tmp/: 1 file, 4.1 kB",
        "not good: 1 foreign, 1 header",
    ]
    lines = plain(tool("check", store, "--read-data").out)
    assert sorted(lines[:3]) == [
        "c/XX/KEY.0.TAG: payload (payload_digest)",
        "c/XX/KEY.2.TAG: header (header_digest)",
        "c/notes.txt: foreign (name)",
    ]
    assert lines[3:] == [
        "7 of 7 files, 73.7 kB: headers and payloads read",
        *counted,
        "1 of them cannot be reached before a refused chunk is written again",
        "left in tmp/: 1 file, 4.1 kB",
        "not good: 1 foreign, 1 header, 1 payload",
    ]
    assert "headers read, part 2 of 3" in tool("check", store, "--subset", "2/3").out


def test_gc_and_rm_for_people(store: Path) -> None:
    assert plain(tool("gc", store, "--dry-run", "--cap", "0").out) == [
        "left in tmp/ by a killed process: 1 file, 4.1 kB",
        "refused: 1 file, 12.3 kB",
        "over the cap: 2 files, 24.6 kB",
        "would delete 4 files, 41.0 kB",
    ]
    assert plain(tool("gc", store).out)[-1] == "deleted 2 files, 16.4 kB"
    assert plain(tool("rm", store, "plan").out) == ["of the session: 4 files, 36.9 kB", "deleted 4 files, 36.9 kB"]
    assert plain(tool("rm", store, "plan", "--tenant", "a\nb").out) == ["there is no session plan of tenant a\\nb"]


LS = "bytes cap_bytes files findings free_bytes server_pid sessions set_aside store store_id sums temporary unread_records"
GC = "bytes causes dry_run failed files free_bytes kept store"
NOBODY = "found other_tenants session store"
FIELDS = {
    ("ls",): LS,
    ("ls", "--files"): f"{LS} list",
    ("check",): "behind_bad bytes checked files findings findings_not_listed good identities leftovers orphans read_bytes "
    "read_data reasons server_pid set_aside store subset sums vanished",
    ("gc", "--dry-run"): GC,
    ("rm", "plan", "--dry-run"): f"{GC} followed found records session shared unread_records",
    ("rm", "nobody"): NOBODY,
    ("export", "nobody", "-o", "never.tar"): NOBODY,
}


@pytest.mark.parametrize("words", FIELDS, ids=" ".join)
def test_fields_for_programs(store: Path, words: tuple[str, ...]) -> None:
    ran = tool(words[0], store, *words[1:], "--json")
    assert set(ran.data) == set(FIELDS[words].split())
    assert ran.out.count("\n") == 1
    assert ran.out.isascii()


def test_fields_of_sessions_and_sums(store: Path) -> None:
    data = tool("ls", store, "--json").data
    session, total = data["sessions"][0], data["sums"][0]
    names = (
        "branch chunks chunks_on_disk default_tenant last_use pinned session stored_tokens tail_on_disk tenant_tag tokens ttl_s"
    )
    assert set(session) == set(names.split())
    assert set(total) == {"bytes", "default_tenant", "files", "kind", "newest_use", "oldest_use", "tenant_tag"}
    assert session["last_use"] == total["oldest_use"] == TIME
    exported = tool("export", store, "plan", "-o", str(store.parent / "a.tar"), "--json").data
    assert set(exported) == {"bytes", "members", "missing", "output", "store"}
