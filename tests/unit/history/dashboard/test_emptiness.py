"""Every page stands with whatever REST may answer: nothing, one, zero, huge, ends of time."""

import asyncio
import random
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin

import httpx2
import msgspec
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from everstep.clock import SystemClock
from everstep_services.history.api.app import BASE, PARTS
from everstep_services.history.api.dto.stragglers import RanksCompared
from everstep_services.history.dashboard import drawings
from everstep_services.history.dashboard.pages import (
    PAGES,
    checkpoints,
    fleet,
    incidents,
    jobs,
    nodes,
    numerics,
)
from everstep_services.history.dashboard.site import Dashboard

TEXTS = ("", "a", "user_code", "open", "x" * 400, "line\nline", "/a b?c#d", "²")
TIMES = (
    "2026-01-01T00:00:00Z",
    "0001-01-01T00:00:00Z",
    "9999-12-31T23:59:59.999999Z",
    "2026-01-01T09:00:00+14:00",
)
SCALARS: Mapping[type, tuple[Any, ...]] = {
    int: (0, 1, 2, -1, 2**53, 10**18),
    float: (0.0, 1.0, 1e-9, 0.3, -2.0, 1e300, 7),
    bool: (True, False),
    str: TEXTS,
}  # fmt: skip
FAILED = "This part cannot be shown"
NAMES = {"job": "j", "incident": "i", "node": "n", "fact": "f", "id": "i", "name": "cause-network"}
ROUTES = [route for part in PARTS for route in part.router.routes if "GET" in route.methods]
PATHS = [
    *(path.format(**NAMES) for path in PAGES),
    "/jobs/j/ranks?rank=1",
    "/jobs/j/checkpoints/holders?step=0&tier=peer",
    "/incidents/i.md",
]


class Invented:
    """A REST whose answers have the right shape, and nothing that anybody would expect."""

    def __init__(self, seed: int, absent: float, most: int, *, is_zero: bool) -> None:
        self._chance = random.Random(seed)
        self._absent, self._most, self._is_zero = absent, most, is_zero

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        inner = {**scope, "path": scope["path"].removeprefix(BASE), "root_path": ""}
        found = (route for route in ROUTES if route.matches(inner)[0] is Match.FULL)
        route: Any = next(found, None)  # none for a name with a slash
        scope["state"]["token"] = types.SimpleNamespace(scope="admin")
        shape = route and route.response_model
        body = b"" if shape is None else msgspec.json.encode(self.of(shape))
        status = 200 if route else 404
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    def of(self, shape: Any) -> Any:
        """A value of a type, as JSON has it."""
        origin, inner = get_origin(shape), get_args(shape)
        if origin in {Union, types.UnionType}:
            return None if self._chance.random() < self._absent else self.of(inner[0])
        if origin is Literal:
            return self._chance.choice(inner)
        if origin is not None:
            count = range(self._chance.randint(min(1, self._most), self._most))
            made = [[self.of(of) for of in inner] for _ in count]
            return dict(made) if origin is dict else [one[0] for one in made]
        if isinstance(shape, type) and issubclass(shape, BaseModel):
            fields = shape.model_fields.items()
            return {name: self.of(field.annotation) for name, field in fields}
        values = SCALARS.get(shape, TIMES) if shape is not Any else (None, "a", 3)
        return values[0] if self._is_zero else self._chance.choice(values)


@pytest.fixture(scope="module")
def visit() -> Iterator[Callable[[str, Invented], httpx2.Response]]:
    """Shows a page of one dashboard, whose REST is another each time."""
    rest: list[Invented] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await rest[-1](scope, receive, send)

    site = Dashboard(app, SystemClock(), codes=None)  # type: ignore[arg-type]  # nobody logs in
    client = httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=site), base_url="http://e", cookies={"everstep": "t"}
    )
    with asyncio.Runner() as runner:

        def visited(path: str, invented: Invented) -> httpx2.Response:
            rest.append(invented)
            return runner.run(client.get(path))

        yield visited
        runner.run(client.aclose())


@pytest.mark.parametrize("path", PATHS)
@given(
    seed=st.integers(0, 2**32),
    absent=st.sampled_from([0.0, 0.3, 1.0]),
    most=st.sampled_from([0, 1, 3]),
    is_zero=st.booleans(),
)
@example(seed=0, absent=1.0, most=0, is_zero=True)
@example(seed=0, absent=1.0, most=1, is_zero=True)
@example(seed=0, absent=0.0, most=1, is_zero=True)
@settings(max_examples=16, phases=(Phase.explicit, Phase.generate))
def test_a_page_stands_with_whatever_is_on_record(
    visit: Any, path: str, seed: int, absent: float, most: int, is_zero: bool
) -> None:
    answer = visit(path, Invented(seed, absent, most, is_zero=is_zero))
    assert answer.status_code == 200
    assert FAILED not in answer.text


def test_a_share_of_no_jobs_is_not_shown(visit: Any) -> None:
    page = visit("/", Invented(0, absent=0.0, most=0, is_zero=True)).text
    assert "Failed" in page
    assert "of the last 0" not in page


class WithoutScores(Invented):
    """Answers what no release would: a comparison of ranks without one field."""

    def of(self, shape: Any) -> Any:
        return {"round": 1} if shape is RanksCompared else super().of(shape)


@pytest.mark.parametrize(
    ("path", "module", "name"),
    [
        ("/", fleet, "_of_nodes"),
        ("/", drawings, "shares"),
        *(("/jobs/j", jobs, name) for name in ("step_times", "reported_values", "eta")),
        ("/jobs/j", numerics, "results"),
        *(("/jobs/j", drawings, name) for name in ("timeline", "shares")),
        ("/jobs/j/checkpoints", checkpoints, "_by_step"),
        *(("/incidents/i", incidents, name) for name in ("_matrix", "_folds", "_grounds")),
        ("/incidents/i", drawings, "ledger"),
        ("/nodes", nodes, "_matrix"),
    ],
)
@pytest.mark.parametrize("error", [KeyError("x"), AttributeError("x"), ZeroDivisionError("x")])
def test_a_value_that_cannot_be_made_takes_only_the_parts_that_show_it(
    visit: Any, monkeypatch: pytest.MonkeyPatch, path: str, module: Any, name: str, error: Exception
) -> None:
    def fails(*_: object) -> None:
        raise error

    whole = visit(path, Invented(0, 0.0, 1, is_zero=True)).text
    monkeypatch.setattr(module, name, fails)
    answer = visit(path, Invented(0, 0.0, 1, is_zero=True))
    assert answer.status_code == 200
    failed = answer.text.count(FAILED)
    assert 1 <= failed <= 2
    assert answer.text.count("<section") >= whole.count("<section") - failed


def test_a_part_that_fails_leaves_the_others(visit: Any, caplog: pytest.LogCaptureFixture) -> None:
    answer = visit("/jobs/j/stragglers", WithoutScores(0, 1.0, 1, is_zero=True))
    assert answer.status_code == 200
    assert answer.text.count(FAILED) == 1
    assert 'id="found"' in answer.text
    assert "part_failed path=/jobs/j/stragglers" in caplog.text
