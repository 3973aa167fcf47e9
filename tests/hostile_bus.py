"""A whole control plane on a real bus, and inputs of every kind for it, right and wrong."""

import asyncio
import itertools
import json
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import nats
from hypothesis import strategies as st
from nats import errors as nats_errors
from nats.aio.client import Client

from everstep.bus import connect, topology
from everstep.bus.auth.login import Login
from everstep.bus.auth.roles import ADMIN, SERVICE
from everstep.bus.server.dev_server import dev_server
from everstep.messages import (
    FACTS,
    MESSAGE_TYPES,
    CasesDocument,
    CheckpointsDocument,
    ControlDocument,
    LimitsDocument,
    ListCheckpoints,
    Message,
    NodeBeat,
    NodeLost,
    NodesDocument,
    NodeTimings,
    NoticesDocument,
    ReadEvidence,
    RoundDocument,
    ShowLimits,
    ShowNodes,
    ShowRound,
    ShowScores,
    StragglersDocument,
    encode,
    kind_of,
)
from everstep.messages.base import Question
from everstep.messages.codec import BadMessageError
from everstep.messages.orders import BeatNow
from everstep.messages.questions.asks import ASKS
from everstep.observe.http import listen
from everstep.runtime import Parts, serve
from everstep_services.attribution.replica import opened as open_attribution
from everstep_services.attribution.settings import AttributionSettings
from everstep_services.catalog.replica import opened as open_catalog
from everstep_services.catalog.settings import CatalogSettings
from everstep_services.health.replica import opened as open_health
from everstep_services.health.settings import HealthSettings
from everstep_services.history.replica import opened as open_history
from everstep_services.history.settings import ApiSettings, HistorySettings
from everstep_services.logins.service import opened as open_logins
from everstep_services.rendezvous.replica import opened as open_rendezvous
from everstep_services.rendezvous.settings import RendezvousSettings
from everstep_services.straggler.replica import opened as open_straggler
from everstep_services.straggler.settings import StragglerSettings
from tests.message_strategies import JSON, structs
from tests.unit.history.facts import make
from tests.unit.rendezvous.world import spec as example_spec
from tests.waiting import WITHIN_S, until_async

T = TypeVar("T")
_numbers = itertools.count(1)
_DAMAGED = {"j1": "_cluster", "j2": "a.b"}
SERVED = {"rendezvous", "health", "catalog", "straggler", "attribution", "logins"}
JOBS = ["j1", "j2", "_cluster", "-", "x" * 128]
ODD_JOBS = ["a$b", "\u202ej", "y" * 3000, "a/b", "%s%n"]
BUCKETS: Mapping[str, type[Message]] = {
    "ROUNDS": RoundDocument,
    "CONTROL": ControlDocument,
    "NODES": NodesDocument,
    "LIMITS": LimitsDocument,
    "CHECKPOINTS": CheckpointsDocument,
    "CASES": CasesDocument,
    "NOTICES": NoticesDocument,
    "STRAGGLERS": StragglersDocument,
}


@dataclass(frozen=True)
class Input:
    """One message, as anybody could send it who has a login."""

    subject: str
    data: bytes
    has_reply: bool = False
    headers: Mapping[str, str] | None = None

    def __repr__(self) -> str:
        return (
            f"Input({self.subject[:80]!r}, {self.data[:400]!r} ({len(self.data)} bytes), "
            f"{self.has_reply}, {self.headers})"
        )


# -- inputs ----------------------------------------------------------------------------------


def _addressed(
    subject: Callable[[str, str], str], of: type[Message]
) -> st.SearchStrategy[tuple[str, Message]]:
    """A message of a type on a subject that it says it belongs to, for the most part."""

    def made(drawn: tuple[str, str, Mapping[str, Any], Any]) -> tuple[str, Message]:
        job, node, small, message = drawn
        names = set(message.__struct_fields__)
        own = {"job": job, "node": node, **small}
        fitting = {
            name: value
            for name, value in own.items()
            if name in names and not isinstance(getattr(message, name), tuple)
        }
        return subject(job, node), msgspec.structs.replace(message, **fitting)

    jobs = st.sampled_from([*JOBS * 4, *ODD_JOBS])
    nodes = st.sampled_from(["n1", "n2", "n1", "n2", "n 3", ""])
    return st.tuples(jobs, nodes, st.one_of(st.just({}), _LIKELY), structs(of)).map(made)


_EVENTS = [
    *("started", "rank_exited", "rank_stalled", "rank_recovered", "start_failed", "finished"),
    *("stopped", "preempted", "first_step", "excused", "reached"),
]
_LIKELY = st.fixed_dictionaries(
    {},
    optional={
        "round": st.integers(0, 3),
        "rank": st.integers(0, 3),
        "ranks": st.just(2),
        "slot": st.integers(0, 2),
        "step": st.integers(0, 50),
        "instance": st.sampled_from(["n1-1", "n2-1"]),
        "spec": st.just(example_spec()),
        "event": st.sampled_from(_EVENTS),
        "incident": st.sampled_from(["i1", "i2"]),
        "action": st.sampled_from(["pin", "unpin", "verify", "quarantine", "release", "delete"]),
        "tier": st.sampled_from(["global", "memory", "peer"]),
        "path": st.sampled_from(["/nowhere/step-1", "s3://", "\0", "../x"]),
        "root": st.sampled_from(["", "/nowhere", "s3://b/c", "\0", "x://y"]),
        "mode": st.sampled_from(["enforce", "observe"]),
    },
)  # fmt: skip


def _token(name: str) -> str:
    return name.replace(" ", "_") or "_"


_SUBJECTS: Sequence[tuple[Callable[[str, str], str], type[Message]]] = [
    *(
        (lambda job, _, one=one: f"es.ask.{one.service}.{one.verb}.{job}", one.question)
        for one in ASKS
        if one.service in SERVED
    ),
    *((lambda job, _, one=one: f"es.fact.{job}.{kind_of(one)}", one) for one in FACTS),
    *[(lambda job, node: f"es.beat.{job}.{_token(node)}", NodeBeat)] * 8,
    *[(lambda job, node: f"es.timing.{job}.{_token(node)}", NodeTimings)] * 4,
    (lambda job, node: f"es.lost.{job}.{_token(node)}", NodeLost),
    (lambda job, node: f"es.order.{job}.{_token(node)}.hail", BeatNow),
    # Not of all jobs: the questions about one whose document is damaged are all refused.
    *(
        (lambda job, _, at=f"{root}.{bucket}": f"{at}.{_DAMAGED.get(job, job)}", of)
        for bucket, of in BUCKETS.items()
        for root in ("$KV", "es.doc")
    ),
]  # fmt: skip


def _encoded(message: Message) -> bytes:
    try:
        return encode(message)
    except BadMessageError:
        return b""


def _damaged(data: bytes, where: int, by: object) -> bytes:
    """One field has something else in it."""
    try:
        fields = json.loads(data)
    except ValueError:
        return data
    if not isinstance(fields, dict):
        return data
    name = sorted(fields)[where % len(fields)]
    return json.dumps(fields | {name: by}).encode()


_DEEP = b'{"type":"beat_now.v1","x":' + b"[" * 100_000
BODIES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        (
            *(b"", b"null", b"[]", b"{}", b"garbage", b"\0", b"\xff\xfe", _DEEP),
            *(b'{"type":"show_round.v1","job":"\\ud800"}', b'{"type":"' + b"x" * 200_000 + b'"}'),
            *(b" " * (1024 * 1024 - 600), b"(\xb5/\xfd\xa4" + b"\xff" * 20),
        )
    ),
)
WRONG = JSON | st.sampled_from(
    (
        *(-1, 2**53, 2**63, -(2**63), 10**30, 1e308, -1e308, 5e-324, "x" * 200_000, "\0", "\u202e"),
        *("\udc80", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00+23:59", [[]] * 3000),
    )
)


@st.composite
def inputs(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Input:
    """Anything, on any subject that a service hears."""
    subject_of, of = draw(st.sampled_from(_SUBJECTS))
    subject, message = draw(_addressed(subject_of, of))
    how = draw(st.sampled_from(["right", "right", "right", "field", "field", "type", "bytes"]))
    data = _encoded(message)
    if how == "field":
        data = _damaged(data, draw(st.integers(0, 40)), draw(WRONG))
    elif how == "type":
        data = _encoded(draw(structs(draw(st.sampled_from(MESSAGE_TYPES)))))
    elif how == "bytes":
        data = draw(BODIES)
    sequence = draw(st.sampled_from(["1", "99999999", "x", "-1", "", "9" * 30]))
    headers = draw(
        st.sampled_from(
            (
                *(None, None, {"Everstep-Acknowledge": "1"}, {"Nats-Msg-Id": "same"}),
                {"Nats-Subject": subject.replace("es.doc", "$KV"), "Nats-Sequence": sequence},
                *({"KV-Operation": "DEL"}, {"Nats-Marker-Reason": "MaxAge"}),
                {"Nats-Sequence": "5"},
            )
        )
    )
    return Input(subject, data[: 1024 * 1024 - 600], draw(st.booleans()), headers)


# -- who hears them --------------------------------------------------------------------------


class ControlPlane:
    """Every service, in a thread of its own, on a server of its own. `with` it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._stats: dict[str, Callable[[], Mapping[str, float]]] = {}
        self.ended: list[str] = []
        """The services that have ended, and why."""

    def __enter__(self) -> "ControlPlane":
        self._thread.start()
        assert self._ready.wait(WITHIN_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WITHIN_S)

    def call(self, todo: Coroutine[Any, Any, T]) -> T:
        """Do it on the services' loop."""
        return asyncio.run_coroutine_threadsafe(todo, self._loop).result(4 * WITHIN_S)

    def send(self, sent: Sequence[Input]) -> None:
        """Send them, and wait until every service has answered a question that came after them."""
        self.call(self._send(sent))

    def ask(self, service: str, verb: str, question: Question) -> str:
        """The code that it is refused with; empty when it is not."""
        return self.call(self._asked(service, verb, question))

    def failures(self) -> dict[str, float]:
        """What was contained so far, by service."""
        found = {
            name: read().get("input_failures_total", 0.0) for name, read in self._stats.items()
        }
        return {name: count for name, count in found.items() if count}

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with dev_server(self._folder / "bus") as server:
            bus = msgspec.structs.replace(
                server.settings(SERVICE), connect_within_s=WITHIN_S, request_within_s=WITHIN_S
            )
            async with connect(server.settings(ADMIN), "setup") as admin:
                await topology.init(admin.jetstream)
            listener = listen("127.0.0.1", 0, remedy="")
            url = f"sqlite:///{self._folder / 'history.db'}"
            history = HistorySettings(database_url=url, pace_s=0.0)
            spool = self._folder / "spools"
            async with (
                open_rendezvous(RendezvousSettings(), bus, spool / "r") as rendezvous,
                open_health(HealthSettings(), bus, spool / "h") as health,
                open_catalog(CatalogSettings(), bus, spool / "c") as catalog,
                open_straggler(StragglerSettings(), bus, spool / "s") as straggler,
                open_attribution(AttributionSettings(), bus, spool / "a") as attribution,
                open_history(history, ApiSettings(), bus, listener, None) as kept,
                open_logins(server.operator.signers, bus) as logins,
                connect(bus, "prober") as self._bus,
            ):
                options = Login(server.settings(ADMIN)).options()
                self._raw: Client = await nats.connect(**options, error_cb=_nothing)
                parts = {
                    "rendezvous": rendezvous,
                    "health": health,
                    "catalog": catalog,
                    "straggler": straggler,
                    "attribution": attribution,
                    "logins": logins,
                }
                async with asyncio.TaskGroup() as tasks:
                    for name, part in {**parts, "history": kept}.items():
                        tasks.create_task(self._keep(name, part))
                        for of, read in part.statistics.items():
                            self._stats[f"{name}.{of}"] = read
                    await self._answered()
                    self._ready.set()
                await self._raw.close()

    async def _keep(self, name: str, parts: Parts) -> None:
        try:
            await serve(*parts.loops, stop=self._stop, drains=parts.drains)
        except BaseException as error:
            self.ended.append(f"{name}: {error!r}")
            if not isinstance(error, Exception):
                raise

    async def _send(self, sent: Sequence[Input]) -> None:
        for one in sent:
            reply = f"_INBOX.hostile.{next(_numbers)}" if one.has_reply else ""
            try:
                await self._raw.publish(one.subject, one.data, reply, dict(one.headers or {}))
            except (nats_errors.Error, ValueError):
                continue  # the client library has kept it from being sent
        await self._raw.flush(int(WITHIN_S))
        await self._answered()

    async def _answered(self) -> None:
        """Each service, what it has heard before included, up to the projection of a fact."""
        asked = [
            ("rendezvous", "show", ShowRound(job="nobody")),
            ("health", "limits", ShowLimits(job="nobody")),
            ("health", "nodes", ShowNodes(job="_cluster")),
            ("catalog", "list", ListCheckpoints(job="nobody")),
            ("straggler", "scores", ShowScores(job="nobody")),
            ("attribution", "stacks", ReadEvidence(job="nobody", evidence=())),
        ]
        for service, verb, question in asked:
            look = partial(self._is_answered, service, verb, question)
            await until_async(look, f"{service} answers {verb}")
        fact = make("control_changed", job="_cluster")
        before = self._stats["history.history"]()["last_n"] if self._stats else 0
        await self._raw.publish(f"es.fact._cluster.{kind_of(fact)}", encode(fact))
        if self._stats:
            await until_async(
                lambda: self._stats["history.history"]()["last_n"] > before, "history projects"
            )

    async def _asked(self, service: str, verb: str, question: Question) -> str:
        subject = f"es.ask.{service}.{verb}.{question.job}"
        reply = await self._bus.jetstream.request(subject, encode(question), within_s=WITHIN_S)
        headers = reply.headers or {}
        return headers.get("Nats-Service-Error-Code") or headers.get("Status", "")

    async def _is_answered(self, service: str, verb: str, question: Question) -> bool:
        if self.ended:
            raise AssertionError(self.ended)
        return await self._asked(service, verb, question) not in {"500", "503"}


async def _nothing(error: Exception) -> None:
    """Refusals by the server do not matter here."""
