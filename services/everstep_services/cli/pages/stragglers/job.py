"""Slow ranks of a job on the screen: how ranks compare now, what was found, and a heat map."""

import shutil
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from statistics import median
from typing import Any

from everstep_services.cli.api.client import Api
from everstep_services.cli.cells import Record, brief, counted, moment, percent, slow_rank, span
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.operator_requests import quoted
from everstep_services.cli.output import (
    cell,
    echo,
    is_terminal,
    print_json,
    print_line,
    print_records,
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
"""Columns of the terminal that a row of the heat map needs beside its windows."""
_SWITCH_ON = "everstep control set straggler.timings=on"


def print_now(invocation: Invocation, api: Api, job: str, role: str, most: int) -> None:
    """Ranks by their own time, the slowest first; beside them who waits for whom, and the price."""
    asked = {"most": min(most, _RANKS_MOST), "role": role or None}
    found = api.get(f"jobs/{quoted(job)}/stragglers/now", asked)
    match invocation.output:
        case "json":
            print_json({"schema": schema("rank_scores"), **found})
        case "jsonl":
            for rank in found["ranks"]:
                print_line(rank)
        case _:
            columns = NOW_WIDE if invocation.output == "wide" else NOW
            findings = {one["rank"]: one for one in found["found"]}
            rows = (_compared(one, findings.get(one["rank"])) for one in found["ranks"])
            print_records(invocation, "rank_scores", rows, columns)
    if found["ranks_seen"] > len(found["ranks"]) and most < _RANKS_MOST:
        say_cut(len(found["ranks"]))
    for line in beside(found):
        say(line)


def print_past(
    invocation: Invocation, api: Api, job: str, params: Mapping[str, Any], most: int
) -> None:
    """Every finding, the newest first; beside them when the steps of all ranks changed."""
    place, page = f"jobs/{quoted(job)}", {**params, "limit": min(most, 1000)}
    found = list(api.pages(f"{place}/stragglers", page, most=most, when_cut=say_cut))
    of_round = {"round": params.get("round"), "limit": _SHIFTS}
    shifts = api.get(f"{place}/step-shifts", of_round)["items"]
    match invocation.output:
        case "json":
            whole = {"schema": schema("straggler"), "items": found, "step_shifts": shifts}
            print_json(whole)
        case "jsonl":
            for one in found:
                print_line(one)
        case _:
            columns = PAST_WIDE if invocation.output == "wide" else PAST
            print_records(invocation, "straggler", map(_finding, found), columns)
    if not found:
        say("no such slow ranks")
    for shift in shifts:
        say(_shift(shift))


def print_map(
    invocation: Invocation, api: Api, job: str, params: Mapping[str, Any], most: int
) -> None:
    """Ranks by windows: shades on a terminal, numbers elsewhere."""
    found = _times(api, job, params, most)
    if invocation.output == "json":
        print_json({"schema": schema("timings"), **found})
    elif invocation.output == "jsonl":
        for row in found["rows"]:
            print_line(row)
    else:
        for line in _map_lines(invocation.output, found):
            echo(line)
    if found["next_rank"] is not None:
        say_cut(len(found["rows"]))
    if not found["windows"]:
        say("no window is known: the job does not run, or none is complete yet")
    elif any(found["sections"]):
        say(f"sections, for --section: {', '.join(cell(one) for one in found['sections'] if one)}")


def _map_lines(output: str | None, found: Record) -> Iterator[str]:
    if output == "name":
        yield from (str(row["rank"]) for row in found["rows"])
    elif output is None and not is_terminal():
        for row in found["rows"]:
            numbers = ("" if one is None else f"{one:.6g}" for one in row["values"])
            yield "\t".join((str(row["rank"]), cell(row["node"]), cell(row["role"]), *numbers))
    else:
        yield from heat_map(found, shutil.get_terminal_size().columns)


def beside(found: Record) -> Iterator[str]:
    """What a person must know beside the table of ranks."""
    if found["window"]:
        yield f"round {found['round']}, up to {_newest(found)}"
        missing = f", {found['ranks_missing']} not heard of" if found["ranks_missing"] else ""
        yield f"{counted(found['ranks_seen'], 'rank')} compared{missing}"
    for one in found["found"]:
        section = f" in section {cell(one['section'])}" if one["section"] else ""
        yield f"slow since {moment(one['found_at'])} UTC: {slow_rank(one)}{section}"
        yield f"  {cell(one['reason'])}"
    for group in found["groups"][:_GROUPS]:
        yield from _waits(group)
    yield from _price(found)
    if not found["is_on"]:
        yield f"timings are off: {_SWITCH_ON} switches them on"
    if found["note"]:
        yield cell(found["note"])


def _newest(found: Record) -> str:
    """The end of the newest window, and how long a step takes."""
    if found.get("is_by_time"):
        return f"{_clock(found['window'])}: nobody counts steps, so times are those of a second"
    step = f": a step takes {span(found['step_s'])}" if found["step_s"] is not None else ""
    return f"step {found['window']}{step}"


def _clock(second: int) -> str:
    """A second since 1970; a node may say anything."""
    try:
        return f"{datetime.fromtimestamp(second, UTC):%H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return f"second {second}"


def heat_map(found: Record, columns: int) -> Iterator[str]:
    """A line for each rank with a shade for each window.

    Shades reach from the least value to the median of the slowest rank, so that one long window,
    as the first often is, does not make all others look alike.
    """
    rows, width = found["rows"], max(8, columns - _BESIDE_MAP)
    shown = [one["values"][-width:] for one in rows]
    known = [[value for value in values if value is not None] for values in shown]
    if not any(known):
        return
    least, most = min(map(min, filter(None, known))), max(map(median, filter(None, known)))
    longest = max(map(max, filter(None, known)))
    windows = found["windows"][-width:]
    what = f"section {cell(found['section'])}" if found["section"] else cell(found["measure"])
    first, last = windows[0]["first_step"], windows[-1]["last_step"]
    is_by_time = found.get("is_by_time")
    steps = f"{_clock(first)} to {_clock(last)}" if is_by_time else f"steps {first} to {last}"
    is_ratio = found["measure"] == "ratio"
    range_ = (percent(one) if is_ratio else span(one) for one in (least, most))
    more = " or more" if longest > most else ""
    scale = f"{_SHADES[0]} {' to '.join(range_)}{more} {_SHADES[-1]}"
    yield f"{what}, {steps}: {scale}, {_GAP} not known"
    for row, values in zip(rows, shown, strict=True):
        shades = "".join(_shade(value, least, most) for value in values)
        last = next((value for value in reversed(values) if value is not None), None)
        end = "-" if last is None else percent(last) if is_ratio else span(last)
        yield f"{row['rank']:>6}  {cell(row['node'])[:14]:<14}  {shades}  {end}"


def _times(api: Api, job: str, params: Mapping[str, Any], most: int) -> dict[str, Any]:
    """One answer of as many as are needed."""
    path = f"jobs/{quoted(job)}/timings"
    found: dict[str, Any] = api.get(path, {**params, "most_ranks": min(most, 512)})
    while found["next_rank"] is not None and (left := most - len(found["rows"])) > 0:
        more = {**params, "first_rank": found["next_rank"], "most_ranks": min(left, 512)}
        page = api.get(path, more)
        if page["windows"] != found["windows"] or not page["rows"]:
            break  # a window has ended meanwhile: rows of different windows cannot be compared
        found = {**page, "rows": [*found["rows"], *page["rows"]]}
    return found


def _compared(rank: Record, finding: Record | None) -> dict[str, Any]:
    own = next((one for one in rank["scores"] if one["signal"] == "own"), None)
    cause = "slow" if rank["is_straggler"] else ""
    if finding is not None:
        cause = cell(finding["cause"])
        if finding["section"]:
            cause = f"{cause} ({cell(finding['section'])})"
    return {
        **rank,
        "own": _span(rank["own_s"]),
        "slower": _percent(rank["slower_ratio"]),
        "late": _span(rank["lateness_s"]),
        "waits": _span(rank["waited_s"]),
        "cause": cause,
        "relative": _score(own, "relative_score"),
        "individual": _score(own, "individual_score"),
        "reason": "" if finding is None else brief(finding["reason"]),
    }


def _finding(found: Record) -> dict[str, Any]:
    cause = cell(found["cause"])
    if found["section"]:
        cause = f"{cause} ({cell(found['section'])})"
    return {
        **found,
        "found": moment(found["found_at"]),
        "cause": cause,
        "slower": _percent(found["slower_ratio"]),
        "price": _percent(found["slowdown_ratio"]),
        "lost": _span(found["lost_s"]),
        "lasted": _span(found["lasted_s"]),
        "action": ", ".join(
            f"{cell(one['outcome'])} {cell(one['action'])}" for one in found["actions"]
        ),
        "reason": brief(found["reason"]),
    }


def _waits(group: Record) -> Iterator[str]:
    if group["last_rank"] is None or not group["waited_s"]:
        return
    often = f"in {group['last_ratio'] * 100:.0f} % of its collectives"
    waits = f"wait {span(group['waited_s'])} a step for rank {group['last_rank']}, last {often}"
    yield f"group {cell(group['group'])} ({counted(group['ranks'], 'rank')}): the others {waits}"


def _price(found: Record) -> Iterator[str]:
    ratio = found["slowdown_ratio"]
    if ratio is not None and found["found"]:
        ranks = "it" if len(found["found"]) == 1 else "them"
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


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else percent(ratio)
