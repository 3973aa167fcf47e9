"""Jobs and their incidents on the screen."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from everstep.incident_causes import OF_NO_PERSON
from everstep.incident_outcomes import INCIDENT_FATES
from everstep.job_states import JOB_STATES, WITH_RANKS
from everstep_services.cli.api.client import Api, job_path
from everstep_services.cli.cells import (
    SHORT_ID,
    Record,
    aligned,
    brief,
    budgets,
    cell,
    counted,
    moment,
    outcome,
    slow_rank,
    span,
    wall_s,
)
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.job_argument import FIRST_JOB
from everstep_services.cli.output import (
    echo,
    is_terminal,
    print_record,
    print_records,
    say,
    say_cut,
    usual,
)
from everstep_services.cli.pages.incidents.story import failing_saves, nodes_of_culprits

JOB_COLUMNS = (
    "job", "state", "round", "restarts", "incidents", "world_size", "last_step", "updated_at",
    "stalled_since",
)  # fmt: skip
INCIDENT_COLUMNS = (
    "incident", "job", "opened_at", "outcome", "lasted", "lost_steps", "node", "rank", "headline",
)  # fmt: skip
_TOO_MUCH_FOR_A_SCREEN = frozenset({"lost_steps", "rank"})
_SHOWN = 5
_MEMBERS = 20
_ACTS_READ = 100
"""Acts among which those of people are looked for."""


@dataclass(frozen=True, slots=True)
class CheckedFilter:
    """A filter whose values are known here; a newer service may have more of them."""

    name: str
    given: Sequence[str]
    known: tuple[str, ...]

    def check(self) -> None:
        """Refuse a value that nothing matches and nobody knows."""
        for value in self.given:
            if value not in self.known:
                text = f"there is no {self.name} {value[:64]!r}: there are {', '.join(self.known)}"
                raise CliError(text, Exit.USAGE)


def print_jobs(invocation: Invocation, api: Api, params: dict[str, Any], most: int) -> None:
    """The jobs that are asked for."""
    page = {**params, "limit": min(most, 1000)}
    jobs = api.pages("jobs", page, most=most, when_cut=say_cut)
    states = CheckedFilter("state", params["state"] or (), JOB_STATES)
    nothing = "no such jobs" if any(params.values()) else f"no job is on record yet: {FIRST_JOB}"
    shown = _or_say(jobs, nothing, states)
    if (invocation.output or usual()) in {"table", "wide"}:
        shown = ({**job, "last_step": _steps(job, is_short=True)} for job in shown)
    print_records(invocation, "job", shown, JOB_COLUMNS)


def print_incidents(
    invocation: Invocation, api: Api, job: str | None, params: dict[str, Any], most: int
) -> None:
    """The incidents that are asked for, the newest first."""
    path = "incidents" if job is None else f"{job_path(job)}/incidents"
    page = {**params, "limit": min(most, 1000)}
    incidents = api.pages(path, page, most=most, when_cut=say_cut)
    outcomes = CheckedFilter("outcome", params["outcome"] or (), INCIDENT_FATES)
    records: Iterable[dict[str, Any]] = _or_say(incidents, "no such incidents", outcomes)
    columns: Sequence[str] = INCIDENT_COLUMNS
    if invocation.output == "table" or (invocation.output is None and is_terminal()):
        left_out = _TOO_MUCH_FOR_A_SCREEN | ({"job"} if job else set())
        columns = [item for item in columns if item not in left_out]
        records = (_incident(item, SHORT_ID) for item in records)
    elif invocation.output in {None, "wide"}:
        records = (_incident(item, None) for item in records)
    print_records(invocation, "incident", records, columns)


def print_job(invocation: Invocation, api: Api, name: str) -> None:
    """One job: how it is, its last rounds, who takes part, and what went wrong last."""
    place = job_path(name)
    job = api.get(place)
    rounds = api.get(f"{place}/rounds", {"limit": _SHOWN})["items"]
    incidents = api.get(f"{place}/incidents", {"limit": _SHOWN})["items"]
    slow = api.get(f"{place}/stragglers", {"state": "open", "limit": _SHOWN + 1})["items"]
    saves = api.get(f"{place}/saves")
    acts = _acts_of_people(api, name)
    members = []
    if rounds:
        path = f"{place}/rounds/{rounds[0]['round']}/members"
        members = api.get(path, {"limit": _MEMBERS + 1})["items"]
    if invocation.output in {"json", "jsonl", "name"}:
        whole = {
            **job,
            "last_rounds": rounds,
            "members": members,
            "last_incidents": incidents,
            "slow_ranks": slow,
            "saves": saves["tiers"],
            "last_acts": [act["body"] for act in acts],
        }
        print_record(invocation, "job", whole, "job")
        return
    failing = list(failing_saves(saves))
    for line in job_page(job, rounds, members, incidents, slow, failing):
        echo(line)
    for line in acts_page(acts):
        echo(line)


def _acts_of_people(api: Api, job: str) -> list[Any]:
    """The last ones; requests of services are left out."""
    acts = api.get(
        "facts", {"job": job, "kind": "operator_acted", "order": "desc", "limit": _ACTS_READ}
    )
    people = [act for act in acts["items"] if act["body"].get("origin") not in OF_NO_PERSON]
    return people[:_SHOWN]


def acts_page(acts: list[Any]) -> Iterator[str]:
    """The lines about what people asked for."""
    if acts:
        yield ""
        yield "last acts of people"
        yield from aligned(_act(act["at"], act["body"]) for act in acts)


def job_page(
    job: Record,
    rounds: list[Any],
    members: list[Any],
    incidents: list[Any],
    slow: list[Any],
    failing: Iterable[str] = (),
) -> Iterator[str]:
    """The lines about one job; `failing` is about saves."""
    yield f"{cell(job['job'])}: {_state(job)}"
    facts = [*_facts(job, slow), *(("saves", text) for text in failing)]
    yield from aligned([(name, text) for name, text in facts if text])
    if rounds:
        yield ""
        yield f"last rounds, of {job['round'] or len(rounds)}"
        head = ("round", "state", "formed", "cause", "nodes", "ranks", "steps", "ended by")
        yield from aligned([head, *map(_round, rounds)])
    if members:
        yield ""
        yield f"nodes of round {rounds[0]['round']}"
        shown = members[:_MEMBERS]
        yield from aligned([("slot", "node", "ranks"), *map(_member, shown)])
        if len(members) > len(shown):
            yield f"  … {rounds[0]['nodes']} in all"
    if incidents:
        yield ""
        yield f"last incidents, of {job['incidents'] or len(incidents)}"
        yield from aligned(map(_incident_row, incidents))
        yield f"  more: everstep incident show {cell(job['job'])}"


def _state(job: Record) -> str:
    if job["ended_at"]:
        code = "" if job["exit_code"] is None else f" (exit code {job['exit_code']})"
        return f"{cell(job['state'])}{code}: {cell(job['end_headline'])}"
    parts = [cell(job["state"])]
    if job["round"] is not None:
        parts.append(f"round {job['round']}")
    if job["world_size"] and job["state"] in WITH_RANKS:
        parts.append(counted(job["world_size"], "rank"))
    if job.get("stalled_since"):
        parts.append(f"stalled since {moment(job['stalled_since'])}")
    return ", ".join(parts)


def _facts(job: Record, slow: list[Any]) -> Iterator[tuple[str, str]]:
    yield "name", cell(job["name"]) if job["name"] != job["job"] else ""
    yield "command", " ".join(map(cell, job["command"] or ()))
    yield "labels", ", ".join(f"{cell(k)}={cell(v)}" for k, v in (job["labels"] or {}).items())
    by = f" by {cell(job['user'])}" if job["user"] else ""
    yield "started", f"{moment(job['started_at'])}{by}" if job["started_at"] else ""
    yield "ended", moment(job["ended_at"]) if job["ended_at"] else ""
    yield "nodes", _world(job)
    yield "steps", _steps(job)
    yield "stalls", _watch(job) if not job["ended_at"] else ""
    more = ", …" if len(slow) > _SHOWN else ""
    yield "slow", ", ".join(map(slow_rank, slow[:_SHOWN])) + more
    left = budgets(job["budgets"])
    yield "restarts", f"{job['restarts'] or 0}{f'; left: {left}' if left else ''}"


def _world(job: Record) -> str:
    if job["nodes_min"] is None:
        return ""
    least, most = job["nodes_min"], job["nodes_max"]
    nodes = counted(least, "node") if least == most else f"{least} to {most} nodes"
    spares = f", {counted(job['spares'], 'spare')}" if job["spares"] else ""
    return f"{nodes} of {counted(job['ranks_per_node'] or 0, 'rank')}{spares}"


def _steps(job: Record, *, is_short: bool = False) -> str:
    if job["last_step"] is None:
        return ""
    is_anew = job["is_counted_anew"] and (job["rounds"] or 0) > 1
    if is_short:
        return f"{job['last_step']}{' in one round' * is_anew}"
    total = f" of {job['total_steps']}" if job["total_steps"] else ""
    again = f", {job['lost_steps']} made again" if job["lost_steps"] else ""
    if is_anew:
        again = " in one round; the script does not number its steps: how many are made again is "
        again += "not known"
    return f"{job['last_step']}{total}{again}"


def _watch(job: Record) -> str:
    watch = job["watch"]
    seen = f"; {job['stalls']} on record" if job["stalls"] else ""
    if watch is None:
        return f"nobody has said{seen}"
    on = f" on {cell(watch['node'])}" if watch["node"] and len(watch["nodes"]) > 1 else ""
    return f"{cell(watch['state'])}{on}: {cell(watch['reason'])}{seen}"


def _act(at: object, act: Record) -> tuple[object, ...]:
    text = " ".join(part for part in (cell(act["action"]), cell(act.get("target"))) if part)
    return moment(at), act["by"], text, act["outcome"], brief(act["reason"])


def _round(row: Record) -> tuple[object, ...]:
    return (
        row["round"],
        row["state"],
        moment(row["formed_at"]),
        row["formed_cause"],
        row["nodes"],
        row["world_size"],
        row["last_step"],
        brief(row["end_headline"] or row["end_cause"]),
    )


def _member(member: Record) -> tuple[object, ...]:
    first, ranks = member["first_rank"], member["ranks"]
    is_one = ranks == 1
    shown = "" if first is None else f"{first}" if is_one else f"{first} to {first + ranks - 1}"
    return member["slot"], member["node"], shown


def _incident_row(incident: Record) -> tuple[object, ...]:
    took = span(wall_s(incident))
    name = cell(incident["incident"])[:SHORT_ID]
    return name, moment(incident["opened_at"]), outcome(incident), took, brief(incident["headline"])


def _incident(incident: dict[str, Any], short: int | None) -> dict[str, Any]:
    culprits = {"rank": incident["culprit_ranks"], "node": nodes_of_culprits(incident)}
    return {
        **incident,
        **(culprits if incident["first_report"] else {}),  # it was about somebody else
        "incident": incident["incident"][:short],
        "outcome": outcome(incident),
        "lasted": span(wall_s(incident)),
    }


def _or_say(
    records: Iterator[dict[str, Any]], nothing: str, asked: CheckedFilter
) -> Iterator[dict[str, Any]]:
    """The same; report on stderr when there is none, and refuse a value that can match none."""
    first = next(records, None)
    if first is None:
        asked.check()
        say(nothing)
        return iter(())
    return chain([first], records)
