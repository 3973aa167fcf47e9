"""Every error as `application/problem+json` (RFC 9457): what to do, without internals."""

import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from everstep.store.errors import QueryTooLongError, StoreError
from everstep_services.history.bundle import damage_text

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
_TYPE = "urn:everstep:problem:"


class FieldProblem(BaseModel):
    """What is wrong with one part of a request."""

    model_config = ConfigDict(title="FieldProblem")

    where: str = Field(description="The part, as `query.limit` or `body.name`.")
    problem: str = Field(description="What is wrong with that part.")


class ProblemAnswer(BaseModel):
    """Why a request was not answered (RFC 9457)."""

    model_config = ConfigDict(title="Problem")

    type: str = Field(description="Names the kind of problem.", examples=[_TYPE + "not_found"])
    title: str = Field(description="The status in words.", examples=["Not Found"])
    status: int = Field(description="The HTTP status.", examples=[404])
    detail: str = Field(description="What happened, and what to do.")
    instance: str = Field(description="The path that was asked.", examples=["/api/v1/jobs/x"])
    code: str = Field(description="The kind of problem, for programs.", examples=["not_found"])
    errors: list[FieldProblem] | None = Field(
        None, description="Each part of the request that is wrong."
    )


class ProblemError(HTTPException):
    """Ends a request with a problem."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        errors: Sequence[Mapping[str, str]] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, detail, dict(headers or {}))
        self.code = code
        self.errors = errors

    def response(self, path: str) -> Response:
        """The problem as a response."""
        body: dict[str, Any] = {
            "type": _TYPE + self.code,
            "title": HTTPStatus(self.status_code).phrase,
            "status": self.status_code,
            "detail": self.detail,
            "instance": path,
            "code": self.code,
        }
        if self.errors:
            body["errors"] = self.errors
        headers = {"Cache-Control": "no-store", **(self.headers or {})}
        return Response(msgspec.json.encode(body), self.status_code, headers, MEDIA_TYPE)

    async def send(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the problem from outside the application."""
        await self.response(scope["path"])(scope, receive, send)


def not_found(name: str) -> ProblemError:
    """The problem of a name that is not on record."""
    return ProblemError(404, "not_found", f"there is no {name}")


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What OpenAPI says about the problems of an endpoint, those of all of them included."""
    every = {400, 401, 403, 413, 414, 422, 429, 431, 500, 503, *statuses}
    return {
        status: {
            "description": HTTPStatus(status).phrase,
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in sorted(every)
    }


def of_store(error: StoreError) -> ProblemError:
    """The problem of a failed query, without the address of the database."""
    log.warning("query_failed error=%s", error)
    if isinstance(error, QueryTooLongError):
        detail = "the query took too long and was stopped: narrow it by job, kind or time"
        return ProblemError(503, "query_too_long", detail)
    detail = "the database cannot be used now: try again later"
    return ProblemError(503, "database_unavailable", detail, headers={"Retry-After": "5"})


def handle(app: FastAPI) -> None:
    """Turn every error of an endpoint into a problem."""
    app.add_exception_handler(ProblemError, _on_problem)
    app.add_exception_handler(StoreError, _on_store)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(Exception, _on_bug)


async def _on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError)
    return error.response(request.url.path)


async def _on_store(request: Request, error: Exception) -> Response:
    assert isinstance(error, StoreError)
    return of_store(error).response(request.url.path)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        return not_found(f"resource at {path}").response(path)
    if error.status_code == 405:
        return _not_allowed(request, _methods_at(request))
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    return ProblemError(error.status_code, code, str(error.detail)).response(path)


def _not_allowed(request: Request, methods: Sequence[str]) -> Response:
    allowed = ", ".join(methods) or "GET"
    detail = f"{request.method} is not possible here: use {allowed}"
    problem = ProblemError(405, "method_not_allowed", detail, headers={"Allow": allowed})
    return problem.response(request.url.path)


def pattern_of(path: str) -> re.Pattern[str]:
    """The pattern of a route: a name in it has neither `/` nor the `:` before a verb."""
    parts = re.split(r"(\{[^}]*\})", path)
    return re.compile("".join(_PARAMETERS.get(_kind(part), re.escape(part)) for part in parts))


_PARAMETERS = {"path": ".+", "name": "[^/:]+"}


def _kind(part: str) -> str:
    if not part.startswith("{"):
        return ""
    return "path" if part.endswith(":path}") else "name"


def _methods_at(request: Request) -> list[str]:
    """All methods of this path: starlette names only those of its first route."""
    allowed: set[str] = set()
    for pattern, methods in request.app.state.methods:
        if pattern.fullmatch(request.scope["path"]):
            allowed |= methods
    return sorted(allowed | ({"HEAD"} if "GET" in allowed else set()))


_PROBLEMS = {"extra_forbidden": "there is no such parameter"}


async def _on_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    methods = _methods_at(request)
    if methods and request.method not in methods:
        return _not_allowed(request, methods)  # as `GET …:stop`: not the name of a job
    # Without the values: they may be secrets in the wrong place.
    errors = [
        {
            "where": ".".join(map(str, item["loc"])),
            "problem": _PROBLEMS.get(item["type"], str(item["msg"])),
        }
        for item in error.errors()
    ]
    detail = "; ".join(f"{error['where']}: {error['problem']}" for error in errors[:3])
    problem = ProblemError(422, "invalid_request", detail, errors=errors[:20])
    return problem.response(request.url.path)


async def _on_bug(request: Request, error: Exception) -> Response:
    # The error itself goes on to `RequestLimits`, which logs it.
    damage = damage_text(error) if request.state.context.bundle is not None else None
    if damage:
        return ProblemError(500, "bundle_damaged", damage).response(request.url.path)
    detail = "this is a bug in Everstep: see the log of the history service"
    return ProblemError(500, "internal", detail).response(request.url.path)
