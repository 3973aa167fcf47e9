"""The faults that can be injected: their names, where they are made, and their options."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from trainer_sdk import layout

FaultSite = Literal["rank", "process", "agent"]
"""Where a fault is made: inside the rank; on its process, from outside; in a node's agent."""

RankFault = Literal[
    "exception", "async_exception", "signal_exception", "abort", "segfault", "exit", "hang",
    "stall", "slow", "hold_gil", "stuck", "memory_leak", "gpu_sleep", "gpu_error",
]  # fmt: skip
NumericFault = Literal[
    "flip_parameter", "flip_gradient", "flip_reduced_gradient", "flip_activation",
    "scale_activation", "nan_activation", "poison_batch",
]  # fmt: skip
"""Faults in what a rank computes, or computes with."""
ProcessFault = Literal["kill", "terminate", "interrupt", "stop"]
LinkFault = Literal["cut_off", "partition", "slow_link"]
"""Faults of the agent's link to the bus."""
AgentFault = Literal["kill_agent", "clock_skew", "disk_full"] | LinkFault
FaultName = RankFault | NumericFault | ProcessFault | AgentFault

_DAY_S = 86400


class BadFaultError(ValueError):
    """The fault is unknown, or cannot be made in this way."""


@dataclass(frozen=True, slots=True)
class FaultKind:
    """A kind of fault."""

    name: FaultName
    place: FaultSite
    effect: str
    also: tuple[str, ...] = ()
    """Other names: NVRx's."""
    lasts: bool = False
    """The fault lasts for a time, and is undone then."""
    repeats: bool = False
    """With a duration the fault is made at each opportunity of that time; without one, once."""
    default_s: float | None = None
    """How long it lasts by default; None for as long as its process."""
    amount: str = ""
    """The meaning of its amount, if it has one."""
    default: int = 0
    least: int = 0
    most: int = 0
    target: str = ""
    """The meaning of its target, if it has one."""
    default_target: str = ""
    """The target that it chooses itself; empty if somebody must name one."""


@dataclass(frozen=True, slots=True)
class FaultRequest:
    """A fault with all its options."""

    fault: FaultKind
    for_s: float | None = None
    amount: int = 0
    target: str = ""


def _flip(name: FaultName, effect: str, of: str, default: str) -> FaultKind:
    return FaultKind(
        name, "rank", effect, repeats=True, amount="bit, from the sign down", default=8, most=63,
        target=f"the {of}, and an element: NAME or NAME:INDEX",
        default_target=f"the largest element of {default}",
    )  # fmt: skip


_OF_PARAMETER = ("parameter", "the first parameter")
_OF_MODULE = ("module", "the model's result")

_ALL = (
    FaultKind("exception", "rank", "the next step or section raises", ("workload_exc",)),
    FaultKind("async_exception", "rank", "the main thread raises, wherever it is", ("async_exc",)),
    FaultKind("signal_exception", "rank", "a signal handler raises", ("signal_exc",)),
    FaultKind("abort", "rank", "the process calls abort()", ("os_abort",)),
    FaultKind("segfault", "rank", "the process reads an unmapped address"),
    FaultKind("exit", "rank", "the process exits at once, without an error",
              amount="exit code", default=1, most=255),
    FaultKind("hang", "rank", "the main thread stays where it is", lasts=True),
    FaultKind("stall", "rank", "the next thread that enters a section stays there",
              lasts=True, target="the section"),
    FaultKind("slow", "rank", "each step takes longer", lasts=True, default_s=10,
              amount="ms a step", default=100, least=1, most=60_000),
    FaultKind("hold_gil", "rank", "a thread keeps the interpreter's lock", ("lock_gil",),
              lasts=True),
    FaultKind("stuck", "rank", "the main thread waits in the kernel, in state D", ("d_state",),
              lasts=True),
    FaultKind("memory_leak", "rank", "the process grows, up to half of what is free", lasts=True,
              default_s=10, amount="MB a second", default=64, least=1, most=4096),
    FaultKind("gpu_sleep", "rank", "the GPU is busy with a kernel that computes nothing",
              lasts=True, default_s=10),
    FaultKind("gpu_error", "rank", "a kernel fails an assertion: the CUDA context is lost"),
    _flip("flip_parameter", "a bit of a parameter is flipped before a forward pass",
          *_OF_PARAMETER),
    _flip("flip_gradient", "a bit of a gradient is flipped before its reduction", *_OF_PARAMETER),
    _flip("flip_reduced_gradient", "a bit of a gradient is flipped before the optimizer uses it",
          *_OF_PARAMETER),
    _flip("flip_activation", "a bit of a module's result is flipped", *_OF_MODULE),
    FaultKind("scale_activation", "rank", "a module's result is a little larger", repeats=True,
              amount="millionths", default=1000, least=-1_000_000, most=1_000_000_000,
              target="the module", default_target="the model's result"),
    FaultKind("nan_activation", "rank", "an element of a module's result is NaN", repeats=True,
              target="the module, and an element: NAME or NAME:INDEX",
              default_target="the largest element of the model's result"),
    FaultKind("poison_batch", "rank", "the values of a batch are too large, its numbers all equal",
              amount="factor", default=1000, least=-1_000_000, most=1_000_000),
    FaultKind("kill", "process", "SIGKILL", ("sigkill",)),
    FaultKind("terminate", "process", "SIGTERM", ("sigterm",)),
    FaultKind("interrupt", "process", "SIGINT", ("sigint",)),
    FaultKind("stop", "process", "SIGSTOP, and SIGCONT afterwards", ("sigstop",), lasts=True),
    FaultKind("kill_agent", "agent", "the agent is killed, and its ranks with it"),
    FaultKind("cut_off", "agent", "the agent's connection to the bus is closed, and refused",
              ("bus_cut",), lasts=True, default_s=10),
    FaultKind("partition", "agent", "nothing passes between the agent and the bus", lasts=True,
              default_s=10),
    FaultKind("slow_link", "agent", "what passes between the agent and the bus is late",
              lasts=True, default_s=10, amount="ms", default=200, least=1, most=60_000),
    FaultKind("clock_skew", "agent", "the agent's time of day is wrong", lasts=True, default_s=10,
              amount="s ahead", default=3600, least=-_DAY_S, most=_DAY_S),
    FaultKind("disk_full", "agent", "a file takes the space of a folder", lasts=True, default_s=10,
              amount="MB at most", default=1024, least=1, most=1 << 20, target="the folder"),
)  # fmt: skip

FAULTS: Mapping[str, FaultKind] = {fault.name: fault for fault in _ALL}
_NAMES: Mapping[str, FaultKind] = {
    name: fault for fault in _ALL for name in (fault.name, *fault.also)
}


def fault_named(text: str) -> FaultKind:
    """The fault of this name; NVRx's names count as well."""
    fault = _NAMES.get(text.strip().lower().replace("-", "_"))
    if fault is None:
        close = get_close_matches(text, _NAMES, n=1)
        near = f"; did you mean {close[0]}?" if close else f": there are {', '.join(FAULTS)}"
        raise BadFaultError(f"there is no fault {text!r}{near}")
    return fault


def fault_request(
    text: str, *, for_s: float | None = None, amount: int | None = None, target: str = ""
) -> FaultRequest:
    """A request for a fault, with its defaults filled in; `BadFaultError` if it is not valid."""
    fault = fault_named(text)
    if for_s is not None:
        if not (fault.lasts or fault.repeats):
            raise BadFaultError(f"{fault.name} happens once: it cannot last for {for_s:g} s")
        if not 0 < for_s <= _DAY_S:
            raise BadFaultError(f"{fault.name} cannot last for {for_s:g} s: above 0, up to a day")
    if amount is not None:
        _check_amount(fault, amount)
    if target and not fault.target:
        raise BadFaultError(f"{fault.name} has no target, but {target!r} is given")
    if fault.target and not target and not fault.default_target:
        raise BadFaultError(f"{fault.name} needs a target: {fault.target}")
    _, has_index, index = target.partition(":")
    if "INDEX" in fault.target and has_index and not index.isdecimal():
        raise BadFaultError(f"{fault.name} has no target {target!r}: it is {fault.target}")
    return FaultRequest(
        fault=fault,
        for_s=fault.default_s if for_s is None else for_s,
        amount=fault.default if amount is None else amount,
        target=target,
    )


def _check_amount(fault: FaultKind, amount: int) -> None:
    if not fault.amount:
        raise BadFaultError(f"{fault.name} has no amount, but {amount} is given")
    if not fault.least <= amount <= fault.most:
        raise BadFaultError(
            f"{fault.name} cannot have an amount of {amount}: it is {fault.amount}, from "
            f"{fault.least} to {fault.most}"
        )


VARIABLE = "EVERSTEP_INJECT"
_WORDS = ("rank", "round", "for", "amount", "target")


def planned(environ: Mapping[str, str]) -> Iterator[tuple[int, FaultRequest]]:
    """The faults of this rank, each with its step; of the first round if no round is named."""
    for text in environ.get(VARIABLE, "").split(";"):
        if text.strip():
            planned_fault = _read(text.strip(), environ)
            if planned_fault is not None:
                yield planned_fault


def _read(text: str, environ: Mapping[str, str]) -> tuple[int, FaultRequest] | None:
    head, _, tail = text.partition(":")
    name, _, step = head.partition("@")
    options = dict(_pair(text, part) for part in tail.split(",") if part)
    try:
        wished = fault_request(
            name,
            for_s=float(options["for"]) if "for" in options else None,
            amount=int(options["amount"]) if "amount" in options else None,
            target=options.get("target", ""),
        )
        here = int(options.get("rank", environ.get("RANK", "0"))) == int(environ.get("RANK", "0"))
        now = int(options.get("round", "1")) == int(environ.get(layout.ROUND_VARIABLE, "1"))
        return (int(step), wished) if here and now else None
    except ValueError as error:
        raise BadFaultError(f"{VARIABLE}: {text!r} is not FAULT@STEP:…: {error}") from error


def _pair(text: str, part: str) -> tuple[str, str]:
    name, _, value = part.strip().partition("=")
    if name not in _WORDS or not value:
        raise BadFaultError(f"{VARIABLE}: {part.strip()!r} in {text!r}: use {', '.join(_WORDS)}")
    return name, value
