"""The collaborators that all endpoints share, and the tokens that they require."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer

from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.store.database import Database
from everstep.store.evidence_copies import EvidenceCopies
from everstep.store.login_codes import LoginCodes
from everstep.store.tokens import Scope, Token, Tokens, allows
from everstep_services.history.api.http.auth import TokenAuth
from everstep_services.history.api.http.cursors import Cursors
from everstep_services.history.api.http.feed import Feed
from everstep_services.history.api.http.problems import ProblemError
from everstep_services.history.beats import Beats
from everstep_services.history.bundle import BundleOrigin
from everstep_services.history.goodput.reader import GoodputReader
from everstep_services.history.notifications.service import Notifications
from everstep_services.history.retention import EvidenceRetention
from everstep_services.history.settings import ApiSettings
from everstep_services.history.webhooks.receiver import MaintenanceReceiver


@dataclass(frozen=True, slots=True)
class Connectedness:
    """The state of this replica, read at each `/status`."""

    is_projecting: Callable[[], bool]
    is_bus_connected: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Context:
    """The collaborators of all endpoints."""

    settings: ApiSettings
    database: Database
    tokens: Tokens
    auth: TokenAuth
    feed: Feed
    kept: EvidenceCopies
    bus: Bus
    beats: Beats
    goodput: GoodputReader
    retention: EvidenceRetention
    cursors: Cursors
    clock: Clock
    epoch: str
    schema: str
    connectedness: Connectedness
    notifications: Notifications
    maintenance: MaintenanceReceiver
    login_codes: LoginCodes
    bundle: BundleOrigin | None = None
    """Set where an exported bundle is served: all is read-only, and nothing is live."""


_bearer = HTTPBearer(
    scheme_name="token",
    bearerFormat="evs_<id>_<secret>",
    description="A token with the scope `read`, `operate` or `admin`, and each allows what "
    "those before it allow; or `webhook`, which allows webhooks only. Make one with "
    "`python -m everstep_services.history token`.",
    auto_error=False,
)


def get_context(request: Request) -> Context:
    """The collaborators, which serve the request."""
    context = request.state.context
    assert isinstance(context, Context)
    return context


def requires(scope: Scope) -> Any:
    """A dependency that lets only tokens with this scope pass, and gives the token."""

    async def check(request: Request, _: Annotated[object, Security(_bearer)]) -> Token:
        token = request.state.token
        assert isinstance(token, Token)
        if not allows(token.scope, scope):
            raise ProblemError(
                403,
                "scope_missing",
                f"this needs a token with the scope {scope}; yours has {token.scope}",
                headers={"WWW-Authenticate": f'Bearer error="insufficient_scope", scope="{scope}"'},
            )
        return token

    return Depends(check)


Ctx = Annotated[Context, Depends(get_context)]
Reader = Annotated[Token, requires("read")]
Sender = Annotated[Token, requires("webhook")]
Operator = Annotated[Token, requires("operate")]
Admin = Annotated[Token, requires("admin")]
