"""Puts the interface together: `create_app`."""

import asyncio
from functools import cache
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from everstep import __version__
from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.store.database import Database
from everstep.store.evidence_copies import EvidenceCopies
from everstep.store.login_codes import LoginCodes
from everstep.store.queries import log_head
from everstep.store.schema import head
from everstep.store.tokens import Tokens
from everstep_services.history.api.context import Connectedness, Context
from everstep_services.history.api.endpoints import (
    checkpoints,
    control,
    evidence,
    export,
    facts,
    goodput,
    heat_map,
    incidents,
    jobs,
    logs,
    nodes,
    numerics,
    operators,
    rank_logs,
    ranks,
    stall_limits,
    status,
    stragglers,
    tokens,
    webhooks,
)
from everstep_services.history.api.http.auth import TokenAuth
from everstep_services.history.api.http.cursors import Cursors
from everstep_services.history.api.http.feed import Feed
from everstep_services.history.api.http.middleware import RequestLimits
from everstep_services.history.api.http.problems import ProblemAnswer, handle, pattern_of
from everstep_services.history.beats import Beats
from everstep_services.history.bundle import BundleClock, BundleOrigin
from everstep_services.history.dashboard.site import Dashboard
from everstep_services.history.goodput.reader import GoodputReader
from everstep_services.history.mask import MaskedAnswers
from everstep_services.history.notifications.service import Notifications
from everstep_services.history.notifications.settings import NotifySettings
from everstep_services.history.notifier import LogNotifier
from everstep_services.history.retention import EvidenceRetention
from everstep_services.history.settings import ApiSettings
from everstep_services.history.webhooks.receiver import MaintenanceReceiver

BASE = "/api/v1"
PARTS = (
    *(
        jobs,
        export,
        ranks,
        stall_limits,
        stragglers,
        numerics,
        heat_map,
        goodput,
        checkpoints,
        incidents,
        evidence,
        logs,
        rank_logs,
        nodes,
    ),
    *(operators, control, webhooks, facts, tokens, status),
)
"""The modules with endpoints, in the order in which they are described."""
_DESCRIPTION = """\
The record of Everstep: jobs, rounds, incidents, nodes, and the facts that all of it is derived
from.

Lists have pages: give `next` of one answer as `cursor` of the next question, with the same
filters. Every error is `application/problem+json` (RFC 9457), unless the request is not valid
HTTP: that is answered 400 in plain text, or its connection is closed. Answers have an `ETag`;
send it as `If-None-Match` to get 304 when nothing has changed. Every path needs a token.
"""


async def make_context(  # noqa: PLR0913  each is a part of its own
    settings: ApiSettings,
    database: Database,
    notifier: LogNotifier,
    connectedness: Connectedness,
    *,
    clock: Clock,
    bus: Bus,
    notifications: Notifications | None = None,
    bundle: BundleOrigin | None = None,
    clock_offset_limit_s: float = 5.0,
) -> Context:
    """The collaborators of the endpoints. The database must have its schema already."""
    now = await log_head(database)
    made = Tokens(database)
    return Context(
        settings=settings,
        database=database,
        tokens=made,
        auth=TokenAuth(settings, made, clock),
        feed=Feed(database, notifier),
        kept=EvidenceCopies(database),
        bus=bus,
        beats=Beats(bus, clock, clock_offset_limit_s),
        goodput=GoodputReader(database),
        retention=EvidenceRetention(bus.blobs, clock),
        cursors=Cursors(now.secret),
        clock=clock if bundle is None else BundleClock(bundle),
        epoch=now.epoch,
        schema=await asyncio.to_thread(head),
        connectedness=connectedness,
        notifications=notifications or Notifications(NotifySettings(), bus, clock),
        maintenance=MaintenanceReceiver(settings.webhooks, database, bus, clock),
        login_codes=LoginCodes(database, clock),
        bundle=bundle,
    )


def create_app(context: Context) -> ASGIApp:
    """Pages for people and REST as one ASGI application, all limits included."""
    api, is_bundle = create_api(context), context.bundle is not None
    rest = RequestLimits(api, context.settings, context.auth, is_read_only=is_bundle)
    return Dashboard(rest, context.clock, context.login_codes, context.bundle)


def create_api(context: Context) -> ASGIApp:
    """The endpoints alone: behind `RequestLimits` only, which admits the token."""
    api = endpoints()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["context"] = context
        await api(scope, receive, send)

    return answer


@cache
def endpoints() -> FastAPI:
    """The endpoints of all contexts of a process: each request brings its own."""
    api = FastAPI(
        title="Everstep",
        version=__version__,
        description=_DESCRIPTION,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        openapi_url=f"{BASE}/openapi.json",
        docs_url=None,  # its scripts come from other sites
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"logs": False},  # they would repeat the texts of exceptions, secrets included
        generate_unique_id_function=lambda route: route.name,
    )
    handle(api)
    api.add_middleware(MaskedAnswers)
    api.state.methods = [
        (pattern_of(f"{BASE}{route.path}"), route.methods)
        for part in PARTS
        for route in part.router.routes
        if isinstance(route, APIRoute)
    ]
    for part in PARTS:
        api.include_router(part.router, prefix=BASE)
    _describe_problems(api)
    return api


def _describe_problems(api: FastAPI) -> None:
    """Add `Problem` to the schemas: every endpoint refers to it."""
    made = api.openapi

    def described() -> dict[str, Any]:
        if api.openapi_schema is None:
            schemas = made()["components"]["schemas"]
            problem = ProblemAnswer.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(problem.pop("$defs", {}))
            schemas["Problem"] = problem
        assert api.openapi_schema is not None
        return api.openapi_schema

    api.openapi = described  # type: ignore[method-assign]  # the documented way
