"""Facts for tests of the history: a few jobs, rounds, nodes and ranks, in every combination."""

import itertools
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from hypothesis import strategies as st

from everstep import subjects
from everstep.bus.ports import Delivered
from everstep.messages import FACTS, Fact, encode, kind_of
from tests.unit.messages.write_golden import example

BEGAN = datetime(2026, 11, 21, 7, 0, tzinfo=UTC)
KINDS: Mapping[str, type[Fact]] = {kind_of(fact): fact for fact in FACTS}
_ids = itertools.count()

PROJECTED_KINDS = [
    "action_decided",
    "action_taken",
    "allocation_ended",
    "allocation_started",
    "checkpoint_committed",
    "checkpoint_deleted",
    "checkpoint_failed",
    "checkpoint_quarantined",
    "checkpoint_restored",
    "evidence_collected",
    "fresh_started",
    "incident_closed",
    "incident_extended",
    "incident_opened",
    "interval_chosen",
    "job_ended",
    "job_started",
    "limits_learned",
    "node_check_finished",
    "node_cleared",
    "node_excluded",
    "node_included",
    "node_joined",
    "node_left",
    "node_lost",
    "node_refused",
    "node_returned",
    "node_suspected",
    "numerics_acted",
    "numerics_counted",
    "numerics_judged",
    "numerics_suspected",
    "progress_made",
    "rank_exited",
    "rank_recovered",
    "rank_stalled",
    "rank_started",
    "ranks_stopped",
    "replication_degraded",
    "replication_restored",
    "restore_failed",
    "round_ended",
    "round_formed",
    "round_started",
    "round_waiting",
    "save_refused",
    "saves_delayed",
    "stall_located",
    "state_healed",
    "step_time_shifted",
    "straggler_acted",
    "straggler_cleared",
    "straggler_found",
    "verdict_corrected",
    "verdict_reached",
    "watch_changed",
]


def fact_id() -> str:
    """Unique in this process, and sorted by the time of the call."""
    return f"{next(_ids):032x}"


def make(kind: str, /, **values: Any) -> Fact:
    """A fact of this kind, with every field set; `values` replace some."""
    whole = example(KINDS[kind])
    assert isinstance(whole, Fact)
    values = {"id": fact_id(), "at": BEGAN, "job": "j", "source": "test", **values}
    blob = getattr(whole, "blob", None)
    if blob is not None and "blob" not in values:  # of another job it would be refused
        values["blob"] = msgspec.structs.replace(blob, job=values["job"])
    return msgspec.structs.replace(whole, **values)


def delivered(fact: Fact, sequence: int) -> Delivered:
    """As the stream gives it."""
    return Delivered(sequence, subjects.fact(fact.job, kind_of(fact)), encode(fact))


_small: Mapping[str, st.SearchStrategy[object]] = {
    "job": st.sampled_from(["j1", "j2"]),
    "round": st.integers(1, 3),
    "node": st.sampled_from(["n1", "n2"]),
    "slot": st.integers(0, 1),
    "rank": st.integers(0, 3),
    "allocation": st.sampled_from(["a1", "a2"]),
    "step": st.integers(0, 100),
    "last_step": st.one_of(st.none(), st.integers(0, 100)),
    "how": st.sampled_from(["done", "error", "signal", "from_the_future"]),
    "incident": st.sampled_from(["i1", "i2"]),
    "decision": st.sampled_from(["d1", "d2"]),
    "revision": st.integers(0, 3),
    "stall": st.sampled_from(["s1", "s2"]),
    "finding": st.sampled_from(["f1", "f2"]),
    "state": st.sampled_from(["done", "failed", "stopped"]),
    "reason": st.sampled_from(["because", "„naïve“", "nul \x00 inside"]),
    "lost_steps": st.integers(0, 5),
    "is_first": st.booleans(),
    "is_healthy": st.booleans(),
    "mode": st.sampled_from(["enforce", "observe"]),
    "ttl_s": st.one_of(st.none(), st.just(60.0)),
    "restarts": st.integers(0, 3),
}


@st.composite
def facts(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Fact:
    """Any fact that changes a table."""
    kind = draw(st.sampled_from(PROJECTED_KINDS))
    names = {field.name for field in msgspec.structs.fields(KINDS[kind])}
    values = {name: draw(values) for name, values in _small.items() if name in names}
    at = BEGAN + timedelta(seconds=draw(st.integers(0, 100)))
    return make(kind, at=at, **values)
