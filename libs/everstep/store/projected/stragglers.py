"""The projected tables of slow ranks, and of steps that changed for the whole job."""

from everstep.store.projected.changes import Column, ProjectedTable, Type, least, led_by, once

ACTIONS = ("exclude", "stop")
"""The actions that the policy may ask for, each once for a finding."""


def _action(action: str) -> dict[str, Column]:
    """The columns of one action: its time, its outcome, and the reason."""
    led: dict[str, Type] = {
        f"{action}_us": "int",
        f"{action}_outcome": "text",
        f"{action}_reason": "text",
    }
    return led_by(f"{action}_fact", "text", **led)


STRAGGLERS = ProjectedTable(
    "stragglers",
    key={"id": "text"},
    columns={
        "n": least("int"),
        **once(
            job="text",
            round="int",
            rank="int",
            node="text",
            slot="int",
            role="text",
            found_us="int",
            cause="text",
            reason="text",
            section="text",
            scores="json",
            lateness_s="float",
            slowdown_ratio="float",
            windows="int",
            confidence="float",
            failure_class="text",
        ),
        **led_by(
            "cleared_fact",
            "text",
            cleared_us="int",
            cleared_reason="text",
            lasted_s="float",
            lost_s="float",
        ),
        **led_by(
            "acted_fact",
            "text",
            acted_us="int",
            action="text",
            action_outcome="text",
            action_reason="text",
        ),
        **{name: column for action in ACTIONS for name, column in _action(action).items()},
    },
)
"""One row for each finding. `n` is the place of `straggler_found`: null while only its end, or an
action about it, has been recorded."""

STEP_SHIFTS = ProjectedTable(
    "step_shifts",
    key={"id": "text"},
    columns={
        "n": least("int"),
        **once(
            job="text",
            round="int",
            at_us="int",
            before_s="float",
            now_s="float",
            step="int",
            section="text",
            reason="text",
        ),
    },
)
"""When the steps of a whole job became slower or faster, and no rank stood out."""
