"""Which output of ranks the console shows, by the options of torchrun and ours."""

import re
from collections.abc import Mapping

from everstep_services.agent.run_plan import ConsoleChoice, Std, StreamChoice
from everstep_services.agent.settings import AgentSettings
from everstep_services.cli.run.arguments import Given, UsageError
from everstep_services.cli.run.compatibility import ranks, ranks_given, streams

_TEMPLATE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"


def console_choice(given: Given, agent: AgentSettings, environ: Mapping[str, str]) -> ConsoleChoice:
    """The choice. Without any option: every line of every rank, with its node and rank."""
    local = ranks_given(given, "local_ranks_filter") if given.text("local_ranks_filter") else None
    prefix = (environ.get(_TEMPLATE) or ConsoleChoice().prefix) if agent.prefix else None
    return ConsoleChoice(
        ranks=_shown(given, agent),
        local_ranks=local,
        redirects=_streams(given, "redirects"),
        tee=_streams(given, "tee"),
        prefix=prefix,
    )


def _shown(given: Given, agent: AgentSettings) -> frozenset[int] | None:
    text = given.text("console", agent.console).strip().lower()
    if text == "all":
        return None
    if text == "none":
        return frozenset()
    if "console" in given.values:
        return ranks_given(given, "console", "all, none, or ")
    numbers = ranks(text)
    if not numbers:
        raise UsageError(f"agent.console = {text!r}: expected all, none, or ranks with commas")
    return numbers


def _streams(given: Given, name: str) -> StreamChoice:
    default, single = streams(given, name)
    return StreamChoice(Std(default), {rank: Std(number) for rank, number in single.items()})


def said(choice: ConsoleChoice) -> str:
    """The choice in words."""
    if choice.ranks is not None and not choice.ranks:
        return "none"
    words = ["all ranks"] if choice.ranks is None else [f"ranks {_listed(choice.ranks)}"]
    if choice.local_ranks is not None:
        words.append(f"local ranks {_listed(choice.local_ranks)}")
    if choice.redirects.default or choice.redirects.by_local_rank:
        words.append("less what -r redirects")
    return ", ".join(words)


def _listed(numbers: frozenset[int]) -> str:
    return re.sub(r"[\[\]]", "", str(sorted(numbers)))
