"""Checkpoints of a job on the screen, as the catalog knows them."""

from collections.abc import Iterator
from typing import Any

from everstep.units import size
from everstep_services.cli.api.client import Api
from everstep_services.cli.cells import Record, aligned, brief, cell, counted, moment, span
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.operator_requests import asker, quoted
from everstep_services.cli.output import (
    echo,
    print_json,
    print_line,
    print_record,
    print_records,
    say,
    schema,
)

COLUMNS = ("step", "tier", "saved", "size", "ranks", "state", "place", "note")
GC_COLUMNS = ("step", "kept", "size", "reason", "place")


def print_checkpoints(
    invocation: Invocation, api: Api, job: str, tier: str | None, most: int
) -> None:
    """Those of a job, the newest first."""
    answer = api.get(f"jobs/{quoted(job)}/checkpoints", {"limit": most, "tier": tier})
    print_list(invocation, answer["items"])
    if not answer["items"]:
        say("no checkpoints are known; if there are files, see everstep ckpt scan")
    if len(answer["items"]) >= most:
        say(f"only the newest {most} are shown, and there may be more: -n {10 * most} shows more")
    if answer["note"]:
        say(cell(answer["note"]))
    for line in troubles(api.get(f"jobs/{quoted(job)}/saves")):
        say(line)


def troubles(saves: Record) -> Iterator[str]:
    """The present troubles of saves, a line each."""
    for save in saves["tiers"]:
        if save["failed_at"] and (save["failed_step"] or 0) > (save["committed_step"] or -1):
            why = f"{cell(save['failed_stage'])}: {cell(save['failed_reason'])}"
            yield f"step {save['failed_step']} ({save['tier']}) was not saved, {why}"
    for save in saves["delays"]:
        if save["waiting"]:
            lag = span(save["delay_lag_s"])
            waiting = f"{counted(save['waiting'], 'save')} that wait, for {lag}"
            yield f"{cell(save['node'])} has {waiting}: {cell(save['delay_reason'])}"
    restore = saves["restore"] or {}
    if restore.get("is_degraded"):
        losses = counted(restore["survivable_losses"] or 0, "node")
        why = cell(restore["copies_reason"])
        yield f"what is in memory survives the loss of {losses} only: {why}"


def print_list(invocation: Invocation, checkpoints: list[Any]) -> None:
    """Checkpoints in a table, or whole for programs."""
    is_for_people = invocation.output in {None, "table"}
    rows = map(shown, checkpoints) if is_for_people else checkpoints
    print_records(invocation, "checkpoint", rows, COLUMNS)


def print_checkpoint(
    invocation: Invocation, api: Api, job: str, step: int, tier: str | None
) -> None:
    """One checkpoint, and who has which part of it."""
    checkpoint = found_in(api, job, step, tier)
    if invocation.output is not None:
        print_record(invocation, "checkpoint", checkpoint, "step")
        return
    for line in checkpoint_page(checkpoint):
        echo(line)


def found_in(api: Api, job: str, step: int, tier: str | None) -> Any:
    """The checkpoint of a step."""
    return api.get(f"jobs/{quoted(job)}/checkpoints/{step}", {"tier": tier})


def checkpoint_page(checkpoint: Record) -> Iterator[str]:
    """The lines about one checkpoint."""
    yield f"step {checkpoint['step']} ({checkpoint['tier']}): {state_of(checkpoint)}"
    yield from aligned([(name, text) for name, text in _facts(checkpoint) if text])
    for replica in checkpoint["replicas"]:
        nodes = ", ".join(cell(peer["node"]) for peer in replica["holders"])
        yield f"  slot {replica['slot']}: {nodes or 'nobody who is here'}"


def print_located(invocation: Invocation, api: Api, job: str, step: int | None) -> None:
    """The checkpoint that would be restored, and those that would be passed over."""
    answer = api.get(f"jobs/{quoted(job)}/checkpoints:locate", {"step": step})
    if invocation.output in {"json", "jsonl"}:
        show = print_json if invocation.output == "json" else print_line
        show({"schema": schema("located"), **answer})
    else:
        print_list(invocation, answer["places"])
        for place in answer["rejected"]:
            where = f"{place['tier']}, {cell(folder_of(place['path']))}"
            say(f"step {place['step']} ({where}) is passed over: {cell(place['reason'])}")
        places = {folder_of(place["path"]) for place in answer["places"] if place["path"]}
        if len(places) > 1:
            say(
                f"these are in {len(places)} places: a training restores from the one that it is "
                "given, and sees no other"
            )
    if not answer["places"]:
        raise CliError(f"the catalog knows nothing that {job} could restore", Exit.NOT_FOUND)


def print_collected(invocation: Invocation, api: Api, job: str, asked: dict[str, Any]) -> None:
    """The verdict of retention about each checkpoint, and what is deleted now."""
    path = f"jobs/{quoted(job)}/checkpoints:collect"
    answer = api.post(path, {**asked, "user": asker()})
    print_judged(invocation, answer["judged"])
    goes = any(not decision["is_kept"] for decision in answer["judged"])
    remedy = ": say --delete" if asked["is_dry_run"] and goes else ""
    say(f"{cell(answer['text'])}{remedy}")


def print_judged(invocation: Invocation, judged: list[Any]) -> None:
    """The verdict of retention about each checkpoint."""
    is_for_people = invocation.output in {None, "table"}
    rows = map(_judged, judged) if is_for_people else judged
    print_records(invocation, "judged_checkpoint", rows, GC_COLUMNS)


def shown(checkpoint: Record) -> dict[str, Any]:
    """A checkpoint as a line of the table."""
    return {
        **checkpoint,
        "saved": moment(checkpoint["saved_at"]),
        "size": size(checkpoint["size_bytes"]) if checkpoint["size_bytes"] else "-",
        "ranks": checkpoint["world_size"],
        "state": state_of(checkpoint),
        "place": folder_of(checkpoint["path"]) if checkpoint["path"] else "memory",
        "note": brief(checkpoint["note"]) if checkpoint["note"] else "",
    }


def folder_of(path: str) -> str:
    """Where it is; its own folder is named by its step."""
    return path.rpartition("/")[0]


def state_of(checkpoint: Record) -> str:
    """How it stands, in a few words."""
    losses = checkpoint["survivable_losses"]
    if checkpoint["is_quarantined"]:
        state = "quarantined"
    elif checkpoint["is_missing"]:
        state = "missing"
    elif losses is not None:
        state = f"survives {losses}"
    elif checkpoint["is_suspect"]:
        state = "suspect"
    else:
        state = "verified" if checkpoint["is_verified"] else "committed"
    return f"{state}, pinned" if checkpoint["is_pinned"] else state


def _facts(checkpoint: Record) -> Iterator[tuple[str, str]]:
    yield "place", cell(checkpoint["path"] or "the memory of nodes")
    yield "saved", moment(checkpoint["saved_at"]) if checkpoint["saved_at"] else ""
    yield "round", cell(checkpoint["round"])
    yield "ranks", cell(checkpoint["world_size"])
    yield "size", size(checkpoint["size_bytes"]) if checkpoint["size_bytes"] else ""
    yield "files", cell(checkpoint["shards"] or "")
    if checkpoint["path"]:
        when = checkpoint["verified_at"]
        yield "verified", moment(when) if when else "never read back"
    there, committed = checkpoint["manifest_hash"], checkpoint["committed_hash"]
    yield "manifest", cell(there or "")
    yield "committed", cell(committed) if committed not in {None, there} else ""
    yield "data position", "in it" if checkpoint["has_data_position"] else ""
    losses = checkpoint["survivable_losses"]
    yield "may be lost", "" if losses is None else f"any {losses} of the nodes"
    yield "note", cell(checkpoint["note"])


def _judged(decision: Record) -> dict[str, Any]:
    return {
        **decision,
        "kept": "stays" if decision["is_kept"] else "goes",
        "size": size(decision["size_bytes"]),
        "place": folder_of(decision["path"]),
    }
