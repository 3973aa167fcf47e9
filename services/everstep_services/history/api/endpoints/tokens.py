"""`/tokens`: the tokens of the API, for administrators. `/login-codes`: a link to the dashboard."""

import logging
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from sqlalchemy import select

from everstep.store import tables
from everstep.store.login_codes import LASTS_S
from everstep.store.queries import SortOrder
from everstep.store.times import to_us
from everstep_services.history.api.context import Admin, Ctx, Reader
from everstep_services.history.api.dto.answer import PageOf, present
from everstep_services.history.api.dto.service import LoginCode, NewToken, TokenOut, TokenWanted
from everstep_services.history.api.http.list_pages import Paging, paged
from everstep_services.history.api.http.problems import not_found, responses
from everstep_services.history.mask import show_secret

router = APIRouter(tags=["tokens"])


@router.get("/tokens", summary="List tokens", responses=responses())
async def list_tokens(
    context: Ctx, _token: Admin, asked: Annotated[Paging, Query()]
) -> PageOf[TokenOut]:
    """All tokens, those that are revoked included. Their secrets are not kept."""
    order = SortOrder((tables.tokens.c.created_us, tables.tokens.c.id))
    listing = await paged(context, select(tables.tokens), order, asked, "/tokens")
    items = [TokenOut(**present(row)) for row in listing.rows]
    return PageOf[TokenOut](items=items, next=listing.next)


@router.post("/tokens", summary="Make a token", status_code=201, responses=responses())
async def make_token(
    context: Ctx, by: Admin, wanted: TokenWanted, request: Request, answer: Response
) -> NewToken:
    """A new token. Its text is in this answer, and cannot be shown again."""
    now_us = to_us(context.clock.wall())
    lasts_s = wanted.expires_in_s
    expires_us = None if lasts_s is None else now_us + lasts_s * 1_000_000
    token, text = await context.tokens.make(
        wanted.name, wanted.scope, now_us=now_us, expires_us=expires_us
    )
    show_secret(request)
    log.info("token_made token=%s scope=%s by=%s", token.id, token.scope, by.id)
    answer.headers["Cache-Control"] = "no-store"
    row: dict[str, Any] = {name: getattr(token, name) for name in token.__slots__}
    return NewToken(**present(row), token=text)


@router.delete(
    "/tokens/{id}",
    summary="Revoke a token",
    status_code=204,
    response_class=Response,
    responses=responses(404),
)
async def revoke_token(
    context: Ctx,
    by: Admin,
    id_: Annotated[str, Path(alias="id", pattern="^[0-9a-f]{12}$", description="The token's id.")],
) -> Response:
    """The token is refused from now on; on other replicas a few seconds later."""
    is_revoked = await context.tokens.revoke(id_, now_us=to_us(context.clock.wall()))
    context.auth.forget(id_)
    if not is_revoked:
        raise not_found(f"token {id_} that is not revoked")
    log.info("token_revoked token=%s by=%s", id_, by.id)
    return Response(status_code=204)


@router.post(
    "/login-codes", summary="Make a link to the dashboard", status_code=201, responses=responses()
)
async def make_login_code(
    context: Ctx, _token: Reader, request: Request, answer: Response
) -> LoginCode:
    """A code that logs a browser in with this token: once, within a minute, on any replica."""
    _, _, token = request.headers["authorization"].partition(" ")
    code = await context.login_codes.make(token.strip())
    show_secret(request)
    answer.headers["Cache-Control"] = "no-store"
    return LoginCode(code=code, path=f"/login?code={code}", lasts_s=LASTS_S)


log = logging.getLogger(__name__)
