"""Parameters in paths and filters that several endpoints share."""

import ast
import re
import sys
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Unpack

from fastapi import Path as PathParameter
from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field

from everstep_services.history.api.http.problems import ProblemError

NAME = r"^[A-Za-z0-9_-]{1,128}$"
TEXT = r"^[^\x00-\x1f\x7f]*$"
LARGEST = 2**53 - 1
_MOMENT = re.compile(
    r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d(:\d\d([.]\d+)?)?([Zz]|[+-]\d\d:?\d\d)", re.ASCII
)
_WHOLE = re.compile(r"-?\d{1,40}", re.ASCII)


@cache
def _strings_under_fields(module: str) -> dict[tuple[str, str], str]:
    """By class and field, on one line each. Pydantic's own way reads a file once for each class."""
    path = sys.modules[module].__file__
    assert path is not None
    classes = [
        node for node in ast.parse(Path(path).read_bytes()).body if isinstance(node, ast.ClassDef)
    ]
    return {
        (of.name, field.target.id): " ".join(str(under.value.value).split())
        for of in classes
        for field, under in pairwise(of.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(under, ast.Expr) and isinstance(under.value, ast.Constant)
    }


class DescribedModel(BaseModel):
    """A shape whose fields are described by `Field`, or by the string that stands under one."""

    def __init_subclass__(cls, **rest: Unpack[ConfigDict]) -> None:
        super().__init_subclass__(**rest)
        for (of, name), text in _strings_under_fields(cls.__module__).items():
            if of == cls.__name__:
                hint = cls.__annotations__[name]
                cls.__annotations__[name] = Annotated[hint, Field(description=text)]


class RequestModel(DescribedModel):
    """The parameters or the body of a request; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid")


def check_window(
    since: datetime | None, until: datetime | None, now: datetime, *, prefix: str = ""
) -> None:
    """Refuse a window that can have nothing in it: in the future, or with its end before it.

    The names of the parameters begin with `prefix`.
    """
    if since is not None and until is not None and not since < until:
        raise ProblemError(
            400,
            "bad_window",
            f"the window ends ({_shown(until)}) before it begins ({_shown(since)}): "
            f"give an `{prefix}until` that is later than `{prefix}since`",
        )
    if since is not None and since > now:
        raise ProblemError(
            400,
            "bad_window",
            f"the window begins in the future: `{prefix}since` is {_shown(since)}, and it is "
            f"{_shown(now)} now; give a moment that has passed",
        )


def _shown(at: datetime) -> str:
    with suppress(OverflowError):  # in UTC it would be before the year 1, or after the year 9999
        at = at.astimezone(UTC)
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")


def _flag(value: object) -> object:
    if value not in {None, "true", "false", True, False} or type(value) in {int, float}:
        raise ValueError("write true or false")
    return value


def _whole(value: object) -> object:
    if isinstance(value, str) and not _WHOLE.fullmatch(value):
        raise ValueError("write a whole number, in digits")
    return value


def _moment(value: object) -> object:
    if isinstance(value, str) and not _MOMENT.fullmatch(value):
        raise ValueError("write a moment as 2026-01-31T12:00:00Z")
    return value


def _within_calendar(at: datetime) -> datetime:
    with suppress(OverflowError):
        at = at.astimezone(UTC)
        _ = at - timedelta(days=1)  # what an endpoint may subtract from a moment
        return at
    raise ValueError("write a moment from 0001-01-02 to 9999-12-31, in UTC")


Flag = Annotated[bool, BeforeValidator(_flag)]
LITERAL = BeforeValidator(_whole)
Whole = Annotated[int, Field(ge=0, le=LARGEST), LITERAL]
Moment = Annotated[AwareDatetime, BeforeValidator(_moment), AfterValidator(_within_calendar)]
"""Values in a URL, each with exactly one spelling: others are refused."""
Word = Annotated[str, Field(max_length=256, pattern=TEXT)]

JobName = Annotated[
    str, PathParameter(pattern=NAME, description="The job's id.", examples=["llama-8b"])
]
RoundNumber = Annotated[Whole, PathParameter(description="The round's number.")]
NodeName = Annotated[
    str, PathParameter(pattern=NAME, description="The node's id.", examples=["node-07"])
]
