"""Who is logged in: the token in a cookie, codes for one login, and where a form came from."""

import hashlib
import hmac
import secrets
from collections import OrderedDict
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from everstep.clock import Clock

_CODES_MOST = 1000
CODE_LASTS_S = 60.0


class LoginCodes:
    """Codes that log in once, within a minute. Each replica knows its own only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._codes: OrderedDict[bytes, tuple[float, str]] = OrderedDict()

    def make(self, token: str) -> str:
        """A code for this token, which REST has admitted."""
        code = secrets.token_urlsafe(24)
        self._codes[_digest(code)] = (self._clock.now(), token)
        while len(self._codes) > _CODES_MOST:
            self._codes.popitem(last=False)
        return code

    def take(self, code: str) -> str | None:
        """The token, the first time and in time only."""
        found = self._codes.pop(_digest(code), None)
        if found is None or self._clock.now() - found[0] > CODE_LASTS_S:
            return None
        return found[1]


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


def _digest(code: str) -> bytes:
    return hashlib.sha256(code.encode()).digest()
