"""Slow ranks of a job on the screen: how ranks compare now, what was found, and a heat map."""

import shutil
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from statistics import median
from typing import Any

from everstep_services.cli.api.client import Api
from everstep_services.cli.cells import (
    Record,
    blank_or,
    brief,
    cell,
    counted,
    moment,
    percent,
    slow_rank,
    span,
)
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.operator_requests import quoted
from everstep_services.cli.output import (
    echo,
    is_terminal,
    print_answer,
    print_json,
    print_line,
    say,
    say_cut,
    schema,
)

NOW = ("rank", "node", "role", "own", "slower", "late", "waits", "cause")
NOW_WIDE = (*NOW, "relative", "individual", "reason")
PAST = ("rank", "node", "found", "state", "cause", "slower", "price", "lost", "reason")
PAST_WIDE = (*PAST, "round", "role", "section", "lasted", "confidence", "action", "cleared_reason")
_RANKS_MOST = 4096
_SHORTEST_S = 0.0005
_SHIFTS = 5
_GROUPS = 3
_SHADES = "▁▂▃▄▅▆▇█"
_GAP = "·"
_BESIDE_MAP = 34
"""Columns of the terminal that a row of the heat map needs besides its windows."""
_SWITCH_ON = "everstep control set straggler.timings=on"


def print_now(invocation: Invocation, api: Api, job: str, role: str, most: int) -> None:
    """Ranks by their own time, the slowest first; then who waits for whom, and the price."""
    asked = {"most": min(most, _RANKS_MOST), "role": role or None}
    answer = api.get(f"jobs/{quoted(job)}/stragglers/now", asked)
    columns = NOW_WIDE if invocation.output == "wide" else NOW
    findings = {row["rank"]: row for row in answer["found"]}

    def compared(row: Record) -> Record:
        return _compared(row, findings.get(row["rank"]))

    print_answer(invocation, "rank_scores", answer, answer["ranks"], compared, columns)
    if answer["ranks_seen"] > len(answer["ranks"]) and most < _RANKS_MOST:
        say_cut(len(answer["ranks"]))
    for line in remarks(answer):
        say(line)


def print_past(
    invocation: Invocation, api: Api, job: str, params: Mapping[str, Any], most: int
) -> None:
    """Every finding, the newest first; then when the steps of all ranks changed."""
    place, page = f"jobs/{quoted(job)}", {**params, "limit": min(most, 1000)}
    findings = list(api.pages(f"{place}/stragglers", page, most=most, when_cut=say_cut))
    of_round = {"round": params.get("round"), "limit": _SHIFTS}
    shifts = api.get(f"{place}/step-shifts", of_round)["items"]
    columns = PAST_WIDE if invocation.output == "wide" else PAST
    whole = {"items": findings, "step_shifts": shifts}
    print_answer(invocation, "straggler", whole, findings, _finding, columns)
    if not findings:
        say("no such slow ranks")
    for shift in shifts:
        say(_shift(shift))


def print_map(
    invocation: Invocation, api: Api, job: str, params: Mapping[str, Any], most: int
) -> None:
    """Ranks by windows: shades on a terminal, numbers elsewhere."""
    answer = _times(api, job, params, most)
    if invocation.output == "json":
        print_json({"schema": schema("timings"), **answer})
    elif invocation.output == "jsonl":
        for row in answer["rows"]:
            print_line(row)
    else:
        for line in _map_lines(invocation.output, answer):
            echo(line)
    if answer["next_rank"] is not None:
        say_cut(len(answer["rows"]))
    if not answer["windows"]:
        say("no window is known: the job does not run, or none is complete yet")
    elif any(answer["sections"]):
        names = ", ".join(cell(section) for section in answer["sections"] if section)
        say(f"sections, for --section: {names}")


def _map_lines(output: str | None, answer: Record) -> Iterator[str]:
    if output == "name":
        yield from (str(row["rank"]) for row in answer["rows"])
    elif output is None and not is_terminal():
        for row in answer["rows"]:
            numbers = ("" if value is None else f"{value:.6g}" for value in row["values"])
            yield "\t".join((str(row["rank"]), cell(row["node"]), cell(row["role"]), *numbers))
    else:
        yield from heat_map(answer, shutil.get_terminal_size().columns)


def remarks(answer: Record) -> Iterator[str]:
    """Remarks that a person needs to read the table of ranks."""
    if answer["window"]:
        yield f"round {answer['round']}, up to {_newest(answer)}"
        missing = f", {answer['ranks_missing']} not heard of" if answer["ranks_missing"] else ""
        yield f"{counted(answer['ranks_seen'], 'rank')} compared{missing}"
    for finding in answer["found"]:
        section = f" in section {cell(finding['section'])}" if finding["section"] else ""
        yield f"slow since {moment(finding['found_at'])} UTC: {slow_rank(finding)}{section}"
        yield f"  {cell(finding['reason'])}"
    for group in answer["groups"][:_GROUPS]:
        yield from _waits(group)
    yield from _price(answer)
    if not answer["is_on"]:
        yield f"timings are off: {_SWITCH_ON} switches them on"
    if answer["note"]:
        yield cell(answer["note"])


def _newest(answer: Record) -> str:
    """The end of the newest window, and how long a step takes."""
    if answer.get("is_by_time"):
        return f"{_clock(answer['window'])}: nobody counts steps, so times are those of a second"
    step = f": a step takes {span(answer['step_s'])}" if answer["step_s"] is not None else ""
    return f"step {answer['window']}{step}"


def _clock(second: int) -> str:
    """A second since 1970; a node may say anything."""
    try:
        return f"{datetime.fromtimestamp(second, UTC):%H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return f"second {second}"


def heat_map(answer: Record, columns: int) -> Iterator[str]:
    """A line for each rank with a shade for each window.

    Shades reach from the least value to the median of the slowest rank, so that one long window,
    as the first often is, does not make all others look alike.
    """
    rows, width = answer["rows"], max(8, columns - _BESIDE_MAP)
    shown = [item["values"][-width:] for item in rows]
    numbers = [[value for value in values if value is not None] for values in shown]
    if not any(numbers):
        return
    least, most = min(map(min, filter(None, numbers))), max(map(median, filter(None, numbers)))
    longest = max(map(max, filter(None, numbers)))
    windows = answer["windows"][-width:]
    title = f"section {cell(answer['section'])}" if answer["section"] else cell(answer["measure"])
    first, last = windows[0]["first_step"], windows[-1]["last_step"]
    is_by_time = answer.get("is_by_time")
    steps = f"{_clock(first)} to {_clock(last)}" if is_by_time else f"steps {first} to {last}"
    is_ratio = answer["measure"] == "ratio"
    range_ = (percent(item) if is_ratio else span(item) for item in (least, most))
    more = " or more" if longest > most else ""
    scale = f"{_SHADES[0]} {' to '.join(range_)}{more} {_SHADES[-1]}"
    yield f"{title}, {steps}: {scale}, {_GAP} not known"
    for row, values in zip(rows, shown, strict=True):
        shades = "".join(_shade(value, least, most) for value in values)
        last = next((value for value in reversed(values) if value is not None), None)
        end = "-" if last is None else percent(last) if is_ratio else span(last)
        yield f"{row['rank']:>6}  {cell(row['node'])[:14]:<14}  {shades}  {end}"


def _times(api: Api, job: str, params: Mapping[str, Any], most: int) -> dict[str, Any]:
    """One answer of as many as are needed."""
    path = f"jobs/{quoted(job)}/timings"
    answer: dict[str, Any] = api.get(path, {**params, "most_ranks": min(most, 512)})
    while answer["next_rank"] is not None and (left := most - len(answer["rows"])) > 0:
        more = {**params, "first_rank": answer["next_rank"], "most_ranks": min(left, 512)}
        page = api.get(path, more)
        if page["windows"] != answer["windows"] or not page["rows"]:
            break  # a window has ended meanwhile: rows of different windows cannot be compared
        answer = {**page, "rows": [*answer["rows"], *page["rows"]]}
    return answer


def _compared(rank: Record, finding: Record | None) -> dict[str, Any]:
    own = next((score for score in rank["scores"] if score["signal"] == "own"), None)
    cause = "slow" if rank["is_straggler"] else ""
    if finding is not None:
        cause = cell(finding["cause"])
        if finding["section"]:
            cause = f"{cause} ({cell(finding['section'])})"
    return {
        **rank,
        "own": _span(rank["own_s"]),
        "slower": blank_or(percent, rank["slower_ratio"]),
        "late": _span(rank["lateness_s"] and max(rank["lateness_s"], 0.0)),  # clocks differ
        "waits": _span(rank["waited_s"]),
        "cause": cause,
        "relative": _score(own, "relative_score"),
        "individual": _score(own, "individual_score"),
        "reason": "" if finding is None else brief(finding["reason"]),
    }


def _finding(finding: Record) -> dict[str, Any]:
    cause = cell(finding["cause"])
    if finding["section"]:
        cause = f"{cause} ({cell(finding['section'])})"
    return {
        **finding,
        "found": moment(finding["found_at"]),
        "cause": cause,
        "slower": blank_or(percent, finding["slower_ratio"]),
        "price": blank_or(percent, finding["slowdown_ratio"]),
        "lost": _span(finding["lost_s"]),
        "lasted": _span(finding["lasted_s"]),
        "action": ", ".join(
            f"{cell(action['outcome'])} {cell(action['action'])}" for action in finding["actions"]
        ),
        "reason": brief(finding["reason"]),
    }


def _waits(group: Record) -> Iterator[str]:
    if group["last_rank"] is None or not group["waited_s"]:
        return
    often = f"in {group['last_ratio'] * 100:.0f} % of its collectives"
    waits = f"wait {span(group['waited_s'])} a step for rank {group['last_rank']}, last {often}"
    yield f"group {cell(group['group'])} ({counted(group['ranks'], 'rank')}): the others {waits}"


def _price(answer: Record) -> Iterator[str]:
    ratio = answer["slowdown_ratio"]
    if ratio is not None and answer["found"]:
        ranks = "it" if len(answer["found"]) == 1 else "them"
        yield f"without {ranks} the job would be {ratio * 100:.1f} % faster"


def _shift(shift: Record) -> str:
    before_s, now_s = shift["before_s"] or 0.0, shift["now_s"] or 0.0
    change = f" ({percent(now_s / before_s - 1)})" if before_s else ""
    section = f", mostly in section {cell(shift['section'])}" if shift["section"] else ""
    return (
        f"{moment(shift['at'])} UTC, step {shift['step']}: steps of all ranks went from "
        f"{span(before_s)} to {span(now_s)}{change}{section}"
    )


def _shade(value: float | None, least: float, most: float) -> str:
    if value is None:
        return _GAP
    part = (value - least) / (most - least) if most > least else float(value > most)
    return _SHADES[min(int(part * len(_SHADES)), len(_SHADES) - 1)]


def _score(score: Record | None, name: str) -> str:
    value = None if score is None else score[name]
    return "" if value is None else f"{value:.2f}"


def _span(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return span(0.0 if abs(seconds) < _SHORTEST_S else seconds)  # never -0 ms
