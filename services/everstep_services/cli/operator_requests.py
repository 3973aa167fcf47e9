"""How commands get something done: by the API, or straight over the bus while the API is away."""

import asyncio
import os
import pwd
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import click
import msgspec

from everstep.subjects import CLUSTER
from everstep_services.cli.api.client import Api
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation, with_api_options
from everstep_services.cli.output import echo, print_record, say

if TYPE_CHECKING:
    from everstep.bus.ports import Bus
    from everstep_services.history.operator_requests import Verb

NO_REASON = "no reason given"


def asker() -> str:
    """The user who runs this command, and the host."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # as in containers
        name = f"uid-{os.getuid()}"
    return f"{name}@{socket.gethostname()}"


@dataclass(frozen=True, slots=True)
class CommandRequest:
    """A request of a person, and the reason."""

    verb: "Verb"
    reason: str
    job: str | None = None
    """None for the one that the node takes part in: the API finds out which. `CLUSTER` for none."""
    node: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    """The other fields of the question."""
    user: str = field(default_factory=asker)
    """Who asks, as REST records it together with the token's name."""

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the question besides job, person and reason."""
        return dict(self.details) if self.node is None else {**self.details, "node": self.node}

    def tell(self, api: Api) -> Any:
        """Ask the API for it."""
        kind, name = ("jobs", self.job) if self.node is None else ("nodes", self.node)
        return api.post(f"{kind}/{quoted(name)}:{self.verb}", self._body())

    def _body(self) -> dict[str, Any]:
        body = {"reason": self.reason, "user": self.user, **self.details}
        is_of_a_job = self.node is not None and self.job != CLUSTER
        return {**body, "job": self.job} if is_of_a_job else body


@dataclass(frozen=True, slots=True)
class ExclusionRequest(CommandRequest):
    """A node to keep out."""

    is_forced: bool = False
    """Also if nobody has heard of the node."""

    def tell(self, api: Api) -> Any:
        """Ask the API for it."""
        force = {"force": True} if self.is_forced else {}  # an older history knows no `force`
        return api.post(f"nodes/{quoted(self.node)}:exclude", {**self._body(), **force})


@dataclass(frozen=True, slots=True)
class LimitRequest(CommandRequest):
    """A limit to set; 0 s has it learned again."""

    def tell(self, api: Api) -> Any:
        """Ask the API for it."""
        place, who = f"jobs/{quoted(self.job)}/limits", {"reason": self.reason, "user": asker()}
        section, limit_s = self.details["section"], self.details["limit_s"]
        if not limit_s:
            return api.delete(place, section or OUTSIDE, who)
        return api.put(place, section or OUTSIDE, {**who, "limit_s": limit_s})


@dataclass(frozen=True, slots=True)
class ControlRequest(CommandRequest):
    """Switches to change, of one job or of all."""

    def tell(self, api: Api) -> Any:
        """Ask the API for it."""
        job = None if self.job == CLUSTER else self.job
        return api.post("control", {**self._body(), "job": job})


@dataclass(frozen=True, slots=True)
class CheckpointRequest(CommandRequest):
    """Something about the checkpoint of a step."""

    @classmethod
    def of(cls, action: str, job: str, step: int, reason: str, tier: str = "global") -> Self:
        """Do this about that step in a tier."""
        return cls("change", reason, job, details={"action": action, "step": step, "tier": tier})

    def tell(self, api: Api) -> Any:
        """Ask the API for it."""
        action = f"{self.details['step']}:{self.details['action']}"
        body = {"reason": self.reason, "user": self.user, "tier": self.details["tier"]}
        return api.post(f"jobs/{quoted(self.job)}/checkpoints/{action}", body)


@dataclass(frozen=True, slots=True)
class ScanRequest(CommandRequest):
    """The index compared with the files."""

    def tell(self, api: Api) -> Any:
        """Ask the API for it."""
        body = {"reason": self.reason, "user": asker(), **self.details}
        return api.post(f"jobs/{quoted(self.job)}/checkpoints:scan", body)


OUTSIDE = "outside"
"""The name for people of the time outside all sections; on the bus it has the empty name."""


def with_reason(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of those that get something done."""
    reason = click.option(
        "--reason", default=NO_REASON, metavar="TEXT", help="Why, for the record."
    )
    return with_api_options(reason(command))


def fulfil(invocation: Invocation, wish: CommandRequest) -> None:
    """Send the request, and print the answer."""
    done = _by_api(invocation, wish)
    if done is None:
        done = asyncio.run(_over_the_bus(invocation, wish))
    if invocation.output is None:
        echo(f"{done['job'] or done['node'] or 'all jobs'}: {done['text']}")
    else:
        print_record(invocation, "decided", done, "job")


async def _check_heard(bus: "Bus", node: str) -> None:
    """Refuse a node that health knows nothing of: over the bus, there is no record to ask."""
    from everstep.messages import NodeStanding, NodeStandings, ShowNodes
    from everstep_services.history import operator_requests

    async def standings(*nodes: str) -> tuple[NodeStanding, ...]:
        question = ShowNodes(job=CLUSTER, nodes=nodes)
        answer = await operator_requests.ask(
            bus, "health", "nodes", question, NodeStandings, see="nodes"
        )
        return answer.nodes

    if any(standing.state != "unknown" for standing in await standings(node)):
        return
    heard = [standing.node for standing in await standings()]
    problem = operator_requests.unknown_nodes([node], heard)
    raise CliError(operator_requests.force_hint(problem), Exit.USAGE)


def quoted(name: str | None) -> str:
    """As part of a path."""
    return quote(name or "", safe="")


def _by_api(invocation: Invocation, wish: CommandRequest) -> dict[str, Any] | None:
    """None when there is none, or it is away, and a bus is known that can be asked instead."""
    from everstep_services.cli.api.location import find_api
    from everstep_services.cli.machine.bus_settings import named_bus

    place = find_api(invocation)
    if place is None:
        return None
    with place.open() as api:
        try:
            api.get("status")  # what follows is asked once, and not again in another way
        except CliError as error:
            if error.code is not Exit.UNREACHABLE or named_bus(invocation) is None:
                raise
            say(f"{error}; asking over the bus")
            return None
        done: dict[str, Any] = wish.tell(api)
        return done


async def _over_the_bus(invocation: Invocation, wish: CommandRequest) -> dict[str, Any]:
    from everstep.bus import connect
    from everstep.bus.errors import BusError
    from everstep_services.cli.machine.bus_settings import named_bus
    from everstep_services.history import operator_requests

    settings = await asyncio.to_thread(named_bus, invocation)
    if settings is None:
        raise CliError(
            "no control plane is known: start one with `everstep up`, or name it with --api URL, "
            "url in [client] or url in [bus]",
            Exit.UNREACHABLE,
        )
    if wish.job is None:
        raise CliError(f"name the job of {wish.node} with --job: only the API knows", Exit.USAGE)
    request = operator_requests.OperatorRequest(
        wish.verb, wish.job, asker(), wish.reason, "cli", wish.fields
    )
    settings = msgspec.structs.replace(settings, spool_dir=None)  # nothing is recorded from here
    async with connect(settings, "cli") as bus:
        try:
            if isinstance(wish, ExclusionRequest) and not wish.is_forced:
                await _check_heard(bus, wish.node or "")
            text = await operator_requests.carry_out(bus, request)
        except operator_requests.NoSuchJobError as error:
            try:
                jobs = await bus.documents("ROUNDS").keys()
            except BusError:  # the login of one job's agents may not list the others
                jobs = []
            raise CliError(
                f"{error}{operator_requests.similar_names(request.job, jobs)}", Exit.NOT_FOUND
            ) from error
        except operator_requests.RequestRefusedError as error:
            about = wish.job if wish.job != CLUSTER else wish.node or "the cluster"
            raise CliError(f"{wish.verb} of {about} refused: {error}") from error
        except operator_requests.ServiceUnavailableError as error:
            raise CliError(f"{error}; see everstep doctor", Exit.UNREACHABLE) from error
    job = None if request.job == CLUSTER else request.job
    return {"job": job, "action": request.verb, "node": wish.node, "by": request.by, "text": text}
