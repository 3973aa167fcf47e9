"""What facts change: order, batches and repetition must not matter."""

import hashlib
import itertools
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.messages import FACTS, ComparedResult, Fact, kind_of
from everstep.store.projected.changes import (
    Changes,
    Key,
    LoggedFact,
    ProjectedTable,
    Value,
    merge_row,
)
from everstep.store.projected.incidents import ACTIONS, EVIDENCE, INCIDENTS
from everstep.store.projected.jobs import EXITS, JOBS, MEMBERS, ROUNDS
from everstep.store.projected.nodes import LIMITS, LOCATED, NODE_CHECKS, NODES, STALLS, WATCHES
from everstep.store.projected.numerics import COMPARED_RESULTS, NUMERICS_ACTS, NUMERICS_CASES
from everstep.store.projected.registry import PROJECTED, VERSION
from everstep.store.projected.stragglers import STEP_SHIFTS, STRAGGLERS
from everstep_services.history.projections.fold import PROJECTIONS, fold
from tests.unit.history.facts import PROJECTED_KINDS, facts, make

Tables = dict[str, dict[Key, dict[str, Value]]]


def tables_of(batches: Iterable[Sequence[Fact]]) -> Tables:
    """The tables after these batches, by the same rules as the database's."""
    tables: Tables = {shape.name: {} for shape in PROJECTED}
    n = 0
    for batch in batches:
        changes = fold(LoggedFact(n + i, 7, fact) for i, fact in enumerate(batch, 1))
        n += len(batch)
        for shape, rows in changes:
            table = tables[shape.name]
            for key, values in rows.items():
                merge_row(shape, table.setdefault(key, {}), values)
    return tables


def row(shape: ProjectedTable, key: Key, *given_facts: Fact) -> dict[str, Value]:
    return tables_of([given_facts])[shape.name][key]


def depends_on_the_log(shape: ProjectedTable, name: str) -> bool:
    leader = shape.columns[name].leader or name
    return leader.endswith("_n") or leader == "n"


def without_places(tables: Tables) -> Tables:
    """What must be the same in any order: all but places in the log and what follows them."""
    kept: Tables = {}
    for shape in PROJECTED:
        kept[shape.name] = {}
        for key, values in tables[shape.name].items():
            place = (str(values["id"]),) if shape in {EXITS, NODE_CHECKS} else key
            kept[shape.name][place] = {
                name: value for name, value in values.items() if not depends_on_the_log(shape, name)
            }
    return kept


def partitioned(items: Sequence[Fact], cuts: Iterable[int]) -> list[Sequence[Fact]]:
    ends = sorted({cut % (len(items) + 1) for cut in cuts} | {len(items)})
    return [items[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@given(st.lists(facts(), max_size=30), st.lists(st.integers(0, 1000), max_size=5))
@settings(deadline=None)
def test_batches_do_not_matter(given_facts: list[Fact], cuts: list[int]) -> None:
    one_by_one = tables_of([[fact] for fact in given_facts])
    assert tables_of([given_facts]) == one_by_one
    assert tables_of(partitioned(given_facts, cuts)) == one_by_one


@given(st.lists(facts(), max_size=20).flatmap(lambda f: st.tuples(st.just(f), st.permutations(f))))
@settings(deadline=None)
def test_order_does_not_matter(both: tuple[list[Fact], list[Fact]]) -> None:
    first, second = both
    assert without_places(tables_of([first])) == without_places(tables_of([second]))


@pytest.mark.parametrize("fact", FACTS, ids=kind_of)
def test_every_kind_can_be_folded_and_counts_for_its_job(fact: type[Fact]) -> None:
    one = make(kind_of(fact), job="j", round=3)
    assert row(JOBS, ("j",), one)["facts"] == 1
    assert row(ROUNDS, ("j", 3), one)["facts"] == 1


def test_every_projected_kind_is_in_the_properties_above() -> None:
    projected = {kind_of(fact) for fact in PROJECTIONS}
    assert projected == {*PROJECTED_KINDS, "job_changed"}


@pytest.mark.parametrize("fact", FACTS, ids=kind_of)
def test_a_leader_comes_with_all_its_followers_and_they_only_with_it(fact: type[Fact]) -> None:
    for shape, rows in fold([LoggedFact(1, 7, make(kind_of(fact), round=3))]):
        for values in rows.values():
            assert set(values) <= set(shape.columns)
            for leader, followers in shape.followers.items():
                assert {name in values for name in followers} == {leader in values}


def test_steps_that_a_training_goes_back_over_are_lost() -> None:
    acts = [make("numerics_acted", job="j", case=case, lost_steps=7) for case in "ab"]
    assert row(JOBS, ("j",), *acts)["lost_steps"] == 14


def test_what_became_of_all_states_of_a_round_is_what_rank_0_tells() -> None:
    of_all = make("state_healed", round=2, rank=0, origin="own", step=7, kept=7, taken=0,
                  replaced=1, replaced_ranks=(5,), took_s=0.2)  # fmt: skip
    other = make("state_healed", round=2, rank=5, origin="rank", step=7, took_s=0.1)
    round_ = row(ROUNDS, ("j", 2), of_all, other)
    assert round_["healed"] == "rank 5 was replaced, 7 kept their state"
    assert (round_["healed_step"], round_["healed_kept"], round_["healed_took_s"]) == (7, 7, 0.2)


def test_an_incident_that_is_part_of_another_one_does_not_count() -> None:
    opened = [make("incident_opened", job="j", incident=incident) for incident in "ab"]
    merged = make("incident_closed", job="j", incident="a", outcome="merged", merged_into="b")
    assert row(JOBS, ("j",), *opened, merged)["incidents"] == 1


def test_a_fact_about_the_cluster_makes_no_job() -> None:
    tables = tables_of([[make("node_lost", job="_cluster", round=None)]])
    assert (tables["jobs"], list(tables["nodes"])) == ({}, [("node-07",)])


def test_a_round_that_is_heard_to_end_before_it_starts_has_ended() -> None:
    end = make("round_ended", round=4, cause="node_lost", lasted_s=9.5)
    start = make("round_started", round=4, start_s=1.5)
    found = row(ROUNDS, ("j", 4), end, start)
    assert (found["phase_order"], found["end_cause"], found["start_s"]) == (4, "node_lost", 1.5)


def test_a_job_is_where_its_newest_round_is() -> None:
    late = make("round_ended", round=4)
    new = make("round_waiting", round=5)
    assert row(JOBS, ("j",), new, late)["phase_order"] == 51
    assert row(JOBS, ("j",), new, late)["round"] == 5


def test_a_changed_spec_holds_although_the_start_is_heard_of_later() -> None:
    start = make("job_started")
    spec = start.spec  # type: ignore[attr-defined]
    changed = make("job_changed", spec=type(spec)(**{**_fields(spec), "nodes_max": 99}))
    assert row(JOBS, ("j",), changed, start)["nodes_max"] == 99


def _fields(struct: object) -> dict[str, object]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}  # type: ignore[attr-defined]


def test_of_two_ends_the_one_recorded_by_the_later_id_holds_whole() -> None:
    early = make("round_ended", round=1, cause="rank_exited", node="n1", rank=3)
    late = make("round_ended", round=1, cause="operator", node=None, rank=None)
    for order in ((early, late), (late, early)):
        found = row(ROUNDS, ("j", 1), *order)
        assert (found["end_cause"], found["end_node"]) == ("operator", None)


def test_a_script_that_gives_its_number_after_the_first_step_numbers_its_steps() -> None:
    first, later = (make("progress_made", is_counted_anew=anew) for anew in (True, False))
    assert row(JOBS, ("j",), first)["is_counted_anew"] is True
    for order in ((first, later), (later, first)):
        assert row(JOBS, ("j",), *order)["is_counted_anew"] is False


@pytest.mark.parametrize(
    ("how", "failed"), [("done", 0), ("error", 1), ("signal", 1), ("unheard_of", 0)]
)
def test_a_rank_fails_only_in_ways_that_we_know(how: str, failed: int) -> None:
    fact = make("rank_exited", round=1, how=how)
    assert row(JOBS, ("j",), fact)["ranks_failed"] == failed
    assert row(EXITS, (1,), fact)["is_failure"] is bool(failed)


def test_a_stall_and_its_end_make_one_row() -> None:
    stall = make("rank_stalled", round=1, waited_s=40.0)
    over = make("rank_recovered", round=1, stall=stall.id, stalled_s=55.0)
    for order in ((stall, over), (over, stall)):
        found = row(STALLS, (stall.id,), *order)
        assert (found["waited_s"], found["stalled_s"]) == (40.0, 55.0)


def test_a_slow_rank_its_end_and_what_was_done_make_one_row_in_any_order() -> None:
    found = make("straggler_found", round=1, rank=3, cause="input", section=None)
    acted = make("straggler_acted", round=1, rank=3, finding=found.id, outcome="observed")
    cleared = make("straggler_cleared", round=1, rank=3, finding=found.id, lost_s=12.5)
    for order in itertools.permutations((found, acted, cleared, cleared)):
        shown = row(STRAGGLERS, (found.id,), *order)
        assert (shown["rank"], shown["cause"], shown["section"]) == (3, "input", None)
        assert (shown["action_outcome"], shown["lost_s"]) == ("observed", 12.5)
        assert shown["n"] == order.index(found) + 1


def test_the_end_of_a_slow_rank_that_nobody_has_found_is_not_a_finding() -> None:
    cleared = make("straggler_cleared", round=1, finding="f")
    assert row(STRAGGLERS, ("f",), cleared).get("n") is None


def test_each_change_of_the_step_is_kept() -> None:
    slower, faster = (make("step_time_shifted", round=1, now_s=now_s) for now_s in (0.4, 0.2))
    tables = tables_of([[slower, faster]])
    kept = {key: shown["now_s"] for key, shown in tables[STEP_SHIFTS.name].items()}
    assert kept == {(slower.id,): 0.4, (faster.id,): 0.2}


def test_a_case_is_what_was_suspected_judged_and_done_in_any_order() -> None:
    told = [
        make("numerics_suspected", case="c", round=2, signal="nan", value=None, ranks=(3,)),
        make("numerics_judged", case="c", round=2, kind="persistent", node="n3", reason="why"),
        make("numerics_acted", case="c", round=2, action="rollback"),
    ]
    for order in itertools.permutations(told):
        found = row(NUMERICS_CASES, ("j", "c"), *order)
        assert (found["kind"], found["node"], found["judged_reason"]) == ("persistent", "n3", "why")
        assert (found["signal"], found["value"], found["suspected_ranks"]) == ("nan", None, "[3]")
        assert row(NUMERICS_ACTS, (told[2].id,), *order)["case"] == "c"


def test_the_newest_count_of_a_round_holds() -> None:
    """A process may count anew within a round."""
    first, second = (
        make("numerics_counted", round=2, steps=steps, results=(ComparedResult(
            name="loss", compared=steps, different=1, largest=0.5),)) for steps in (9, 4)
    )  # fmt: skip
    assert row(COMPARED_RESULTS, ("j", 2, "loss"), first, second)["compared"] == 4


def test_members_and_their_stop_meet_at_the_slot() -> None:
    formed = make("round_formed", round=2)
    slot = formed.members[0].slot  # type: ignore[attr-defined]
    stopped = make("ranks_stopped", round=2, slot=slot, stop_s=3.5)
    for order in ((formed, stopped), (stopped, formed)):
        found = row(MEMBERS, ("j", 2, slot), *order)
        assert (found["node"], found["stop_s"]) == ("node-07", 3.5)


def test_a_job_has_the_ranks_of_its_newest_round() -> None:
    """An elastic job shrinks."""
    larger = make("round_formed", id=f"{1:032x}", round=1, world_size=6)
    smaller = make("round_formed", id=f"{2:032x}", round=2, world_size=4)
    for order in ((larger, smaller), (smaller, larger)):
        assert row(JOBS, ("j",), *order)["world_size"] == 4


def test_a_node_is_what_was_recorded_last() -> None:
    lost, back = make("node_lost"), make("node_returned")
    assert row(NODES, ("node-07",), lost, back)["state"] == "joined"
    assert row(NODES, ("node-07",), back, lost)["state"] == "lost"


def test_an_exclusion_that_was_only_said_excludes_nobody() -> None:
    said = make("node_excluded", mode="observe", reason="3 strikes")
    found = row(NODES, ("node-07",), said)
    assert (found.get("is_excluded"), found["spared_reason"]) == (None, "3 strikes")
    found = row(NODES, ("node-07",), said, make("node_cleared"))
    assert (found["spared_us"], found["spared_reason"]) == (None, None)


def test_strikes_count_until_the_node_is_cleared() -> None:
    suspected = make("node_suspected", strikes=3, strikes_limit=3, cause="incidents")
    found = row(NODES, ("node-07",), suspected)
    assert (found["strikes"], found["suspect_cause"]) == (3, "incidents")
    assert row(NODES, ("node-07",), suspected, make("node_cleared"))["strikes"] is None


def test_a_watch_and_limits_are_what_was_recorded_last() -> None:
    armed, paused = make("watch_changed", state="armed"), make("watch_changed", state="paused")
    assert row(WATCHES, ("j", "node-07"), armed, paused)["watch_state"] == "paused"
    first, second = (make("limits_learned", revision=number) for number in (4, 5))
    assert row(LIMITS, ("j",), first, second)["limits_revision"] == 5


def test_each_finding_of_who_stopped_first_is_kept() -> None:
    one = make("stall_located", round=1, first_ranks=(3,), waiting_ranks=63)
    two = make("stall_located", round=1, first_ranks=(5, 6))
    tables = tables_of([[one, two]])
    assert {key: found["first_ranks"] for key, found in tables[LOCATED.name].items()} == {
        (one.id,): "[3]",
        (two.id,): "[5,6]",
    }


def test_a_job_that_a_later_allocation_takes_up_knows_it_in_whatever_order() -> None:
    end = make("job_ended", state="failed")
    again = make("allocation_started")
    for order in ((end, again), (again, end)):
        found = row(JOBS, ("j",), *order)
        assert (found["ended_fact"], found["begun_fact"]) == (end.id, again.id)


def test_an_exclusion_ends_with_its_time() -> None:
    found = row(NODES, ("node-07",), make("node_excluded", mode="enforce", ttl_s=60.0))
    assert found["excluded_until_us"] == found["excluded_us"] + 60_000_000  # type: ignore[operator]


def test_an_absent_value_never_replaces_one() -> None:
    changes = Changes()
    shape = ProjectedTable("t", {"k": "text"}, {"a": JOBS.columns["round"]})
    changes.merge(shape, ("x",), a=3)
    changes.merge(shape, ("x",), a=None)
    assert [dict(rows) for _, rows in changes] == [{("x",): {"a": 3}}]


def test_a_name_is_a_structure_in_every_table_or_in_none() -> None:
    """REST shows a column by its name alone."""
    columns = [(n, c.type == "json") for s in PROJECTED for n, c in s.columns.items()]
    assert len(set(columns)) == len({name for name, _ in columns})


def test_what_became_of_a_decision_may_be_heard_of_first() -> None:
    decided = make("action_decided", action="restart", rule="restart.budget_left")
    taken = make("action_taken", action="restart", decision=decided.id, outcome="done")
    for order in ((decided, taken), (taken, decided)):
        found = row(ACTIONS, (decided.id,), *order)
        assert (found["rule"], found["outcome"]) == ("restart.budget_left", "done")


def test_an_incident_is_whole_in_whatever_order_it_is_told() -> None:
    opened = make("incident_opened", incident="i", round=3, rank=5)
    verdict = make("verdict_reached", incident="i", revision=10, cause="host")
    older = make("verdict_reached", incident="i", revision=9, cause="network")
    closed = make("incident_closed", incident="i", outcome="recovered", rank=6, cause="so it was")
    for order in ((opened, older, verdict, closed), (closed, verdict, older, opened)):
        found = row(INCIDENTS, ("j", "i"), *order)
        assert (found["round"], found["rank"], found["reason"]) == (3, 6, "so it was")
        assert (found["cause"], found["outcome"]) == ("host", "recovered")
        assert found["wall_s"] == closed.ledger.wall_s  # type: ignore[attr-defined]


def test_an_older_sender_that_says_nothing_of_the_cause_at_the_end_keeps_the_first() -> None:
    opened = make("incident_opened", incident="i", rank=5)
    closed = make("incident_closed", incident="i", rank=None, trigger="")
    assert row(INCIDENTS, ("j", "i"), closed, opened)["rank"] == 5


@pytest.mark.parametrize(
    ("kind", "summary", "stream"),
    [
        ("log", "stderr: the last 9 bytes of /logs/stderr", "stderr"),
        ("log", "stdout: the last 9 bytes of /logs/stdout", "stdout"),
        ("log", "both of them", None),
        ("stdout", "", "stdout"),
        ("stacks", "stderr: no", None),
    ],
)
def test_the_end_of_a_log_is_of_a_stream(kind: str, summary: str, stream: str | None) -> None:
    fact = make("evidence_collected", evidence=kind, summary=summary)
    assert row(EVIDENCE, (fact.id,), fact)["stream"] == stream


def test_shapes_only_change_with_their_version() -> None:
    """If this fails: raise `projected.registry.VERSION`, and write the new fingerprint here."""
    columns = {
        shape.name: sorted((n, c.type, c.rule.value, c.leader) for n, c in shape.columns.items())
        for shape in PROJECTED
    }
    said = repr([(shape.name, dict(shape.key), columns[shape.name]) for shape in PROJECTED])
    assert (VERSION, hashlib.sha256(said.encode()).hexdigest()[:12]) == (25, "e0a55178d70e")
