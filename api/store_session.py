"""``kvalet store rm``, and how ``rm`` and ``export`` find a session by its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvalet.api.store_answer import FOUND, Answer, parsed, parser_of, show, shown
from kvalet.api.store_change import carry_out, removal_answer
from kvalet.api.store_progress import progress
from kvalet.store import layout
from kvalet.store.inspect_check import CheckPlan, examine_all
from kvalet.store.inspect_file import Everything, Reader, Verdict
from kvalet.store.inspect_open import Place, open_to_change, open_to_look
from kvalet.store.inspect_records import Known, Stored, all_records, each_record, session_of
from kvalet.store.inspect_session import plan_removal
from kvalet.store.inspect_walk import Found, Listing, list_store

RM = """Delete a session: its records, and those chunks and tails that only they name or that only go on where they end.
What another record names stays, and so does what something that stays goes on from (a system prompt that other
conversations begin with too, for example). Pinned or not. Refused while a server has the store open, except with
--dry-run, which deletes nothing."""


@dataclass(frozen=True, slots=True)
class Session:
    """``files``: its record files; ``own``: those that can be read; ``refused``: the others; ``elsewhere``: how many other
    tenants have a session of this name; ``others``: all other records."""

    tenant: str
    name: str
    files: Sequence[Found]
    own: Sequence[Stored]
    refused: Sequence[Verdict]
    others: Sequence[Known]

    @property
    def elsewhere(self) -> int:
        return len({one.tenant for one in self.others if one.session == self.name})


def find_session(place: Place, listing: Listing, tenant: str, name: str) -> Session:
    """StoreRefused without SECRET: no name can be found then."""
    session = session_of(place, tenant, name)
    files = [found for found in listing.files if found.file.folder == layout.RECORDS and found.file.session == session]
    own: list[Stored] = []
    refused: list[Verdict] = []
    for one in each_record(place, files):
        if isinstance(one, Verdict):
            refused.append(one)
        else:
            own.append(replace(one, record=replace(one.record, tenant=tenant)))
    others = all_records(place, (found for found in listing.files if found.file.session != session))
    return Session(tenant, name, files, own, refused, others)


def no_session(place: Place, session: Session) -> Answer:
    whose = f"tenant {shown(session.tenant)}" if session.tenant else "the default tenant"
    text = f"there is no session {shown(session.name)} of {whose}"
    if session.refused:
        text += f"; {len(session.refused)} of its records cannot be read"
    if session.elsewhere:
        text += f"; other tenants with one of that name: {session.elsewhere} (--tenant NAME)"
    data = {"store": shown(place.path), "session": session.name, "found": False, "other_tenants": session.elsewhere}
    return Answer(FOUND, data, [text])


def rm(arguments: Sequence[str]) -> int:
    parser = parser_of("rm", RM)
    parser.add_argument("session", metavar="SESSION", help="its name, as in X-Session-ID")
    parser.add_argument("--tenant", metavar="NAME", default="", help="whose session; none = of a server without API keys")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    asked = parsed(parser, arguments)
    with (open_to_look if asked.dry_run else open_to_change)(asked.store) as place:
        listing = list_store(place)
        session = find_session(place, listing, asked.tenant, asked.session)
        if not session.files:
            return show(no_session(place, session), as_json=asked.json)
        files = [found for found in listing.files if found.file.folder != layout.RECORDS]
        with progress("reading", len(files)) as tick:
            verdicts = examine_all(place, files, CheckPlan(), tick)
        reader = Reader(place, ids_after=Everything())

        def ids_of(found: Found) -> bytes:
            facts = reader.examine(found, payload=False).facts
            return facts.ids if facts is not None else b""

        plan = plan_removal(session.files, session.own, session.others, verdicts, ids_of)
        removed = carry_out(place, plan.removals, dry_run=asked.dry_run)
        answer = removal_answer(place, removed, dry_run=asked.dry_run)
    stayed = {"shared": plan.shared, "followed": plan.followed, "unread_records": len(session.refused)}
    answer.data.update(stayed, session=asked.session, found=True, records=len(session.files))
    texts = (
        (plan.shared, f"  {plan.shared} files stay because other sessions name them"),
        (plan.followed, f"  {plan.followed} files stay because others go on from them"),
        (len(session.refused), f"  {len(session.refused)} records could not be read: what only they name stays"),
    )
    return show(replace(answer, lines=[*answer.lines, *(text for n, text in texts if n)]), as_json=asked.json)
