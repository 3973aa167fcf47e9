"""Which evidence a verdict had, what was missing, and what that would have decided."""

from everstep.verdict_causes import VERDICT_CAUSES
from everstep_services.history.evidence_coverage import TELLS, coverage


def test_what_is_there_and_what_is_missing_is_counted_with_its_reasons() -> None:
    pieces = [("stderr", None), ("log", None), ("stacks", "the rank had exited"), ("stacks", None)]
    kinds = {kind.kind: kind for kind in coverage(pieces, ["user_code"])}
    assert (kinds["log"].pieces, kinds["stacks"].pieces, kinds["stacks"].missing) == (2, 1, 1)
    assert kinds["stacks"].reasons == ["the rank had exited"]
    assert kinds["gpu"].reasons == ["no agent has sent any"]
    assert kinds["exception"].reasons == ["no rank has reported any"]
    assert all(kind.decides == [] for kind in kinds.values()), "there is nothing to decide between"


def test_only_missing_evidence_that_tells_a_cause_from_another_would_have_decided() -> None:
    pieces = [("log", None), ("kernel_log", "not permitted"), ("flight_recorder", None)]
    kinds = {kind.kind: kind for kind in coverage(pieces, ["gpu", "user_code", "gpu"])}
    assert kinds["kernel_log"].decides == ["gpu", "user_code"]
    assert kinds["log"].decides == kinds["flight_recorder"].decides == []
    assert kinds["cgroup"].decides == [], "it tells neither cause"


def test_an_exception_on_record_decides_although_no_agent_sends_it_as_evidence() -> None:
    kinds = {kind.kind: kind for kind in coverage([], ["host", "user_code"], {"exception"})}
    assert (kinds["exception"].reasons, kinds["exception"].decides) == ([], [])
    assert kinds["stacks"].decides == ["host", "user_code"]


def test_a_piece_of_a_node_lacks_the_ranks_that_the_verdict_lists() -> None:
    lacks = ["stacks of rank 1: the rank had exited", "stacks of rank 3: the rank had exited"]
    kinds = {
        kind.kind: kind
        for kind in coverage([("stacks", None)], ["user_code", "network"], (), [*lacks, "a note"])
    }
    assert (kinds["stacks"].pieces, kinds["stacks"].missing) == (1, 2)
    assert kinds["stacks"].reasons == ["the rank had exited"]
    assert kinds["stacks"].decides == ["user_code", "network"]


def test_the_only_cause_of_a_verdict_that_leaves_it_open_could_be_confirmed() -> None:
    kinds = {kind.kind: kind for kind in coverage([], ["unknown", "network"])}
    assert kinds["stacks"].decides == ["network"]
    assert kinds["gpu"].decides == []


def test_each_kind_tells_causes_that_exist() -> None:
    assert all(causes <= {*VERDICT_CAUSES} - {"unknown"} for causes in TELLS.values())
