"""Decides whether an agent may take part; explains and records refusals."""

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, assert_never

from everstep.messages import JobSpec, Join, NodeRefused, Option
from everstep.messages.base import shared
from everstep.observe.printable import beginning
from everstep_services.rendezvous.domain.batch import Batch
from everstep_services.rendezvous.domain.decisions import came_of, decide_to, only_say
from everstep_services.rendezvous.domain.ends import RETRYABLE
from everstep_services.rendezvous.domain.events import JobControl

_SAME_FOR_ALL = (
    "command",
    "ranks_per_node",
    "nodes_min",
    "nodes_max",
    "slots_per_unit",
    "slots_per_segment",
    "slots_per_group",
)
"""The fields that must be the same on all nodes of a job."""
DO_NOT_RESTART = 93
USAGE = 2
_RETRY_S = 30.0
_REFUSALS_KEPT = 1000

RefusalCause = Literal[
    "job_over",
    "different_job",
    "excluded",
    "unhealthy",
    "misconfigured",
    "wrong_version",
    "duplicate",
    "stale",
]
_UNFIT: frozenset[RefusalCause] = frozenset({"unhealthy", "excluded"})
"""The causes of a refusal that may end by themselves."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an agent may not take part."""

    cause: RefusalCause
    """As in `node_refused`."""
    reason: str
    checks: tuple[str, ...] = ()
    retry_after_s: float | None = None
    exit_code: int | None = None


def refusal(batch: Batch, ask: Join) -> Refusal | None:
    """Return why this agent may not take part; None if it may."""
    return (
        _wrong_version(batch.version, ask)
        or _different_job(batch, ask)
        or _excluded(batch.control, batch, ask)
        or _unhealthy(batch, ask)
        or _misconfigured(batch, ask)
    )


def reopens(batch: Batch, ask: Join) -> bool:
    """Whether an agent of a new allocation continues a job whose last allocation is over.

    A job that is done, or whose exit code forbids a restart, is not continued unless its command
    or settings have changed. Nobody can see whether a script that could not start was mended, so
    that job is tried again.
    """
    doc = batch.state.doc
    if ask.allocation == doc.allocation or ask.allocation in doc.allocations:
        return False
    if doc.phase == "done" or (doc.exit_code == DO_NOT_RESTART and not doc.is_mendable):
        return ask.spec.config_fingerprint != doc.spec.config_fingerprint
    return True


def job_over(batch: Batch) -> Refusal:
    """Return the refusal of a job that has ended."""
    doc = batch.state.doc
    text = f"job {doc.job} is over: {doc.reason}"
    if doc.is_mendable:
        text += "; repair the script, and start it again"
    elif doc.exit_code == DO_NOT_RESTART or doc.phase == "done":
        text += "; to run it again, change its command or settings, or give it another name"
    return Refusal("job_over", text, exit_code=doc.exit_code)


def changed_fields(before: JobSpec, after: JobSpec) -> tuple[str, ...]:
    """Return the names of the fields that differ."""
    if before == after:  # of thousands of agents all ask for the same
        return ()
    return tuple(
        name for name in before.__struct_fields__ if getattr(before, name) != getattr(after, name)
    )


def ends_soon(cause: RefusalCause) -> bool:
    """Whether the agent only waits for a moment, so that its refusal is not recorded."""
    match cause:
        case "duplicate" | "stale":
            return True
        case (
            "job_over"
            | "different_job"
            | "excluded"
            | "unhealthy"
            | "misconfigured"
            | "wrong_version"
        ):
            return False
        case _:
            assert_never(cause)


def given_up(batch: Batch, ask: Join, no: Refusal) -> Refusal:
    """Give up a node that was unfit for as long as a round may take to form, if none runs."""
    if no.cause not in _UNFIT:
        return no
    if batch.state.doc.phase != "joining":
        batch.timers.clear("unfit", ask.instance)
        return no
    batch.timers.start("unfit", ask.instance)
    if batch.timers.elapsed("unfit", ask.instance) < batch.join_within_s:
        return no
    reason = f"{no.reason}; this has lasted {batch.join_within_s:g} s: requeue the job elsewhere"
    return dataclasses.replace(no, reason=reason, exit_code=RETRYABLE)


def record_tolerated(batch: Batch, ask: Join) -> None:
    """Record an excluded node that may join, because exclusions only observe."""
    exclusion, key = (
        batch.control.exclusion(ask.node, batch.now.wall),
        f"{ask.node} exclude.observe",
    )
    if exclusion is None or key in batch.state.doc.refused:
        return
    _note(batch, key)
    reason = (
        f"{ask.node} is excluded by {exclusion.by}: {exclusion.reason}; exclusions only observe"
    )
    only_say(batch, "exclude", reason, rule="exclude.observe", nodes_out=(ask.node,))


def record_refused(batch: Batch, ask: Join, no: Refusal) -> None:
    """Record a refusal, once for each cause, not for each attempt."""
    doc, key = batch.state.doc, f"{ask.node} {no.cause}"
    if key in doc.refused:
        return
    _note(batch, key)
    if no.cause == "excluded":
        decide_to(
            batch,
            "exclude",
            no.reason,
            rule="exclude.control",
            considered=(
                Option(action="observe", rejected="exclusions are enforced: no brake is on"),
            ),
            nodes_out=(ask.node,),
        )
        came_of(batch, "done", f"{ask.node} was refused", "exclude")
    batch.record(NodeRefused(**shared(NodeRefused, no), **batch.head(), node=ask.node))


def _note(batch: Batch, key: str) -> None:
    """Remember that this refusal is recorded."""
    batch.state.set(refused=(*batch.state.doc.refused, key)[-_REFUSALS_KEPT:])


def _different_job(batch: Batch, ask: Join) -> Refusal | None:
    doc = batch.state.doc
    differs = [name for name in changed_fields(doc.spec, ask.spec) if name in _SAME_FOR_ALL]
    if not differs:
        return None
    differences = "; ".join(
        f"{name} is {_shown(getattr(ask.spec, name))} here and "
        f"{_shown(getattr(doc.spec, name))} in the job"
        for name in differs
    )
    return Refusal(
        "different_job",
        f"{ask.node} does not run what job {doc.job} runs: {differences}. Start every node with "
        f"the same command and options, or give this job another --job",
        exit_code=USAGE,
    )


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        value = " ".join(str(part) for part in value)
    text = str(value)
    return beginning(text, 120)


def _excluded(control: JobControl, batch: Batch, ask: Join) -> Refusal | None:
    exclusion = control.exclusion(ask.node, batch.now.wall)
    if (
        exclusion is None
        or _must_leave(batch, ask)
        or not control.enforces("exclude", otherwise=True)
    ):
        return None
    until = (
        f"until {exclusion.until:%Y-%m-%d %H:%M} UTC" if exclusion.until else "until it is included"
    )
    return Refusal(
        "excluded",
        f"{ask.node} is excluded by {exclusion.by} {until}: {exclusion.reason}",
        retry_after_s=_RETRY_S,
    )


def _must_leave(batch: Batch, ask: Join) -> bool:
    """Whether this agent only asks in order to hear that it must leave: it is not refused."""
    seat = batch.state.seat(ask.node)
    return seat is not None and seat.is_leaving and seat.instance == ask.instance


def _unhealthy(batch: Batch, ask: Join) -> Refusal | None:
    failed = [check for check in ask.checks if check.state == "failed"]
    if not failed or _must_leave(batch, ask):
        return None
    reasons = "; ".join(f"{check.check}: {check.reason or 'failed'}" for check in failed)
    return Refusal(
        "unhealthy",
        f"{ask.node} failed its checks: {reasons}. It may join when they pass",
        checks=tuple(check.check for check in failed),
        retry_after_s=_RETRY_S,
    )


def _misconfigured(batch: Batch, ask: Join) -> Refusal | None:
    if ask.ranks < 1:
        return Refusal("misconfigured", f"{ask.node} runs no process", exit_code=USAGE)
    if ask.spec.slots_per_group > 1 and not ask.group:
        return Refusal(
            "misconfigured",
            f"{ask.node} has no replacement group, and the job has groups of "
            f"{ask.spec.slots_per_group} nodes: give it --group, --domain or --topology",
            exit_code=USAGE,
        )
    if ask.infra_rank is None:
        return None
    holder = batch.state.holder_of_infra_rank(ask.infra_rank)
    if holder is None or holder == ask.node:
        return None
    return Refusal(
        "misconfigured",
        f"{ask.node} and {holder} both have --infra-rank {ask.infra_rank}: "
        f"give each node its own --infra-rank, or none",
        exit_code=USAGE,
    )


def _wrong_version(ours: str, ask: Join) -> Refusal | None:
    mine, theirs = _release(ours), _release(ask.version)
    if mine is None or theirs is None:
        return None
    if mine[0] == theirs[0] and abs(mine[1] - theirs[1]) <= 1:
        return None
    return Refusal(
        "wrong_version",
        f"{ask.node} runs release {ask.version} and rendezvous {ours}: they may be one minor "
        f"release apart. Install {ours} there",
        exit_code=USAGE,
    )


@lru_cache(16)
def _release(version: str) -> tuple[int, int] | None:
    parts = version.split(".")
    if len(parts) < 2 or not parts[0].isdecimal() or not parts[1].isdecimal():
        return None
    return int(parts[0]), int(parts[1])
