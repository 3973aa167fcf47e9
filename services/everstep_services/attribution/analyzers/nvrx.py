"""Analyzers written for NVIDIA's Resiliency Extension, as plug-ins of attribution.

NVRx's base class has three methods, which a pipeline calls one after the other: `preprocess_input`
takes the input, `run_attribution` looks at what that returned, `print_output` makes the result.
An object with these methods, async or not, becomes an analyzer by one line of a plug-in:

    analyze = adapted(MyAnalyzer(), claims_of=lambda result: [...])

`claims_of` says what a result means. Without it, a result that names ranks, as those of NVRx's
analyzers of traces do (`hanging ranks: [3, 7]`), is a place: it says where, and no cause.
"""

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from everstep.observe.printable import beginning
from everstep_services.attribution.domain.claims import Claim
from everstep_services.attribution.incident import Analyzer, Incident

_RANKS = re.compile(r"(?i)ranks?\W{0,4}\[([\d,\s]{1,4000})\]")
_MOST = 64
_STRENGTH = 0.6
ClaimsOf = Callable[[Any], Sequence[Claim]]
InputOf = Callable[[Incident], Awaitable[Any]]


class NvrxAnalyzer(Protocol):
    """What NVRx's base class asks of an analyzer; each method may be async."""

    def preprocess_input(self, data: Any) -> Any: ...

    def run_attribution(self, data: Any) -> Any: ...

    def print_output(self, data: Any) -> Any: ...


def adapted(
    analyzer: NvrxAnalyzer, claims_of: ClaimsOf | None = None, input_of: InputOf | None = None
) -> Analyzer:
    """An analyzer of ours that asks one of theirs.

    `input_of` makes its input; without it, the input is a mapping of the case's logs by rank.
    """

    async def analyze(incident: Incident) -> Sequence[Claim]:
        data = await (input_of or logs_by_rank)(incident)
        for step in (analyzer.preprocess_input, analyzer.run_attribution, analyzer.print_output):
            data = await _called(step, data)
        return (claims_of or places)(data)

    return analyze


async def logs_by_rank(incident: Incident) -> Mapping[int, str]:
    """The ends of the ranks' logs."""
    logs: dict[int, str] = {}
    async for _, rank, data in incident.contents("log"):
        if rank is not None:
            logs[rank] = logs.get(rank, "") + data.decode(errors="replace")
    return logs


def places(result: Any) -> Sequence[Claim]:
    """The ranks that a result names in brackets."""
    text = result[0] if isinstance(result, tuple) and result else result
    ranks = [
        int(rank) for listed in _RANKS.findall(str(text)) for rank in re.findall(r"\d+", listed)
    ]
    if not ranks:
        return ()
    named = tuple(dict.fromkeys(ranks))[:_MOST]
    says = beginning(str(text).strip().partition("\n")[0], 240)
    return [
        Claim(
            cause="unknown", kind="named_ranks", role="place", says=says,
            strength=_STRENGTH, ranks=named,
        )
    ]  # fmt: skip


async def _called(step: Callable[[Any], Any], data: Any) -> Any:
    """Call a step of a plug-in, which may block: in a thread, unless it is async."""
    if inspect.iscoroutinefunction(step):
        return await step(data)
    result = await asyncio.to_thread(step, data)
    return await result if inspect.isawaitable(result) else result
