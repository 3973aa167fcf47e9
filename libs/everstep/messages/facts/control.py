"""Changes at run time: by operators, by services, and by fault injection."""

from typing import Literal, Protocol

from everstep.messages.base import Count, Fact, Name
from everstep.messages.facts.stamp import FactHead


class ControlChanged(Fact, frozen=True, kw_only=True, tag="control_changed.v1"):
    """A switch or a setting changed while the system ran.

    The service that wrote the document sends one fact for each name.
    """

    name: str
    """The dotted name: `brake`, `modes.exclude`, `catalog.keep_last` …"""
    before: str
    """The value before; empty when there was none."""
    after: str
    """The value from now on; empty for the default."""
    by: Name
    """Who changed it: an operator's name, or a service's."""
    reason: str
    """Why, in the words of that person or service."""
    origin: Name = ""
    """The interface: `rest`, `cli` or `service`."""
    revision: Count | None = None
    """The revision of the document in `CONTROL` that holds the change."""


class OperatorActed(Fact, frozen=True, kw_only=True, tag="operator_acted.v1"):
    """A person or a script asked for an action, which was accepted or refused.

    The service that was asked sends this; for a signal, the agent that got it.
    """

    by: Name
    """The person, as authenticated; or `rank 3 of node-1`."""
    action: Name
    """`stop_job`, `restart_job`, `save`, `drain_node`, `exclude_node`, `pin` …; `interrupt` is
    Ctrl-C, or another signal of a person, to the agent of a node."""
    target: str
    """What the action is about: a node, a step; empty for the whole job."""
    outcome: Name
    """`accepted` or `refused`."""
    reason: str
    """Why the action was asked for, and why it was refused if so."""
    origin: Name = ""
    """The interface: `rest`, `cli`, `script` or `signal`; `service` or `numerics` for a request
    that no person makes."""


class OperatorQuestion(Protocol):
    """A question that a person asks: it names the person and the interface."""

    @property
    def by(self) -> str:
        """The person, as authenticated."""

    @property
    def origin(self) -> str:
        """The interface, as in `operator_acted`."""


def operator_acted(
    head: FactHead,
    question: OperatorQuestion,
    subject: tuple[str, str],
    outcome: Literal["accepted", "refused"],
    reason: str,
) -> OperatorActed:
    """The fact about a person's question; `subject` is the action and its target."""
    action, target = subject
    return OperatorActed(
        **head,
        by=question.by,
        action=action,
        target=target,
        outcome=outcome,
        reason=reason,
        origin=question.origin,
    )


class FaultInjected(Fact, frozen=True, kw_only=True, tag="fault_injected.v1"):
    """A fault was made on purpose, as a test.

    The process that injects the fault sends this first, so that nobody mistakes the fault for a
    real one.
    """

    fault: str
    """`kill`, `stop`, `hang`, `slow`, `hold_gil`, `corrupt`, `disk_full`, `cut_off` …"""
    by: Name
    """The person or the test that injects the fault."""
    node: Name | None = None
    """The node that is hit."""
    rank: Count | None = None
    """The rank that is hit."""
    target: str = ""
    """What else is hit: a service, a file, a step."""
    lasts_s: float | None = None
    """How long the fault lasts; None if it does not end."""
    expected: str = ""
    """What should follow from the fault."""
