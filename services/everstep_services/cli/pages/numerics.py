"""Results that cannot be right on the screen, and how far results are deterministic."""

from collections.abc import Iterator, Mapping
from typing import Any

from everstep_services.cli.api.client import Api, job_path
from everstep_services.cli.cells import Record, blank_or, brief, cell, counted, moment
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.output import print_answer, say, say_cut

CASES = ("case", "step", "signal", "kind", "ranks", "node", "done", "at", "reason")
CASES_WIDE = (*CASES, "round", "group", "data", "incident")
RESULTS = ("name", "round", "compared", "different", "largest", "steps", "again")


def print_numerics(
    invocation: Invocation, api: Api, job: str, asked: Mapping[str, Any], most: int
) -> None:
    """The cases of a job, or the table of determinism; JSON has both."""
    place, page = f"{job_path(job)}/numerics", {"round": asked["round"], "limit": min(most, 1000)}
    results = list(api.pages(f"{place}/determinism", page, most=most, when_cut=say_cut))
    if asked["determinism"]:
        results.sort(key=_variation)
        print_answer(invocation, "determinism", {"items": results}, results, _result, RESULTS)
        for line in _determinism(results):
            say(line)
        if not results:
            say("no step was run again: the mode report_determinism_stats does so")
        return
    kinds = {"kind": list(asked["kind"]) or None}
    cases = list(api.pages(place, {**page, **kinds}, most=most, when_cut=say_cut))
    whole = {"items": cases, "determinism": results}
    columns = CASES_WIDE if invocation.output == "wide" else CASES
    print_answer(invocation, "numerics", whole, cases, _case, columns)
    if not cases:
        say("no such unexpected results")
    for line in _determinism(results):
        say(f"{line}; see everstep numerics {cell(job)} --determinism")


def _case(case: Record) -> dict[str, Any]:
    suspected, judged = case["suspected"] or {}, case["judged"] or {}
    parts = (part for part in (judged, *case["acts"]) if part.get("samples_from") is not None)
    about: Record = next(parts, {})
    first, end = about.get("samples_from"), about.get("samples_to")
    return {
        **case,
        "kind": case["kind"] or "not judged",
        "ranks": cell(judged.get("ranks") or suspected.get("ranks")),
        "node": cell(judged.get("node")),
        "group": cell(judged.get("group")),
        "data": "" if first is None or end is None else f"{first} to {end - 1}",
        "done": ", ".join(map(_act, case["acts"])),
        "at": moment(suspected.get("at") or judged.get("at")),
        "reason": brief(judged.get("reason") or suspected.get("reason")),
    }


def _act(act: Record) -> str:
    if act["action"] == "observe":
        return "nothing"
    return cell(act["action"]) + ("" if act["outcome"] == "done" else f" ({cell(act['outcome'])})")


def _result(result: Record) -> dict[str, Any]:
    return {**result, "largest": blank_or("{:.3g}".format, result["largest"])}


def _variation(result: Record) -> tuple[int, float, bool, str]:
    """The newest round first, and in it what varies the most; then the loss before its parts."""
    share = result["different"] / max(result["compared"], 1)
    return -result["round"], -share, result["largest"] is None, result["name"]


def _determinism(results: list[Any]) -> Iterator[str]:
    """A line for the newest round with steps that were run again."""
    if not results:
        return
    newest = results[0]["round"]
    of_round = [result for result in results if result["round"] == newest]
    varying = sum(1 for result in of_round if result["different"])
    again = counted(of_round[0]["again"], "step")
    yield (
        f"round {newest}: {again} run again, {varying} of {counted(len(of_round), 'result')} not "
        "always the same"
    )
