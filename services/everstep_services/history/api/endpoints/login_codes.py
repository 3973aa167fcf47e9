"""`/login-codes`: a link that opens the dashboard for whoever has a token already."""

from fastapi import APIRouter, Request, Response

from everstep.store.login_codes import LASTS_S
from everstep_services.history.api.context import Ctx, Reader
from everstep_services.history.api.dto.service import LoginCode
from everstep_services.history.api.http.problems import responses
from everstep_services.history.mask import show_secret

router = APIRouter(tags=["tokens"])


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
