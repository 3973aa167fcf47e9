"""Checkpoints of a job on the screen, as the catalog knows them."""

from collections.abc import Iterator
from typing import Any

from everstep.sizes import size
from everstep_services.cli.api.client import Api
from everstep_services.cli.cells import Record, aligned, brief, counted, moment, span
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.operator_requests import asker, quoted
from everstep_services.cli.output import (
    cell,
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
    found = api.get(f"jobs/{quoted(job)}/checkpoints", {"limit": most, "tier": tier})
    print_list(invocation, found["items"])
    if not found["items"]:
        say("no checkpoints are known; if there are files, see everstep ckpt scan")
    if len(found["items"]) >= most:
        say(f"only the newest {most} are shown, and there may be more: -n {10 * most} shows more")
    if found["note"]:
        say(cell(found["note"]))
    for line in troubles(api.get(f"jobs/{quoted(job)}/saves")):
        say(line)


def troubles(saves: Record) -> Iterator[str]:
    """What goes wrong with saving now, a line each."""
    for one in saves["tiers"]:
        if one["failed_at"] and (one["failed_step"] or 0) > (one["committed_step"] or -1):
            why = f"{cell(one['failed_stage'])}: {cell(one['failed_reason'])}"
            yield f"step {one['failed_step']} ({one['tier']}) was not saved, {why}"
    for one in saves["delays"]:
        if one["waiting"]:
            lag = span(one["delay_lag_s"])
            waiting = f"{counted(one['waiting'], 'save')} that wait, for {lag}"
            yield f"{cell(one['node'])} has {waiting}: {cell(one['delay_reason'])}"
    restore = saves["restore"] or {}
    if restore.get("is_degraded"):
        losses = counted(restore["survivable_losses"] or 0, "node")
        why = cell(restore["copies_reason"])
        yield f"what is in memory survives the loss of {losses} only: {why}"


def print_list(invocation: Invocation, found: list[Any]) -> None:
    """Checkpoints in a table, or whole for programs."""
    is_for_people = invocation.output in {None, "table"}
    rows = map(shown, found) if is_for_people else found
    print_records(invocation, "checkpoint", rows, COLUMNS)


def print_checkpoint(
    invocation: Invocation, api: Api, job: str, step: int, tier: str | None
) -> None:
    """One checkpoint, and who has which part of it."""
    found = found_in(api, job, step, tier)
    if invocation.output is not None:
        print_record(invocation, "checkpoint", found, "step")
        return
    for line in checkpoint_page(found):
        echo(line)


def found_in(api: Api, job: str, step: int, tier: str | None) -> Any:
    """The checkpoint of a step."""
    return api.get(f"jobs/{quoted(job)}/checkpoints/{step}", {"tier": tier})


def checkpoint_page(found: Record) -> Iterator[str]:
    """The lines about one checkpoint."""
    yield f"step {found['step']} ({found['tier']}): {state_of(found)}"
    yield from aligned([(name, text) for name, text in _facts(found) if text])
    for one in found["replicas"]:
        nodes = ", ".join(cell(peer["node"]) for peer in one["holders"])
        yield f"  slot {one['slot']}: {nodes or 'nobody who is here'}"


def print_located(invocation: Invocation, api: Api, job: str, step: int | None) -> None:
    """What would be restored, and what would be passed over."""
    found = api.get(f"jobs/{quoted(job)}/checkpoints:locate", {"step": step})
    if invocation.output in {"json", "jsonl"}:
        show = print_json if invocation.output == "json" else print_line
        show({"schema": schema("located"), **found})
    else:
        print_list(invocation, found["places"])
        for one in found["rejected"]:
            where = f"{one['tier']}, {cell(folder_of(one['path']))}"
            say(f"step {one['step']} ({where}) is passed over: {cell(one['reason'])}")
        places = {folder_of(one["path"]) for one in found["places"] if one["path"]}
        if len(places) > 1:
            say(
                f"these are in {len(places)} places: a training restores from the one that it is "
                "given, and sees no other"
            )
    if not found["places"]:
        raise CliError(f"the catalog knows nothing that {job} could restore", Exit.NOT_FOUND)


def print_collected(invocation: Invocation, api: Api, job: str, asked: dict[str, Any]) -> None:
    """What retention says of each, and what happens now."""
    path = f"jobs/{quoted(job)}/checkpoints:collect"
    found = api.post(path, {**asked, "user": asker()})
    print_judged(invocation, found["judged"])
    goes = any(not one["is_kept"] for one in found["judged"])
    remedy = ": say --delete" if asked["is_dry_run"] and goes else ""
    say(f"{cell(found['text'])}{remedy}")


def print_judged(invocation: Invocation, judged: list[Any]) -> None:
    """What retention says of each checkpoint."""
    is_for_people = invocation.output in {None, "table"}
    rows = map(_judged, judged) if is_for_people else judged
    print_records(invocation, "judged_checkpoint", rows, GC_COLUMNS)


def shown(found: Record) -> dict[str, Any]:
    """A checkpoint as a line of the table."""
    return {
        **found,
        "saved": moment(found["saved_at"]),
        "size": size(found["size_bytes"]) if found["size_bytes"] else "-",
        "ranks": found["world_size"],
        "state": state_of(found),
        "place": folder_of(found["path"]) if found["path"] else "memory",
        "note": brief(found["note"]) if found["note"] else "",
    }


def folder_of(path: str) -> str:
    """Where it is; its own folder is named by its step."""
    return path.rpartition("/")[0]


def state_of(found: Record) -> str:
    """How it stands, in a few words."""
    losses = found["survivable_losses"]
    if found["is_quarantined"]:
        state = "quarantined"
    elif found["is_missing"]:
        state = "missing"
    elif losses is not None:
        state = f"survives {losses}"
    else:
        state = "verified" if found["is_verified"] else "committed"
    return f"{state}, pinned" if found["is_pinned"] else state


def _facts(found: Record) -> Iterator[tuple[str, str]]:
    yield "place", cell(found["path"] or "the memory of nodes")
    yield "saved", moment(found["saved_at"]) if found["saved_at"] else ""
    yield "round", cell(found["round"])
    yield "ranks", cell(found["world_size"])
    yield "size", size(found["size_bytes"]) if found["size_bytes"] else ""
    yield "files", cell(found["shards"] or "")
    if found["path"]:
        when = found["verified_at"]
        yield "verified", moment(when) if when else "never read back"
    there, committed = found["manifest_hash"], found["committed_hash"]
    yield "manifest", cell(there or "")
    yield "committed", cell(committed) if committed not in {None, there} else ""
    yield "data position", "in it" if found["has_data_position"] else ""
    losses = found["survivable_losses"]
    yield "may be lost", "" if losses is None else f"any {losses} of the nodes"
    yield "note", cell(found["note"])


def _judged(one: Record) -> dict[str, Any]:
    return {
        **one,
        "kept": "stays" if one["is_kept"] else "goes",
        "size": size(one["size_bytes"]),
        "place": folder_of(one["path"]),
    }
