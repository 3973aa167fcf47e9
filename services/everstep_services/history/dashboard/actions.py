"""What people can do from a page: each needs a reason, and its object's name typed once more.

An action is sent along REST's own path, so it has REST's scopes, limits and record.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request

from everstep.job_states import OVER
from everstep_services.history.dashboard.pages.page import Page
from everstep_services.history.dashboard.rest import Reader, RestError, path_of

Form = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Field:
    """A question of the form."""

    name: str
    label: str
    kind: str = "text"
    hint: str = ""
    default: str = ""


@dataclass(frozen=True, slots=True)
class PageAction:
    """One thing that can be done."""

    name: str
    effect: str
    about: tuple[str, ...]
    """What the link names; the first is what must be typed."""
    path: Callable[[Form], str]
    body: Callable[[Form], Mapping[str, Any]]
    fields: tuple[Field, ...] = ()
    needs_work: bool = False
    """Its job must not be over."""
    is_drastic: bool = False
    back: str = "job"

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that its form may have."""
        asked = (field.name for field in self.fields)
        return ("key", *self.about, *asked, "reason", "confirmed")


def _job_verb(verb: str, form: Form) -> str:
    return f"{path_of('jobs', form.get('job', ''))}:{verb}"


def _node_verb(verb: str, form: Form) -> str:
    return f"{path_of('nodes', form.get('node', ''))}:{verb}"


def _checkpoint(verb: str, form: Form) -> str:
    return f"{path_of('jobs', form.get('job', ''), 'checkpoints', form.get('step', ''))}:{verb}"


def _nothing(_form: Form) -> Mapping[str, Any]:
    return {}


def _saving_first(form: Form) -> Mapping[str, Any]:
    given = form.get("save_first", "")
    if given not in {"", "on"}:
        raise RestError(422, f"save_first is on or left out, not {given[:40]!r}")
    return {"save_first": given == "on"}


def _another_round(form: Form) -> Mapping[str, Any]:
    """Only the round that its form named: a second person who asks the same ends no other round."""
    number = form.get("round", "")
    if number and not (number.isdecimal() and len(number) < 10):
        raise RestError(422, f"round is a number, not {number[:40]!r}")
    return {**_saving_first(form), "round": int(number) if number else None}


def _ttl(form: Form) -> Mapping[str, Any]:
    hours = _number(form.get("hours", ""), "hours")
    return {"ttl_s": None if hours is None else hours * 3600}


def _correction(form: Form) -> Mapping[str, Any]:
    ranks = _capture(form).get("ranks", [])
    nodes = [name.strip() for name in form.get("nodes", "").split(",") if name.strip()]
    return {"cause": form.get("cause", ""), "culprit_ranks": ranks, "culprit_nodes": nodes}


def _capture(form: Form) -> Mapping[str, Any]:
    texts = [text.strip() for text in form.get("ranks", "").split(",") if text.strip()]
    if not all(text.isdecimal() and len(text) < 10 for text in texts):
        raise RestError(422, "ranks are numbers with commas between them")
    return {"ranks": [int(text) for text in texts]} if texts else {}


def _of_node(form: Form) -> Mapping[str, Any]:
    return {"job": form.get("job") or None}


def _drain(form: Form) -> Mapping[str, Any]:
    within_s = _number(form.get("within_s", ""), "within_s")
    return {**_of_node(form), "within_s": _DRAIN_S if within_s is None else within_s}


def _tier(form: Form) -> Mapping[str, Any]:
    return {"tier": form.get("tier") or "global"}


def _switch(form: Form) -> Mapping[str, Any]:
    return {"changes": {form.get("switch", ""): form.get("value", "")}, "job": _job(form)}


def _brake(form: Form, *, is_on: bool) -> Mapping[str, Any]:
    return {"is_on": is_on, "job": _job(form)}


def _job(form: Form) -> str | None:
    job = form.get("job", "")
    return None if job in {"", "all"} else job


def _number(text: str, name: str) -> float | None:
    if not text.strip():
        return None
    try:
        number = float(text)
    except ValueError as error:
        raise RestError(422, f"{name} is a number, not {text[:40]!r}") from error
    if not 0 <= number <= _MOST_NUMBER:
        raise RestError(422, f"{name} is a number from 0 to {_MOST_NUMBER}, not {text[:40]!r}")
    return number


_MOST_NUMBER = 87_600
"""Ten years of hours."""
_DRAIN_S = 60
_SAVE_HINT = "the ranks get 60 s, or what rendezvous is set to"
_SAVE = Field("save_first", "Save a checkpoint first", "checkbox", _SAVE_HINT)
_IN_JOB = ("job",)
_AT_STEP = ("step", "job", "tier")

ACTIONS: Mapping[str, PageAction] = {
    "stop": PageAction(
        "Stop the job", "Its round ends, and no other one follows. Its agents exit with code 93.",
        _IN_JOB, partial(_job_verb, "stop"), _saving_first, (replace(_SAVE, default="on"),),
        needs_work=True, is_drastic=True,
    ),
    "restart": PageAction(
        "Restart the job",
        "This round ends and another one follows. It does not count against the restart budget.",
        ("job", "round"), partial(_job_verb, "restart"), _another_round, (_SAVE,),
        needs_work=True, is_drastic=True,
    ),
    "save": PageAction(
        "Save now", "The ranks are asked to save after one of their next steps, and continue.",
        _IN_JOB, partial(_job_verb, "save"), _nothing, needs_work=True,
    ),
    "capture": PageAction(
        "Capture evidence", "Stacks and flight recorders are collected. Training goes on.",
        _IN_JOB, partial(_job_verb, "capture"), _capture,
        (Field("ranks", "Ranks", hint="as 0, 3, 7; empty for all"),), needs_work=True,
    ),
    "correct": PageAction(
        "Correct the verdict",
        "No later evidence changes a correction. Give as reason how you know.",
        ("incident",),
        lambda form: f"{path_of('incidents', form.get('incident', ''))}/correction",
        _correction,
        (
            Field("cause", "Cause", hint="user_code, configuration, data, framework, gpu, host, "
                  "network, storage, scheduler or unknown"),
            Field("ranks", "Culprit ranks", hint="as 0, 3, 7"),
            Field("nodes", "Culprit nodes", hint="with commas between them"),
        ),
        back="incident",
    ),
    "exclude": PageAction(
        "Exclude the node",
        "It may join no round until the exclusion ends; a round that runs on it continues.",
        ("node",), partial(_node_verb, "exclude"), _ttl,
        (Field("hours", "For how many hours", "number", "empty: 24; 0: until it is included"),),
        is_drastic=True, back="node",
    ),
    "include": PageAction(
        "Include the node", "Its exclusion and its strikes end now.",
        ("node",), partial(_node_verb, "include"), _nothing, back="node",
    ),
    "drain": PageAction(
        "Drain the node",
        "The ranks of its job get time to save, and the round ends. The next one forms without the "
        "node: with a spare, or with fewer nodes if the job may; else the job waits for another "
        "node. Draining a spare ends no round.",
        ("node", "job"), partial(_node_verb, "drain"), _drain,
        (Field("within_s", "Seconds to save first", "number", "0: the round ends at once",
               str(_DRAIN_S)),),
        needs_work=True, is_drastic=True, back="node",
    ),
    "check": PageAction(
        "Check the node", "Its agent examines it now, also during a training.",
        ("node", "job"), partial(_node_verb, "check"), _of_node, needs_work=True, back="node",
    ),
    "pin": PageAction(
        "Pin the checkpoint", "Retention never deletes it.",
        _AT_STEP, partial(_checkpoint, "pin"), _tier, back="checkpoints",
    ),
    "unpin": PageAction(
        "Unpin the checkpoint", "Retention may delete it again.",
        _AT_STEP, partial(_checkpoint, "unpin"), _tier, back="checkpoints",
    ),
    "verify": PageAction(
        "Verify the checkpoint", "Its files are read back and compared with their hashes.",
        _AT_STEP, partial(_checkpoint, "verify"), _tier, back="checkpoints",
    ),
    "brake": PageAction(
        "Pull the brake", "Everstep only restarts rounds that failed; the rest is only recorded.",
        _IN_JOB, lambda _form: "brake", partial(_brake, is_on=True), is_drastic=True,
        back="control",
    ),
    "release": PageAction(
        "Release the brake", "Decisions are carried out again.",
        _IN_JOB, lambda _form: "brake", partial(_brake, is_on=False), back="control",
    ),
    "switch": PageAction(
        "Change a switch", "It takes effect at once; nothing is restarted.",
        ("switch", "job"), lambda _form: "control", _switch,
        (Field("value", "New value", hint="empty goes back to the default"),), back="control",
    ),
}  # fmt: skip


async def ask(reader: Reader, request: Request) -> Page:
    """The page that asks for a reason and for the name of what is on record."""
    action = _action(request)
    given = {field.name: field.default for field in action.fields} | dict(request.query_params)
    why_not = ""
    for name in ("job", "node", "incident"):
        if name not in action.about or given.get(name, "") in {"", "all"}:
            continue
        detail = await reader.get(path_of(f"{name}s", given[name]))
        if name == "job" and action.needs_work and detail["state"] in OVER:
            end = detail["end_headline"] or "no reason is on record"
            why_not = f"The job is over, and {detail['state']}: {end}"
        if name == "job" and "round" in action.about and detail["round"] is not None:
            given.setdefault("round", str(detail["round"]))
        is_of_job = action.needs_work and name == "node" and detail["job"] == given.get("job")
        if is_of_job and detail["state"] == "left":
            why_not = f"{given[name]} has left the job: {detail['state_reason']}"
    return _asked(request, given, "", why_not=why_not)


async def do(reader: Reader, request: Request, *, form: Form) -> Page:
    """Have it done, and show what was answered."""
    action = _action(request)
    object_ = form.get(action.about[0], "")
    if form.get("confirmed", "").strip() != object_ or not object_:
        return _asked(request, form, f"Type {object_} to confirm.", 422)
    body: dict[str, Any] = {"reason": form.get("reason", "").strip()}
    try:
        decided = await reader.send("POST", action.path(form), body | dict(action.body(form)))
    except RestError as error:
        if error.status == 401:
            raise
        return _asked(request, form, error.detail, error.status)
    values = {
        "title": action.name,
        "action": action,
        "decided": decided,
        "back": _back(action, form),
    }
    return Page("done.html", values)


def _asked(
    request: Request, given: Form, problem: str, status: int = 200, why_not: str = ""
) -> Page:
    action = _action(request)
    about = {name: given.get(name, "") for name in action.about}
    if not about[action.about[0]]:
        raise RestError(404, f"the link does not name the {action.about[0]}")
    values = {
        "title": action.name,
        "verb": request.path_params["verb"],
        "action": action,
        "about": about,
        "object": about[action.about[0]],
        "given": given,
        "problem": problem,
        "why_not": why_not,
        "back": _back(action, given),
    }
    return Page("action.html", values, status)


def _action(request: Request) -> PageAction:
    action = ACTIONS.get(request.path_params["verb"])
    if action is None:
        raise RestError(404, "there is no such action")
    return action


def _back(action: PageAction, form: Form) -> str:
    match action.back:
        case "node":
            return f"/{path_of('nodes', form.get('node', ''))}"
        case "checkpoints":
            return f"/{path_of('jobs', form.get('job', ''), 'checkpoints')}"
        case "incident":
            return f"/{path_of('incidents', form.get('incident', ''))}"
        case "control":
            return "/control"
        case _:
            return f"/{path_of('jobs', form.get('job', ''))}"
