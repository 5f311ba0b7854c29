"""A random walk over the scheduler's whole machine. ``python tests/support/schedsim.py SEED [EVENTS]`` replays one walk.

The seed decides the sizes, the mode, the agents, what happens next and what fails. One walk: agents with growing histories,
forks and parallel turns submit; steps, copies, reads and writes end in random order, some badly; clients cancel, stop reading
and come back, close sessions; the disk loses and damages files; at the end everything must come to rest. In half of the walks
the loop is busy: it decides for several events at once, and hears that a copy is done after steps that ended later.
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # for PYTHONSAFEPATH=1, which a replay may run under

from kvalet.runtime.fake import FakeModel
from kvalet.runtime.plan import GrammarSpec
from kvalet.sched import events as ev
from kvalet.sched.config import SchedConfig
from kvalet.sched.turns import EndReason, TurnId
from schedworld import SECRET, Client, World, config

READ_FAULTS = ("io", "payload", "missing", "deadline", "resources")
WRITE_FAULTS = ("io", "full", "resources", "budget")


@dataclass
class Agent:
    """One line of conversation. ``turn``: the one that runs, if any."""

    session: str
    secret: bytes
    history: tuple[int, ...]
    turn: TurnId | None = None
    turns_left: int = 5
    before: list[tuple[int, ...]] = field(default_factory=list)


def random_config(rng: random.Random) -> tuple[SchedConfig, bool, int]:
    """(sizes, a disk?, its capacity)."""
    disk = rng.random() < 0.7
    deterministic = rng.random() < 0.3
    chunk_tokens = rng.choice((4, 8, 16))
    cfg = config(
        chunk_tokens=chunk_tokens,
        n_pages=rng.randint(10, 40),
        context_tokens=rng.choice((60, 120, 400)),
        ram_slots=rng.choice((0, 1, 2, 3, 6, 12)),
        staging_slots=rng.randint(1, 3) if disk else rng.randint(0, 1),
        max_rows=rng.randint(1, 6),
        step_tokens=rng.randint(8, 24),
        idle_step_tokens=rng.randint(8, 48),
        queue_limit=rng.choice((2, 8, 64)),
        max_sessions=rng.choice((4, 64)),
        lag=rng.randint(0, 1),
        deterministic=deterministic,
        deterministic_piece=rng.choice((4, 8, 16)),
        low_watermark=rng.choice((0.0, 0.05, 0.3)),
        high_watermark=rng.choice((0.1, 0.4)),
        checkpoint_idle=rng.random() < 0.3,
        record_wait_s=rng.choice((0.05, 2.0)),
        pin_wait_s=rng.choice((0.2, 10.0)),
    )
    return cfg, disk, rng.choice((1 << 30, 30, 6))


class Walk:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        cfg, disk, capacity = random_config(rng)
        self.trouble = rng.choice((0.0, 0.02, 0.15))
        self.refusing = self.trouble > 0 or rng.random() < 0.5
        """The disk is sometimes full or read-only; where it never is, and is large, no pinned chain may be lost."""
        self.certain = disk and not self.refusing and capacity > 1000
        if self.certain:
            cfg = replace(cfg, pin_wait_s=math.inf)
        cfg = replace(cfg, copies_ahead=(1, 2, 32)[seed % 3])
        self.world = World(cfg, disk=disk, capacity=capacity, model=FakeModel(vocab=rng.choice((5, 97))))
        habits = random.Random(seed + 1_000_000)
        self.world.habits = habits if habits.random() < 0.5 else None
        self.slow = rng.choice((0.2, 1.0, 3.0))
        self.system = self._ids(rng.randint(3, 20))
        self.agents = [self._agent(i) for i in range(rng.randint(1, 9))]
        self.lose_device = rng.random() < 0.05
        self.drain = rng.random() < 0.3

    def _ids(self, n: int) -> tuple[int, ...]:
        return tuple(self.rng.randint(1, 4) if self.rng.random() < 0.5 else self.rng.randint(1, 96) for _ in range(n))

    def _agent(self, number: int) -> Agent:
        rng = self.rng
        session = "" if rng.random() < 0.2 else f"s{number}"
        secret = SECRET if rng.random() < 0.85 else b"o" * 32
        return Agent(session, secret, self.system[: rng.randint(2, len(self.system))] + self._ids(rng.randint(0, 9)))

    def run(self, n_events: int) -> World:
        world = self.world
        while world.n_events < n_events:
            if not self._something():
                break
            if world.lost_device:
                break
        self._come_to_rest()
        return world

    def _something(self) -> bool:
        rng, world = self.rng, self.world
        actions = [
            (8.0, self._step), (4.0 * self.slow, self._copy), (4.0 * self.slow, self._job), (0.8, self._tick),
            (2.0, self._agent_acts), (0.3, self._client_acts), (0.1, self._disk_acts), (0.1, self._session_acts),
            (0.02, self._restart), (1.0 * self.slow, self.world.hear_late),
        ]  # fmt: skip
        for _ in range(60):
            action = rng.choices([a for _, a in actions], [w for w, _ in actions])[0]
            before = world.n_events
            action()
            if world.n_events > before:
                return True
        return any(agent.turns_left for agent in self.agents)

    def _step(self) -> None:
        world = self.world
        if self.lose_device and self.rng.random() < 0.01:
            world.fail_device()
        else:
            world.step()

    def _copy(self) -> None:
        error = "the copy engine stuttered" if self.rng.random() < self.trouble else None
        self.world.copy(self.rng.random() < 0.5, error)

    def _job(self) -> None:
        rng, world = self.rng, self.world
        jobs = world.jobs()
        if not jobs:
            return
        index = rng.randrange(len(jobs))
        reason = ""
        if rng.random() < self.trouble:
            reason = rng.choice(WRITE_FAULTS if jobs[index].kind.startswith("write") else READ_FAULTS)
        world.job("", reason, index)

    def _tick(self) -> None:
        self.world.tick(self.rng.choice((0.0, 0.01, 0.06, 1.0)))

    def _agent_acts(self) -> None:
        rng, world = self.rng, self.world
        agent = rng.choice(self.agents)
        if agent.turn is not None:
            self._see_end(agent)
            if agent.turn is not None:
                return
        if agent.turns_left == 0 and rng.random() < 0.5:
            agent.turns_left = rng.randint(1, 4)
            agent.history = agent.history[: rng.randint(2, 12)]
        params: dict[str, object] = {"max_tokens": rng.choice((1, 3, 8, 30)), "seed": rng.choice((None, 7))}
        if rng.random() < 0.1:
            params["stop"] = (f"{rng.randint(1, 9)} ",)
        if rng.random() < 0.1:
            kinds = ["dead 3"] + (["run 3"] if world.config.lag == 0 else [])
            params["grammar"] = GrammarSpec("fake", rng.choice(kinds))
        prompt = agent.history
        if agent.before and rng.random() < 0.15:
            prompt = rng.choice(agent.before)  # a retry, or an older branch taken up again
        agent.turn = world.submit(prompt, agent.session, secret=agent.secret, **params)
        agent.before = [*agent.before[-3:], prompt]

    def _see_end(self, agent: Agent) -> None:
        """Read how the last turn went and write the next prompt."""
        assert agent.turn is not None
        client: Client = self.world.clients[agent.turn]
        if client.refusal is None and client.ended is None:
            return
        agent.turn = None
        agent.turns_left = max(0, agent.turns_left - 1)
        answer = tuple(client.ids)
        if self.rng.random() < 0.2:
            answer = answer[: self.rng.randint(0, len(answer))]  # the client dropped the reasoning
        agent.history = client.spec.prompt + answer + self._ids(self.rng.randint(1, 9))
        if client.refusal is not None or len(agent.history) > self.world.config.context_tokens:
            agent.history = agent.history[: self.rng.randint(2, 30)]

    def _live(self) -> list[Client]:
        return [c for c in self.world.clients.values() if c.accepted and c.ended is None]

    def _client_acts(self) -> None:
        rng, world = self.rng, self.world
        live = self._live()
        if not live:
            return
        client = rng.choice(live)
        if client.blocked:
            world.unblock(client.spec.turn)
        elif rng.random() < 0.5:
            world.block(client.spec.turn)
        elif rng.random() < 0.5:
            world.cancel(client.spec.turn, rng.choice((EndReason.CANCELLED, EndReason.WRITE_TIMEOUT)))

    def _disk_acts(self) -> None:
        rng, world, store = self.rng, self.world, self.world.store
        if store is None or not self.refusing:
            return
        store.full = rng.random() < 0.3
        store.writable = rng.random() < 0.9
        keys = [k for k in store.entries if not store.pins[k]]
        if keys and self.trouble:
            key = rng.choice(keys)
            world.damaged.add(key)
            rng.choice((store.corrupt, store.tear, store.vanish, store.evict))(key)
        world.pour()

    def _session_acts(self) -> None:
        rng, world = self.rng, self.world
        agent = rng.choice(self.agents)
        if not agent.session:
            return
        if rng.random() < 0.4:
            world.ask_session(agent.session, rng.choice((True, True, False, None)))
        elif rng.random() < 0.5:
            child = f"{agent.session}f{world.n_events}"
            world.feed(ev.ForkSession(world.now, agent.session, child))
            if len(self.agents) < 12:
                self.agents.append(Agent(child, agent.secret, agent.history, None, 3))
        else:
            world.feed(ev.CloseSession(world.now, agent.session))

    def _restart(self) -> None:
        """kill -9 and a new process over the same disk."""
        self.world.kill()
        for agent in self.agents:
            if agent.turn is not None and agent.turn not in self.world.clients:
                agent.turn = None

    def _come_to_rest(self) -> None:
        world = self.world
        if self.drain:
            world.feed(ev.BeginDrain(world.now, world.now + self.rng.choice((0.0, 5.0, 500.0))))
        for client in self._live():
            if client.blocked and not self.drain:
                world.unblock(client.spec.turn)
        world.settle()
        if self.drain:
            assert len(world.drained) == 1, f"Drained came {len(world.drained)} times"
        elif self.certain and not world.lost_device:
            world.check_pinned_sessions()
        world.assert_quiet()


def walk(seed: int, n_events: int) -> World:
    """One whole walk. Raises with the seed in the message."""
    journey = Walk(seed)
    try:
        return journey.run(n_events)
    except Exception as error:
        error.add_note(f"replay with: python tests/support/schedsim.py {seed} {n_events}   ({journey.world.config})")
        raise


if __name__ == "__main__":
    finished = walk(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1000)
    print(finished.n_events, "events", finished.core.statistics())
