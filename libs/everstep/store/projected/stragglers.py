"""The projected tables of slow ranks, and of steps that changed for the whole job."""

from everstep.store.projected.changes import Column, ProjectedTable, least, led_by, once

ACTIONS = ("exclude", "stop")
"""The actions that the policy may ask for, each once for a finding."""


def _action(action: str) -> dict[str, Column]:
    """The columns of one action: its time, its outcome, and the reason."""
    fact = f"{action}_fact"
    return led_by(fact, text=f"{fact} {action}_outcome {action}_reason", int=f"{action}_us")


STRAGGLERS = ProjectedTable(
    "stragglers",
    key={"id": "text"},
    columns={
        **least(int="n"),
        **once(
            text="job node role cause reason section failure_class",
            int="round rank slot found_us windows",
            json="scores",
            float="lateness_s slowdown_ratio confidence",
        ),
        **led_by(
            "cleared_fact",
            text="cleared_fact cleared_reason",
            int="cleared_us",
            float="lasted_s lost_s",
        ),
        **led_by(
            "acted_fact", text="acted_fact action action_outcome action_reason", int="acted_us"
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
        **least(int="n"),
        **once(text="job section reason", int="round at_us step", float="before_s now_s"),
    },
)
"""When the steps of a whole job became slower or faster, and no rank stood out."""
