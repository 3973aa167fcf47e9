"""The site: which path is which page, who may see it, and the headers that every page has."""

import asyncio
import gzip
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everstep import __version__
from everstep.clock import Clock
from everstep.store.errors import StoreError
from everstep.store.login_codes import LoginCodes
from everstep_services.history.bundle import BundleOrigin, damage_text
from everstep_services.history.dashboard import actions, session
from everstep_services.history.dashboard.assets import Assets, shared_assets
from everstep_services.history.dashboard.formats import is_excluded, relative, when
from everstep_services.history.dashboard.pages import PAGES, Page, incidents
from everstep_services.history.dashboard.pages.page import without_cursor
from everstep_services.history.dashboard.rest import (
    Reader,
    Rest,
    RestError,
    Visitor,
    path_of,
    together,
)

log = logging.getLogger(__name__)

_LOGIN_FIELDS = ("token",)
_LOGOUT_FIELDS = ("key",)
_SAFE = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}
"""No inline script, no inline style, no other site: text from the bus can execute nothing."""

_NOT_IN_BUNDLES = ("/control", "/jobs/{job}/checkpoints/holders", "/jobs/{job}/logs")
"""What only a cluster can tell."""

Make = Callable[[Reader, Request], Awaitable[Page]]


@dataclass(frozen=True, slots=True)
class _Shell:
    """What surrounds a page."""

    token: str
    reader: Reader | None
    status: Mapping[str, Any] | None
    problem: str = ""


class Dashboard:
    """Answers the paths of pages; all others go to REST."""

    def __init__(
        self, rest: ASGIApp, clock: Clock, codes: LoginCodes, bundle: BundleOrigin | None = None
    ) -> None:
        self._clock = clock
        self._bundle = bundle
        self._codes = codes
        self._rest = Rest(rest, clock)
        self._assets: Assets | None = None
        self._loading = asyncio.Lock()
        self._router = Router(self._routes(), redirect_slashes=False, default=self._other)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:  # of a form; REST answers its own
            text = f"{error.detail}\n"
            answer = Response(text, error.status_code, media_type="text/plain")
            await _safe(answer)(scope, receive, send)

    def _routes(self) -> list[Route]:
        own = [
            Route("/login", self._login, methods=["GET", "POST"]),
            Route("/logout", self._logout, methods=["POST"]),
            Route("/static/{name}", self._static),
            Route("/favicon.ico", self._favicon),
            Route("/jobs/{job}/heat", self._heat),
            Route("/incidents/{incident}/evidence/{evidence}", self._download),
            Route("/incidents/{incident}.md", self._data(self._markdown)),
        ]
        if self._bundle is not None:
            own.append(Route("/", self._bundle_start))
            absent = (*_NOT_IN_BUNDLES, "/do/{verb}")
            own += [Route(path, self._page(_not_in_bundle)) for path in absent]
        else:
            own += [
                Route("/live", self._passing("facts/stream")),
                Route("/jobs/{job}/logs/live", self._lines),
                Route("/do/{verb}", self._act, methods=["GET", "POST"]),
            ]
        return [*own, *(Route(path, self._page(make)) for path, make in PAGES.items())]

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        """REST's paths; a browser that asks for another one gets a page, too."""
        request = Request(scope)
        is_browser = "text/html" in request.headers.get("accept", "")
        if not is_browser or request.method != "GET" or request.url.path.startswith("/api/"):
            await self._rest.app(scope, receive, send)
            return
        answer = await self._guarded(request, _no_such_page)
        await answer(scope, receive, send)

    async def _bundle_start(self, request: Request) -> Response:
        """A bundle has one job, with whose page it begins."""
        assert self._bundle is not None
        if not session.token_of(request):
            return await self._to_login(request)
        return _safe(RedirectResponse(f"/{path_of('jobs', self._bundle.job)}", 303))

    def _page(self, make: Make) -> Callable[[Request], Awaitable[Response]]:
        return partial(self._guarded, make=make)

    async def _guarded(self, request: Request, make: Make) -> Response:
        """A page, or why there is none; never a traceback."""
        token = session.token_of(request)
        if not token:
            return await self._to_login(request)
        reader = self._reader(request, token)
        status: Mapping[str, Any] | None = None
        try:
            status_read, page = await together(reader.get_or_not("status"), make(reader, request))
            status = status_read.data
            if status_read.status == 403:  # pages do without what they may not read
                page = _refused(RestError(403, status_read.problem))
        except RestError as error:
            if error.status == 401:
                return await self._to_login(request, error.detail)
            page = _refused(error)
            status = (await reader.get_or_not("status")).data
        except Exception as error:  # noqa: BLE001  it is logged
            failure = _failure(request.url.path, error, is_bundle=self._bundle is not None)
            page = Page("error.html", failure, 500)
        return await self._render(request, page, _Shell(token, reader, status))

    def _reader(self, request: Request, token: str) -> Reader:
        return self._rest.reader(_visitor(request, token))

    async def _render(self, request: Request, page: Page, shell: _Shell) -> Response:
        assets, now = await self._loaded(), self._clock.wall()
        theme = request.cookies.get("everstep_theme", "")
        context = {
            "title": "Everstep",
            "path": request.url.path,
            "query": request.query_params,
            "query_without_cursor": without_cursor(request),
            "theme": theme if theme in {"dark", "light"} else "",
            "is_in": shell.reader is not None,
            "scope": shell.reader.scope if shell.reader else "",
            "form_key": session.form_key(shell.token) if shell.token else "",
            "banners": [] if self._bundle is not None else _banners(shell, now),
            "bundle": self._bundle,
            "may_act": self._bundle is None
            and shell.reader is not None
            and shell.reader.scope in {"operate", "admin"},
            "version": __version__,
            "status": shell.status,
            "now": now,
            "when": partial(when, now=now),
            "is_excluded": partial(is_excluded, now=now),
            "actions": actions.ACTIONS,
            **page.values,
        }
        template = assets.environment.get_template(page.template)
        is_packed = "gzip" in request.headers.get("accept-encoding", "")
        body, status = await asyncio.to_thread(
            _rendered, template, context, page.status, is_packed=is_packed
        )
        headers = {"Vary": "Accept-Encoding"} | ({"Content-Encoding": "gzip"} if is_packed else {})
        return _safe(Response(body, status, headers, page.media_type))

    async def _loaded(self) -> Assets:
        if self._assets is None:
            async with self._loading:
                if self._assets is None:
                    self._assets = await asyncio.to_thread(shared_assets)
        return self._assets

    async def _static(self, request: Request) -> Response:
        return _safe((await self._loaded()).answer(request))

    async def _favicon(self, _request: Request) -> Response:
        return RedirectResponse((await self._loaded()).url("mark.svg"), 307)

    async def _to_login(self, request: Request, problem: str = "") -> Response:
        if session.comes_from_another_site(request) and request.method == "GET":
            # The cookie is not sent along a link from elsewhere: our own page asks once more.
            target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
            again = Page("again.html", {"target": target})
            return await self._render(request, again, _Shell("", None, None))
        if request.url.path != "/" or problem:
            target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
            there = f"/login?next={quote(target, safe='/')}"
            return _safe(RedirectResponse(there, 303))
        return _safe(RedirectResponse("/login", 303))

    async def _login(self, request: Request) -> Response:
        target = _own_path(request.query_params.get("next", "/"))
        code = request.query_params.get("code", "")
        if code and request.method == "GET" and not session.comes_from_another_site(request):
            try:
                token = await self._codes.take(code)
            except StoreError:
                return await self._login_page(request, _NO_DATABASE, 503)
            if token is not None:
                return await self._logged_in(request, token, target)
            return await self._login_page(request, "This link was used, or is older than a minute.")
        if request.method in {"GET", "HEAD"}:
            return await self._login_page(request, "")
        if not session.comes_from_here(request):
            return await self._login_page(request, "The form came from another site.", 403)
        form = await session.form_fields(request, _LOGIN_FIELDS)
        return await self._logged_in(request, form.get("token", "").strip(), target)

    async def _logged_in(self, request: Request, token: str, target: str) -> Response:
        if not token or not token.isascii() or not token.isprintable():
            return await self._login_page(request, "Paste a token: it begins with evs_.")
        reader = self._reader(request, token)
        answer = await self._rest.ask(reader.visitor, "GET", "status", "")
        if answer[0] == 401:
            return await self._login_page(request, "This token is not known, or has ended.", 401)
        if answer[0] == 429:
            return await self._login_page(request, "Too many bad tokens: wait a minute.", 429)
        if answer[0] == 403:
            return await self._login_page(request, _ONLY_SENDS, 403)
        if answer[0] != 200:
            return await self._login_page(request, _NO_DATABASE, 503)
        response = RedirectResponse(target, 303)
        session.log_in(request, response, token)
        return _safe(response)

    async def _login_page(self, request: Request, problem: str, status: int = 200) -> Response:
        page = Page("login.html", {"title": "Log in", "problem": problem}, status)
        return await self._render(request, page, _Shell("", None, None))

    async def _logout(self, request: Request) -> Response:
        token = session.token_of(request)
        form = await session.form_fields(request, _LOGOUT_FIELDS)
        response: Response = RedirectResponse("/login", 303)
        if token and session.is_own_form(request, token, form.get("key", "")):
            session.log_out(request, response)
        return _safe(response)

    async def _act(self, request: Request) -> Response:
        token = session.token_of(request)
        if not token:
            return await self._to_login(request)
        action = actions.ACTIONS.get(request.path_params["verb"])
        if request.method == "GET" or action is None:
            return await self._guarded(request, actions.ask)
        form = await session.form_fields(request, action.names)
        if not session.is_own_form(request, token, form.get("key", "")):
            text = "The form is not one of ours: open the page again, and confirm there."
            page = Page("error.html", {"title": "Nothing was done", "detail": text}, 403)
            return await self._render(request, page, _Shell(token, None, None))
        return await self._guarded(request, partial(actions.do, form=form))

    def _data(
        self, make: Callable[[Reader, Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            token = session.token_of(request)
            if not token:
                return _safe(Response("log in first\n", 401, media_type="text/plain"))
            try:
                return _safe(await make(self._reader(request, token), request))
            except RestError as error:
                return _safe(Response(f"{error.detail}\n", error.status, media_type="text/plain"))

        return answered

    async def _markdown(self, reader: Reader, request: Request) -> Response:
        page = await incidents.markdown(reader, request)
        return await self._render(request, page, _Shell(reader.visitor.token, reader, None))

    def _passing(self, path: str) -> ASGIApp:
        async def passed(scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope)
            token = session.token_of(request)
            if not token or session.comes_from_another_site(request):
                answer = Response("log in first\n", 401, media_type="text/plain")
                await _safe(answer)(scope, receive, send)
                return
            await self._rest.pass_on(_visitor(request, token), path, scope, receive, send)

        return _Application(passed)

    async def _heat(self, request: Request) -> Response:
        path = f"{path_of('jobs', request.path_params['job'])}/heat-map"
        passing = self._passing(path)

        async def passed(scope: Scope, receive: Receive, send: Send) -> None:
            """A job without a picture does not count as an error of the page."""
            is_none = False

            async def sent(message: Message) -> None:
                nonlocal is_none
                if message["type"] == "http.response.start" and message["status"] == 404:
                    is_none = True
                    await Response(status_code=204)(scope, receive, send)
                elif not is_none:
                    await send(message)

            await passing(scope, receive, sent)

        return _Passed(passed)

    async def _lines(self, request: Request) -> Response:
        path = f"{path_of('jobs', request.path_params['job'])}/logs/stream"
        return _Passed(self._passing(path))

    async def _download(self, request: Request) -> Response:
        names = request.path_params
        path = path_of("incidents", names["incident"], "evidence", names["evidence"])
        return _Passed(self._passing(path))


class _Application:
    """An application that a route takes as it is, not as a function of a request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class _Passed(Response):
    """An answer that REST gives itself."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


async def _no_such_page(_reader: Reader, request: Request) -> Page:
    raise RestError(404, f"nothing is at {request.url.path}")


async def _not_in_bundle(_reader: Reader, _request: Request) -> Page:
    text = "This is an exported bundle: it is read-only, and the cluster is not connected to it."
    return Page("error.html", {"title": "Not in a bundle", "detail": text}, 404)


_ONLY_SENDS = "This token sends notices, and reads nothing: log in with a token of the scope read."
_NO_DATABASE = "Nobody can be logged in while the database is away: try again in a moment."
_UNREADABLE = "This part of the bundle cannot be read"
_FAILED = (
    "This is an error of Everstep; the log of the history service has it. Other pages still work."
)


def _rendered(
    template: Any, context: Mapping[str, Any], status: int, *, is_packed: bool
) -> tuple[bytes, int]:
    """The page; where its template does not bear the data, a sentence and no traceback."""
    text, status = _text(template, context, status)
    data = text.encode(errors="replace")
    return (gzip.compress(data, 5, mtime=0) if is_packed else data), status


def _text(template: Any, context: Mapping[str, Any], status: int) -> tuple[str, int]:
    try:
        return template.render(context), status
    except Exception as error:  # noqa: BLE001  it is logged
        about = _failure(context["path"], error, is_bundle=context["bundle"] is not None)
        failed = template.environment.get_template("error.html")
        return failed.render({**context, **about}), 500


def _failure(path: str, error: Exception, *, is_bundle: bool) -> dict[str, str]:
    """The texts of a page that failed. Values that cannot be read are the fault of a bundle."""
    text = damage_text(error) if is_bundle else None
    if text:
        log.warning("page_failed path=%s error=%s", path, text)
        return {"title": _UNREADABLE, "detail": f"{text[0].upper()}{text[1:]}"}
    log.error("page_failed path=%s", path, exc_info=error)
    return {"title": "This page failed", "detail": _FAILED}


def _visitor(request: Request, token: str) -> Visitor:
    client = request.client
    address = (client.host, client.port) if client else ("local", 0)
    return Visitor(token, address, request.headers.get("host", ""))


def _safe(response: Response) -> Response:
    for name, value in _SAFE.items():
        response.headers.setdefault(name, value)
    response.headers.setdefault("Cache-Control", "no-store")
    return response


def _refused(error: RestError) -> Page:
    titles = {
        400: "This address has a wrong value",
        403: "Your token does not allow this",
        404: "There is no such page",
        422: "This address has a wrong value",
    }
    title = titles.get(error.status, "This cannot be shown now")
    if error.code == "bundle_damaged":
        title = _UNREADABLE
    return Page("error.html", {"title": title, "detail": error.detail}, error.status)


def _banners(shell: _Shell, now: Any) -> list[tuple[str, str]]:
    """What a visitor must know about the age of the data: tone and text."""
    banners: list[tuple[str, str]] = []
    reader, status = shell.reader, shell.status
    if reader is None:
        return banners
    if reader.stale_s is not None and not reader.silence:
        age = relative(reader.stale_s)
        banners.append(("bad", f"{reader.stale_reason}. This page shows what was read {age}."))
    elif status is None:
        banners.append(("bad", "The database cannot be read now: this page may lack parts."))
    if status is not None and (reader.silence or not status["is_bus_connected"]):
        banners.append(("warn", _of_bus(reader, status, now)))
    if status is not None and status["is_rebuilding"]:
        reach = f"{status['projected_n']} of {status['last_n']} facts"
        banners.append(("info", f"The tables are being made again: they reach {reach}."))
    return banners


def _of_bus(reader: Reader, status: Mapping[str, Any], now: Any) -> str:
    is_away = not status["is_bus_connected"]
    texts = ["The bus is away: the record does not grow." if is_away else f"{reader.silence}."]
    if status["stream_read_at"]:
        texts.append(f"The newest fact was written {_age(status['stream_read_at'], now)}.")
    if reader.stale_s is not None:
        texts.append(f"This page shows what was read {relative(reader.stale_s)}.")
    return " ".join(texts)


def _age(text: str, now: Any) -> str:
    return when(text, now).striptags()


def _own_path(target: str) -> str:
    """A path of this site, whatever a link says."""
    is_own = target.startswith("/") and target[1:2] not in {"/", "\\"}
    return target if is_own and target.isprintable() else "/"
