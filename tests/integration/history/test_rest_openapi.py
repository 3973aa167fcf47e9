"""The description keeps its word: complete, and true under schemathesis."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.config import SchemathesisConfig

from everstep.clock import SystemClock
from everstep.messages import (
    FACTS,
    CheckpointPlace,
    CheckpointsCollected,
    CheckpointsLocated,
    CollectCheckpoints,
    Done,
    HeatMapPart,
    JudgedCheckpoint,
    LimitsDocument,
    ListCheckpoints,
    LocateCheckpoint,
    Message,
    NodeRun,
    NodeStandings,
    RankScoreTable,
    SectionLimit,
    ShowHeatMap,
    ShowLimits,
    ShowNodes,
    ShowRound,
    ShowScores,
    ShowSwitches,
    ShowTimings,
    SwitchInForce,
    SwitchTable,
    TimingTable,
)
from everstep.messages.questions.straggler import RankScores, TimingRow
from everstep.observe.http import listen, serve_asgi, url_of
from everstep.runtime import serve
from everstep.store.database import open_database
from everstep.store.log import FactLog
from everstep.store.schema import upgrade
from everstep_services.history.api.dto.service import FactOut
from everstep_services.history.api.http import fact_json
from everstep_services.history.projections.fold import fold
from tests.integration.conftest import Api
from tests.unit.history.facts import KINDS, make
from tests.unit.rendezvous.documents import round_document
from tests.waiting import WITHIN_S

JOB = "a-job"
PAGE = Path(__file__).parents[3] / "docs/reference/openapi.json"
OPERATIONS = sorted(
    f"{method.upper()} {path}"
    for path, methods in msgspec.json.decode(PAGE.read_bytes())["paths"].items()
    for method in methods
    if not path.endswith("/stream")
)
VERBS = ("stop", "restart", "save", "drain", "measure", "check", "show", "evidence")
CATALOG_VERBS = ("locate", "list", "change", "scan", "collect")
STRAGGLER_VERBS = ("scores", "timings", "heat_map", "switches")
HEALTH_VERBS = ("limits", "set_limit", "nodes", "exclude", "include", "control")
schemathesis.checks.load_all_checks()
EXCLUDED = [
    # Tokens are tested by name in test_rest_gate.py.
    schemathesis.checks.CHECKS.get_one("ignored_auth"),
    # A name that is allowed and that nobody has is a 404, not an error of the description.
    schemathesis.checks.CHECKS.get_one("positive_data_acceptance"),
]


async def done(question: Message) -> Message:
    """What rendezvous, health and the catalog say to everything."""
    if isinstance(question, ListCheckpoints | LocateCheckpoint):
        return CheckpointsLocated(places=(CheckpointPlace(step=0, tier="global"),))
    if isinstance(question, CollectCheckpoints):
        judged = (JudgedCheckpoint(step=0, is_kept=True, reason="it is the last good one"),)
        return CheckpointsCollected(judged=judged, text="none of them goes")
    if isinstance(question, ShowRound):
        return round_document(question.job, seats=1, name_characters=8)
    if isinstance(question, ShowNodes):
        return NodeStandings(nodes=())
    if isinstance(question, ShowLimits):
        limit = SectionLimit(section="", limit_s=30.0, source="learned", longest_s=6.0)
        return LimitsDocument(job=question.job, limits=(limit,), first_step_limit_s=9.0, reason="")
    return Done(text="it is done")


async def compared(question: Message) -> Message:
    """What straggler says to everything."""
    if isinstance(question, ShowScores):
        return RankScoreTable(round=1, window=16, ranks=(RankScores(rank=0, node="n"),))
    if isinstance(question, ShowSwitches):
        one = SwitchInForce(name="straggler.timings", value="on", source="default")
        return SwitchTable(switches=(one,))
    if isinstance(question, ShowHeatMap):
        return HeatMapPart(
            round=1, measure=question.measure, windows=((1, 16),), first_rank=0,
            nodes=(NodeRun(node="n", ranks=1),), low=0.5, high=0.5, cells="AQA=",
        )  # fmt: skip
    assert isinstance(question, ShowTimings)
    row = TimingRow(rank=0, node="n", role="", values=(0.5, None))
    windows = ((1, 16), (17, 32))
    return TimingTable(round=1, measure=question.measure, windows=windows, rows=(row,))


class Served:
    """The interface on a real port, in a thread of its own."""

    def __init__(self, path: Path) -> None:
        self.url = ""
        self.tokens: dict[str, str] = {}
        self._path = path
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> "Served":
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with open_database(f"sqlite:///{self._path}") as database:
            await upgrade(database)
            api = Api(database, FactLog(database, fold), SystemClock())
            await api.open(failed_logins_per_minute=10**6)
            await api.add(*(make(kind, job=JOB, round=1) for kind in KINDS))
            self.tokens = {scope: await api.token(scope) for scope in ("read", "admin")}
            listener = listen("127.0.0.1", 0, remedy="")
            self.url = url_of(listener)
            self._ready.set()

            async def serving(stop: asyncio.Event) -> None:
                await serve_asgi(api.app, listener, stop, drain_within_s=0.5)

            async with (
                api.bus.answer("rendezvous", dict.fromkeys(VERBS, done)),
                api.bus.answer("health", dict.fromkeys(HEALTH_VERBS, done)),
                api.bus.answer("catalog", dict.fromkeys(CATALOG_VERBS, done)),
                api.bus.answer("straggler", dict.fromkeys(STRAGGLER_VERBS, compared)),
            ):
                await serve(stop=self._stop, drains=(serving,))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("served") / "history.db") as running:
        yield running


@pytest.fixture(scope="module")
def described(served: Served) -> Any:
    headers = {"Authorization": f"Bearer {served.tokens['read']}"}
    answer = httpx2.get(f"{served.url}/api/v1/openapi.json", headers=headers, timeout=30)
    return answer.raise_for_status().json()


@pytest.fixture(scope="module")
def operations(served: Served, described: Any) -> Mapping[str, Any]:
    """The operations that are served, but for streams, by method and path."""
    schema: Any = schemathesis.openapi.from_dict(described, config=SchemathesisConfig())
    schema.config.update(base_url=served.url)
    schema = schema.exclude(path_regex="/stream$")
    results: list[Any] = list(schema.get_all_operations())
    return {result.ok().label: result.ok() for result in results}


def test_all_operations_are_tried(operations: Mapping[str, Any]) -> None:
    assert sorted(operations) == OPERATIONS


@pytest.mark.parametrize("label", OPERATIONS)
def test_every_answer_is_as_described(
    operations: Mapping[str, Any], served: Served, label: str
) -> None:
    """Fuzzed from its own description: no 5xx but those that it describes (A13.3).

    Each operation alone: all together need half a minute of processor, and more than the limit of
    a test on a loaded machine.
    """

    # Not schemathesis' own plugin: it reaches into pytest, and does not know this version.
    @given(case=operations[label].as_strategy())
    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    def answers(case: Any) -> None:
        case.call_and_validate(
            headers={"Authorization": f"Bearer {served.tokens['admin']}"},
            excluded_checks=EXCLUDED,
            timeout=WITHIN_S,
        )

    answers()


def test_every_operation_describes_itself_and_its_problems(described: Any) -> None:
    assert described["openapi"].startswith("3.1")
    for path, operations in described["paths"].items():
        assert path.startswith("/api/v1/")
        for method, operation in operations.items():
            where = f"{method} {path}"
            assert operation["summary"], where
            assert operation["description"], where
            assert operation["security"] == [{"token": []}], where
            for status in ("401", "403", "422", "500", "503"):
                content = operation["responses"][status]["content"]
                assert list(content) == ["application/problem+json"], where
            for parameter in operation.get("parameters", []):
                assert parameter.get("description") or parameter["schema"].get("enum"), (
                    where,
                    parameter["name"],
                )
    assert "HTTPValidationError" not in described["components"]["schemas"]


def test_it_has_no_page_that_loads_scripts_from_elsewhere(served: Served) -> None:
    headers = {"Authorization": f"Bearer {served.tokens['read']}"}
    for path in ("/docs", "/redoc", "/api/v1/docs"):
        answer = httpx2.get(served.url + path, headers=headers, timeout=30)
        assert answer.status_code == 404


def test_the_server_says_nothing_of_itself(served: Served) -> None:
    answer = httpx2.get(f"{served.url}/api/v1/jobs", timeout=30)
    assert "server" not in answer.headers


def test_what_is_sent_as_a_fact_is_what_is_described() -> None:
    assert set(fact_json._Fact.__struct_fields__) == set(FactOut.model_fields)
    assert len(FACTS) > 20
