"""An examination as text: for people, for programs, for Nagios and for Prometheus. Pure."""

from typing import Any

import msgspec

from everstep.messages.facts.health import CheckResult
from everstep_services.agent.probes.verdicts import (
    STATES,
    NodeExamination,
    code_of,
    counted,
    is_amiss,
)

_NAGIOS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
_SCHEMA = "everstep.check/v1"


def human(node: str, done: NodeExamination, *, quiet: bool = False) -> list[str]:
    """An aligned line for each part, the worst first, then one for all. Quiet: only troubles."""
    shown = [result for result in done.results if is_amiss(result) or not quiet]
    rows = [(_state(result), result.check, result.subject) for result in shown]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([*map(str.ljust, row, widths), _why(result)]).rstrip()
        for row, result in zip(rows, shown, strict=True)
    ]
    return lines if quiet else [*lines, f"{node}: {_summary(done)}"]


def document(node: str, done: NodeExamination) -> dict[str, Any]:
    """For programs: the whole examination, with every field."""
    return {
        "schema": _SCHEMA,
        "node": node,
        "state": done.state,
        "code": code_of(done.state),
        "took_s": done.took_s,
        "checks": list(done.checks),
        "items": [msgspec.structs.asdict(result) for result in done.results],
    }


def nagios(node: str, done: NodeExamination) -> list[str]:
    """The status line with performance data; below it, the troubles."""
    amiss = [result for result in done.results if is_amiss(result)]
    worst = _told(amiss[0]) if amiss else _summary(done)
    numbers = [
        f"{state}={sum(result.state == state for result in done.results)}"
        for state in reversed(STATES)
    ]
    figures = " ".join([*numbers, f"took={done.took_s:g}s"])
    status = f"EVERSTEP {_NAGIOS[code_of(done.state)]} - {node}: {worst}"
    return [
        f"{_without_bars(status)} | {figures}",
        *(_without_bars(_told(result)) for result in amiss),
    ]


def prometheus(node: str, done: NodeExamination) -> list[str]:
    """The examination for Prometheus's textfile collector."""
    lines = [
        "# HELP everstep_check_code What a check says of a part of this node: 0 ok or "
        "unsupported, 1 warning, 2 failed, 3 unknown.",
        "# TYPE everstep_check_code gauge",
    ]
    seen: dict[tuple[str, str], CheckResult] = {}
    for (
        result
    ) in done.results:  # of two results about the same part the worse one, which comes first
        seen.setdefault((result.check, result.subject), result)
    for result in seen.values():
        labels = {
            "node": node,
            "check": result.check,
            "subject": result.subject,
            "state": result.state,
        }
        lines.append(f"everstep_check_code{{{_labels(labels)}}} {code_of(result.state)}")
    of_node = _labels({"node": node})
    return [
        *lines,
        "# HELP everstep_node_check_code The worst that any check says of this node.",
        "# TYPE everstep_node_check_code gauge",
        f"everstep_node_check_code{{{of_node}}} {code_of(done.state)}",
        "# HELP everstep_node_check_seconds How long all checks took.",
        "# TYPE everstep_node_check_seconds gauge",
        f"everstep_node_check_seconds{{{of_node}}} {done.took_s:g}",
    ]


def _state(result: CheckResult) -> str:
    return result.state.upper() if result.state == "failed" else result.state


def _summary(done: NodeExamination) -> str:
    return counted(done.results) or "nothing was checked"


def _why(result: CheckResult) -> str:
    code = f" [{result.code}]" if result.code and result.code not in result.reason else ""
    return f"{result.reason}{code}"


def _told(result: CheckResult) -> str:
    return (
        f"{result.state}: {' '.join(filter(None, [result.check, result.subject]))}: {_why(result)}"
    )


def _without_bars(line: str) -> str:
    """Nagios takes the text after a bar for figures."""
    return line.replace("|", "/")


def _labels(labels: dict[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
