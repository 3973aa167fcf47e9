"""Sends requests of people, from REST and from commands, to the service that carries them out."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from everstep.bus.errors import AskRefusedError, AskTimeoutError, BusDeniedError, BusError
from everstep.bus.ports import Bus
from everstep.errors import EverstepError
from everstep.ids import new_id
from everstep.messages import (
    ChangeCheckpoint,
    CorrectVerdict,
    Done,
    DrainNode,
    ExcludeNode,
    IncludeNode,
    Message,
    Question,
    RequestChecks,
    RequestEvidence,
    RequestMeasurement,
    RequestSave,
    RestartJob,
    RoundDocument,
    ScanCheckpoints,
    SectionLimit,
    SetControl,
    SetLimit,
    ShowRound,
    StopJob,
)
from everstep.messages.facts.incidents import CAPTURE
from everstep.subjects import CLUSTER

WITHIN_S = 12.0
"""The wait for one answer: two such waits fit into the patience of a client of the API."""
LOOK_WITHIN_S = 1.5
"""The wait for an answer that the caller can do without."""
_UNKNOWN_SHOWN = 10

M = TypeVar("M", bound=Message)
Verb = Literal[
    "capture",
    "stop",
    "restart",
    "save",
    "drain",
    "check",
    "measure",
    "exclude",
    "include",
    "set_limit",
    "control",
    "change",
    "correct",
    "scan",
]
"""The actions that a person can request."""


class RequestError(EverstepError):
    """The request was not carried out, or its outcome is unknown."""


class NoSuchJobError(RequestError):
    """The service knows no job of this name."""

    def __init__(self, job: str) -> None:
        super().__init__(f"there is no job {job}")
        self.job = job


class RequestRefusedError(RequestError):
    """The service refused the request in the present state."""


class ServiceUnavailableError(RequestError):
    """The bus or the service cannot be reached, or does not answer in time."""


@dataclass(frozen=True, slots=True)
class OperatorRequest:
    """One action that a person requests."""

    verb: Verb
    job: str
    """`everstep.subjects.CLUSTER` for what is about no job."""
    by: str
    reason: str
    origin: str
    details: Mapping[str, Any] = field(default_factory=dict)
    """The other fields of its question; a `round` of None means the newest."""

    @property
    def service(self) -> str:
        """The service that carries it out."""
        return _WAYS[self.verb].service


@dataclass(frozen=True, slots=True)
class _Way:
    """The service, the question to it, and the command that shows the outcome."""

    service: str
    question: Callable[..., Question]
    see: str
    asks: str = ""
    """The service's own verb, where it differs."""


def _set_limit(*, section: str, limit_s: float, **asker: Any) -> SetLimit:
    limit = SectionLimit(section=section, limit_s=limit_s, source="configured")
    return SetLimit(limit=limit, **asker)


def _check(*, node: str, checks: tuple[str, ...] = (), **asker: Any) -> RequestChecks:
    return RequestChecks(nodes=(node,), checks=checks, **asker)


def _measure(*, test: str | None, **asked: Any) -> RequestMeasurement:
    return RequestMeasurement(test=test or new_id(), **asked)


def _capture(*, capture: str | None, **asked: Any) -> RequestEvidence:
    return RequestEvidence(incident=f"{CAPTURE}{capture or new_id()}", **asked)


_WAYS: Mapping[Verb, _Way] = {
    "capture": _Way(
        "rendezvous", _capture, "facts --job {job} --kind evidence_collected", "evidence"
    ),
    "stop": _Way("rendezvous", StopJob, "job show {job}"),
    "restart": _Way("rendezvous", RestartJob, "job show {job}"),
    "save": _Way("rendezvous", RequestSave, "job show {job}"),
    "drain": _Way("rendezvous", DrainNode, "job show {job}"),
    "check": _Way("rendezvous", _check, "node show {node}"),
    "measure": _Way("rendezvous", _measure, "facts --job {job} --kind network_measured"),
    "exclude": _Way("health", ExcludeNode, "node show {node}"),
    "include": _Way("health", IncludeNode, "node show {node}"),
    "set_limit": _Way("health", _set_limit, "limits {job}"),
    "control": _Way("health", SetControl, "control show"),
    "change": _Way("catalog", ChangeCheckpoint, "ckpt ls {job}"),
    "correct": _Way("attribution", CorrectVerdict, "why {job}"),
    "scan": _Way("catalog", ScanCheckpoints, "ckpt ls {job}"),
}


async def carry_out(bus: Bus, deed: OperatorRequest) -> str:
    """Send the request; return the service's answer, or raise `RequestError`."""
    way, details = _WAYS[deed.verb], dict(deed.details)
    see = way.see.format(job=deed.job, node=details.get("node"))
    if deed.verb == "restart" and details.get("round") is None:
        show = ShowRound(job=deed.job)
        document = await ask(bus, "rendezvous", "show", show, RoundDocument, see=see)
        details["round"] = document.round
    question = way.question(
        job=deed.job, by=deed.by, reason=deed.reason, origin=deed.origin, **details
    )
    done = await ask(bus, way.service, way.asks or deed.verb, question, Done, see=see)
    if done.is_refused:
        raise RequestRefusedError(done.text)
    return done.text


async def ask(  # noqa: PLR0913  what to ask of whom, and for how long
    bus: Bus,
    service: str,
    verb: str,
    question: Question,
    of: type[M],
    *,
    see: str,
    within_s: float = WITHIN_S,
) -> M:
    """The answer, or a `RequestError`; `see` is the command that shows the outcome."""
    try:
        return await bus.ask(service, verb, question, of, job=question.job, within_s=within_s)
    except BusDeniedError:
        raise
    except AskRefusedError as error:
        if error.code == "404" and question.job != CLUSTER:
            raise NoSuchJobError(question.job) from error
        if error.code in {"404", "422"}:
            raise RequestRefusedError(error.text) from error
        raise ServiceUnavailableError(f"{service} cannot do it now: {error.text}") from error
    except AskTimeoutError as error:
        # The service may have done it, or may do it later.
        text = f"{error}; see everstep {see} before you ask again"
        raise ServiceUnavailableError(text) from error
    except BusError as error:
        raise ServiceUnavailableError(f"{service} cannot be asked: {error}") from error


def unknown_nodes(
    names: Sequence[str], candidates: Iterable[str], aliases: Mapping[str, str] | None = None
) -> str:
    """The refusal of names that no node has; `aliases` has the node of each other name."""
    nodes = aliases or {}
    shown = [
        repr(name[:128]) + (f" (an alias of {nodes[name]!r})" if name in nodes else "")
        for name in names[:_UNKNOWN_SHOWN]
    ]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    hint = did_you_mean(names[0], candidates, most=1) or "; see everstep nodes"
    return f"no node is called {', '.join(shown)}{more}{hint}"


def force_hint(refusal: str) -> str:
    """The refusal of an exclusion, with the way to exclude a node before it first joins."""
    end = "" if refusal.endswith("?") else "."
    return f"{refusal}{end} With force, a node is excluded before it first joins"


def similar_names(name: str, candidates: Iterable[str]) -> str:
    """The names that are close to this one, as the end of a sentence."""
    names = list(candidates)
    if name in names:
        why = "it is over, or another launcher runs it"
        return f", only a record of one: {why}; see everstep job show {name}"
    return did_you_mean(name, names) or "; see everstep jobs"


def did_you_mean(name: str, candidates: Iterable[str], *, most: int = 3) -> str:
    """The names that are close to this one, as the end of a sentence; empty without any."""
    close = difflib.get_close_matches(name, list(candidates), n=most)
    return f"; did you mean {' or '.join(close)}?" if close else ""
