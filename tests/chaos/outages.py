"""A training on a control plane whose parts can be taken away, and what must hold then."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from operator import not_
from pathlib import Path

import psutil

from everstep.bus import BusSettings, connect
from everstep.bus.auth.roles import SERVICE
from everstep.bus.facts.spool import _records
from everstep.bus.topology import plans
from everstep_services.cli.errors import CliError
from tests.chaos.test_kills_under_load import acknowledged
from tests.e2e.cluster import Body, Cluster
from tests.e2e.control_planes import ALL, Pieces
from tests.e2e.operators import ask
from tests.e2e.postgres import Postgres
from tests.e2e.processes import SCRIPTS, Process, environment, python
from tests.waiting import until

DATABASE = "database"
PARTS = (DATABASE, *ALL)
"""In the order in which they are brought back: services find what they need."""
BACK_WITHIN_S = 60.0
FURTHER_WITHIN_S = 600.0
"""For some hundred steps at the training's own pace; a busy machine makes them more slowly."""
FORGOTTEN_WITHIN_S = 150.0
"""The server forgets a reader's consumer a minute after its reader was killed."""
_START_WITHIN_S = 300.0
_SAVED_EVERY, _REMEMBERED_EVERY = 60, 20
_AS_PEOPLE_HAVE_IT = {
    "EVERSTEP_BUS__RECONNECT_WAIT_S": "1",
    "EVERSTEP_BUS__RECONNECT_JITTER_S": "1",
}
_BAD = {
    "incident_opened",
    "node_lost",
    "node_suspected",
    "rank_stalled",
    "checkpoint_failed",
    "checkpoint_quarantined",
    "save_refused",
    "restore_failed",
}


class Site:
    """Two nodes that train with gloo and save, and a publisher of facts next to them."""

    def __init__(self, folder: Path, job: str, postgres: Postgres | None) -> None:
        for name in ("pieces", job, "recorder"):
            (folder / name).mkdir()
        where = {} if postgres is None else {"EVERSTEP_HISTORY__DATABASE_URL": postgres.url}
        self.pieces = Pieces(folder / "pieces", **where, **_AS_PEOPLE_HAVE_IT)
        self.cluster = Cluster(folder / job, job, self.pieces)
        self._postgres = postgres
        self._folder = folder
        self._recorder: Process | None = None
        self._lives: dict[str, int] = {}

    # -- its course ------------------------------------------------------------------------------

    def start(self, *, pace_s: float, fact_every_s: float) -> None:
        """Start all of it, and wait until everything has been seen to work."""
        self.pieces.start(_START_WITHIN_S)
        script = (str(SCRIPTS / "saving_model.py"), str(self.cluster.folder))
        for node in ("node-1", "node-2"):
            self.cluster.run(
                *("--nnodes", "2", *script, str(_SAVED_EVERY), str(_REMEMBERED_EVERY)),
                node=node,
                PACE_S=f"{pace_s:g}",
                **_AS_PEOPLE_HAVE_IT,
            )
        self._recorder = Process(
            python(
                str(Path(__file__).with_name("recorder.py")),
                f"nats://127.0.0.1:{self.pieces._port}",
                str(self.pieces.login_file(SERVICE)),
                str(self._folder / "recorder"),
                f"{10 * fact_every_s:g}",
            ),
            environment(self._folder, self.cluster.tag),
            self._folder / "recorder.log",
        )
        self.cluster.until_stepping(1, _START_WITHIN_S)
        self.cluster.until_fact("checkpoint_committed", within_s=_START_WITHIN_S)
        self._lives = self._pids()
        self.until_all_are_back(_START_WITHIN_S)

    def take_away(self, *names: str) -> None:
        """End these parts as a power cut does."""
        for name in names:
            if name == DATABASE:
                assert self._postgres is not None
                self._postgres.kill()
            else:
                self.pieces.kill(name)

    def bring_back(self, *names: str) -> None:
        """Start them again where they were, until they are up themselves."""
        for name in sorted(names, key=PARTS.index):
            if name == DATABASE:
                assert self._postgres is not None
                self._postgres.revive()
            else:
                self.pieces.revive(name)
        until(
            lambda: [name for name in self._cut_off() if name in names],
            "what was away has started",
            holds=not_,
            within_s=_START_WITHIN_S,
        )
        self._lives |= {name: pid for name, pid in self._pids().items() if name in names}

    def trains_for(self, for_s: float) -> None:
        """This time passes, and meanwhile the training goes on."""
        began, before = time.monotonic(), self.step()
        moved_at, longest_s, seen = began, 0.0, before
        while (now := time.monotonic()) < began + for_s:
            step = self.step()
            if step > seen:
                longest_s, moved_at, seen = max(longest_s, now - moved_at), now, step
            ended = {one.node: one.said for one in self.cluster.agents if one.poll() is not None}
            assert not ended, "an agent has ended"
            time.sleep(min(1.0, for_s))
        made, took_s = self.step() - before, time.monotonic() - began
        longest_s = max(longest_s, time.monotonic() - moved_at)
        print(f"{made} steps in {took_s:.1f} s, {longest_s:.1f} s at most without a new one")
        assert made > 0

    def further(self, steps: int) -> None:
        """The training makes this number of further steps."""
        goal = self.step() + steps
        until(self.step, f"step {goal}", holds=lambda step: step >= goal, within_s=FURTHER_WITHIN_S)

    def until_all_are_back(self, within_s: float = BACK_WITHIN_S) -> None:
        """Each client of the bus has a connection, and its messages arrive."""
        until(self._cut_off, "all are connected", holds=not_, within_s=within_s)
        at = self.step()
        until(
            lambda: [one["step"] or 0 for one in self.cluster.ranks().values()],
            "the beats of both nodes are shown",
            holds=lambda found: len(found) == 2 and min(found) > at,
            despite=CliError,
            within_s=within_s,
        )
        for service, about in (("the catalog", "checkpoints"), ("health", "limits")):
            until(
                partial(self._is_live, about),
                f"{service} answers",
                despite=CliError,
                within_s=within_s,
            )

    def until_consumers(self, count: int) -> None:
        until(
            self.consumers,
            f"{count} consumers of streams",
            holds=lambda found: found == count,
            within_s=FORGOTTEN_WITHIN_S,
        )

    def has_a_save_asked_for(self) -> None:
        """From REST over rendezvous to both nodes, and back over the catalog."""
        ask(self.cluster, "save", self.cluster.job, "--reason", "to see that all of it works")
        saved = self.cluster.until_fact(
            "checkpoint_committed", lambda body: body["occasion"] == "requested"
        )
        until(
            self._checkpoints,
            "the catalog knows of it",
            holds=lambda steps: saved["step"] in steps,
            despite=CliError,
        )

    def finish(self) -> None:
        """The training comes to its good end, and the publisher falls silent."""
        (self._folder / "recorder" / "quiet").touch()
        self.cluster.finish()
        self.cluster.until_done()

    def close(self) -> None:
        try:
            if self._recorder is not None:
                self._recorder.kill()
            self.cluster.close()
        finally:
            self.pieces.stop()

    # -- what is seen of it ----------------------------------------------------------------------

    def step(self) -> int:
        return max(self.steps(0), default=0)

    def steps(self, rank: int) -> list[int]:
        """Every step that a rank has made, as its script wrote them."""
        text = (self.cluster.folder / f"losses-{rank}").read_text()
        return [int(line.split()[0]) for line in text.splitlines()]

    def consumers(self) -> int:
        """Of all streams together."""

        async def count() -> int:
            async with connect(self._settings(), "test") as bus:
                infos = [
                    await bus.jetstream.api(f"STREAM.INFO.{plan.name}")
                    for plan in plans(1, BusSettings())
                ]
            return sum(info["state"]["consumer_count"] for info in infos)

        return asyncio.run(count())

    def _settings(self) -> BusSettings:
        return BusSettings(
            url=f"nats://127.0.0.1:{self.pieces._port}",
            credentials_file=self.pieces.login_file(SERVICE),
        )

    def _is_live(self, about: str) -> bool:
        """Whether the service whose this is has said it now."""
        return bool(self.cluster.api.get(f"jobs/{self.cluster.job}/{about}")["is_live"])

    def _checkpoints(self) -> list[int]:
        """The steps of those that the catalog knows."""
        path = f"jobs/{self.cluster.job}/checkpoints"
        return [one["step"] for one in self.cluster.api.get(path, {"limit": 1000})["items"]]

    def _pids(self) -> dict[str, int]:
        assert self._recorder is not None
        agents = {agent.node: agent.pid for agent in self.cluster.agents}
        services = {name: one.pid for name, one in self.pieces.processes.items()}
        return {**services, **agents, "recorder": self._recorder.pid}

    def _cut_off(self) -> list[str]:
        return [
            name
            for name, pid in self._pids().items()
            if name != "nats" and not _talks_to(pid, self.pieces._port)
        ]

    # -- what must hold --------------------------------------------------------------------------

    def has_lost_nothing(self) -> None:
        """One round, every step once, the whole record once; nobody has started anew."""
        self._trained_undisturbed()
        in_record, published = until(
            lambda: (Counter(fact["id"] for fact in self._record()), set(self._published())),
            "the record has each fact that was published",
            holds=lambda both: set(both[0]) == both[1],
            despite=CliError,
            within_s=BACK_WITHIN_S,
        )
        assert max(in_record.values()) == 1
        assert acknowledged(self._folder / "recorder") <= published
        kinds = Counter(fact["kind"] for fact in self._record())
        print(f"{len(published)} facts: {dict(kinds.most_common())}")
        assert not _BAD & set(kinds)
        saved = [one["step"] for one in self.cluster.facts("checkpoint_committed")]
        assert sorted(self._checkpoints()) == sorted(set(saved))
        assert self._pids() == self._lives
        assert not [name for name, one in self.pieces.processes.items() if one.poll() is not None]

    def _trained_undisturbed(self) -> None:
        last = self.step()
        for rank in range(2):
            assert self.steps(rank) == [*range(1, last + 1)]
        told = self.cluster.facts("progress_made")
        assert told[0]["is_first"]
        assert [after["step"] - after["steps"] for after in told[1:]] == [
            before["step"] for before in told[:-1]
        ]
        assert (told[0].get("lost_steps", 0), told[-1]["step"]) == (0, last)
        assert [one["round"] for one in self.cluster.facts("round_formed")] == [1]
        assert self.cluster.incidents() == []

    def _record(self) -> Iterator[Body]:
        return self.cluster.api.pages("facts", {"limit": 1000}, most=None)

    def _published(self) -> Iterator[str]:
        """The ids of all facts that any process has ever kept, from the spools themselves.

        A fact may have been kept twice: by its sender, and by the next process. A segment stays
        until all of it is acknowledged and another one has begun.
        """
        for folder in {path.parent for path in self._folder.rglob("*.seg")}:
            segments = sorted(folder.glob("*.seg"))
            assert int(segments[0].stem) == 1, f"{folder} has forgotten the first facts"
            for segment in segments:
                for record, _ in _records(segment.read_bytes()):
                    yield record.split(b"\n", 2)[1].decode()


def _talks_to(pid: int, port: int) -> bool:
    try:
        found = psutil.Process(pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return False
    return any(
        one.status == psutil.CONN_ESTABLISHED and one.raddr and one.raddr.port == port
        for one in found
    )
