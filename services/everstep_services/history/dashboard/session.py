"""Who is logged in: the token in a cookie; and forms: where they came from, and their fields."""

import hashlib
import hmac
from collections.abc import Sequence
from urllib.parse import parse_qsl, urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from everstep.observe.printable import printable

_FORM_BYTES = 64 << 10


def token_of(request: Request) -> str:
    """The token of the session; empty without one."""
    return request.cookies.get(_name(request), "")


def log_in(request: Request, response: Response, token: str) -> None:
    """Keep the token where scripts cannot read it and other sites cannot send it."""
    response.set_cookie(
        _name(request), token, httponly=True, samesite="strict", secure=_is_secure(request),
        max_age=30 * 86_400, path="/",
    )  # fmt: skip


def log_out(request: Request, response: Response) -> None:
    """Forget it."""
    response.delete_cookie(
        _name(request), httponly=True, samesite="strict", secure=_is_secure(request), path="/"
    )


def form_key(token: str) -> str:
    """What each form of a session carries: other sites cannot know it."""
    return hmac.new(token.encode(), b"everstep form", hashlib.sha256).hexdigest()[:32]


def is_own_form(request: Request, token: str, key: str) -> bool:
    """Whether a form was shown by us to the person who sends it."""
    return comes_from_here(request) and hmac.compare_digest(key.encode(), form_key(token).encode())


async def form_fields(request: Request, names: Sequence[str]) -> dict[str, str]:
    """The fields of a form, each given once and none of them large; others are refused."""
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > _FORM_BYTES:
            raise HTTPException(413, "the form is too large")
    text = data.decode(errors="replace")
    try:
        given = parse_qsl(text, keep_blank_values=True, max_num_fields=100)
    except ValueError as error:
        raise HTTPException(400, "the form has too many fields") from error
    form: dict[str, str] = {}
    for name, value in given:
        if name not in names:
            shown, known = printable(name[:40]), ", ".join(names)
            text = f"the form has no field {shown!r}: leave it out; the fields are {known}"
            raise HTTPException(422, text)
        if name in form:
            raise HTTPException(422, f"the form has the field {name!r} twice: give it once")
        form[name] = value
    return form


def comes_from_here(request: Request) -> bool:
    """Whether a page of ours sent the request. A browser that says nothing is not believed."""
    site = request.headers.get("sec-fetch-site")
    if site is not None and site != "same-origin":
        return False
    origin = request.headers.get("origin")
    if origin is None:
        return site == "same-origin"
    return urlsplit(origin).netloc.lower() == request.headers.get("host", "").lower()


def comes_from_another_site(request: Request) -> bool:
    """A link elsewhere was followed: the browser has kept the cookie back."""
    return request.headers.get("sec-fetch-site") == "cross-site"


def _name(request: Request) -> str:
    """Cookies know no ports: two dashboards of one host must not log each other out."""
    port = request.headers.get("host", "").rpartition(":")[2]
    return f"everstep_{port}" if port.isdecimal() else "everstep"


def _is_secure(request: Request) -> bool:
    return "https" in {request.url.scheme, request.headers.get("x-forwarded-proto", "")}
