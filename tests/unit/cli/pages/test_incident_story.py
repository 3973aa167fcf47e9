"""The story of an incident: which lines a reader gets, whatever is missing."""

from typing import Any

from everstep_services.cli.pages.incidents.story import PARTS, story
from everstep_services.cli.pages.incidents.verdict import verdict_lines


def piece(**values: Any) -> dict[str, Any]:
    none = ("rank", "blob", "missing_reason", "expires_at", "gone_reason")
    given = {"kind": "log", "node": "n1", "round": 1, "summary": "the end of stderr"}
    return dict.fromkeys(none) | given | values


def evidence(*pieces: dict[str, Any]) -> list[str]:
    return list(PARTS["Evidence"]({"evidence": pieces}))


def test_pieces_of_several_rounds_name_their_round() -> None:
    """A crash loop is one incident with the logs of each of its rounds (A4.5)."""
    blob = {"size_bytes": 9}
    rows = [piece(round=number, rank=3, blob=blob) for number in (1, 2)]
    assert evidence(*rows)[1:] == [
        "  log  round 1  n1  rank 3  9 B  the end of stderr",
        "  log  round 2  n1  rank 3  9 B  the end of stderr",
    ]
    assert evidence(rows[0])[1:] == ["  log  n1  rank 3  9 B  the end of stderr"]


def test_what_only_the_bus_has_says_until_when() -> None:
    """Nobody has to know how long a bus keeps what (A11.1)."""
    blob = {"size_bytes": 9}
    days = ("2026-12-24T08:00:00Z", "2026-12-23T08:00:00Z")
    lines = evidence(*(piece(blob=blob, expires_at=day) for day in days), piece(blob=blob))
    assert lines[-1] == "  2 pieces are on the bus only, until 2026-12-23 08:00:00 UTC"
    assert "bus" not in "".join(evidence(piece(blob=blob)))
    gone = piece(blob=blob, expires_at=days[0], gone_reason="the bus kept it until then")
    assert evidence(gone)[-1] == "  1 piece is gone: the bus kept it until then"


def test_a_revision_that_only_explains_is_no_change_of_mind() -> None:
    """The words of a model stand next to the verdict, and change nothing of it (A11.1)."""
    none = ("kind", "cause_kind", "culprit_ranks", "culprit_nodes", "alternatives", "advice")
    said = dict.fromkeys(none) | {
        "cause": "data", "verdict_reason": "batch 17 has no labels", "confidence": 0.9,
        "is_inconclusive": False, "is_corrected": False, "evidence": [], "missing": [],
        "revision": 0, "explanation": None, "summary": "data (90 % sure)",
    }  # fmt: skip
    explained = said | {"revision": 1, "explanation": "A batch\nhas no labels."}
    incident = {"verdict": explained, "revisions": [said], "similar": [], "corrections": []}
    lines = list(verdict_lines(incident))
    assert lines[-2:] == ["  │ A batch", "  │ has no labels."]
    assert lines[0] == "verdict: data (90 % sure)"
    assert not [line for line in lines if "could have" in line]
    gap = {"kind": "kernel_log", "decides": ["gpu", "user_code"], "reasons": ["not permitted"]}
    undecided = list(verdict_lines(incident | {"evidence_coverage": [gap]}))
    line = "  kernel log (not permitted) could have decided between gpu and user_code"
    assert line in undecided
    for cause, named in (("host", "host"), ("unknown", "an unknown cause")):
        other = said | {"cause": cause}
        changed = list(verdict_lines(incident | {"revisions": [other]}))
        assert changed[-1] == f"  revision 1; at first it said {named}: batch 17 has no labels"
    open_ = said | {"is_inconclusive": True, "verdict_reason": "inconclusive: too little"}
    changed = list(verdict_lines(incident | {"revisions": [open_]}))
    assert changed[-1] == "  revision 1; at first it said inconclusive: too little"


def test_a_rank_that_left_early_had_ended_by_itself() -> None:
    """Only of a rank that the verdict finds alive is it told that it had not ended (A11.1)."""
    none = ("primary", "stall", "located", "phase", "section", "culprit_nodes", "opened_at")
    told = dict.fromkeys(none) | {
        "first_report": "rank 0 exited with 1", "culprit_ranks": [1], "round": 1, "stalls": (),
        "slow_ranks": (), "exits": (), "culprit_rank_nodes": ["n1"], "next_round": 2,
        "rounds": ({"round": 1, "ended_at": "2026-01-01T00:00:00Z"},),
    }  # fmt: skip
    for kind, is_told in (("lost_by_all", True), ("left_early", False), ("node_lost", False)):
        lines = list(PARTS["What happened"](told | {"verdict": {"cause_kind": kind}}))
        assert lines[1] == "  rank 1, node n1, round 1"
        assert ("no end of its own is on record" in "".join(lines)) is is_told, kind
    goes_on = {"next_round": 1, "verdict": {"cause_kind": "lost_by_all"}}
    for more in (goes_on, {"rounds": ({"round": 1, "ended_at": None},)}):
        assert "no end of its own" not in "".join(PARTS["What happened"](told | goes_on | more))


def test_an_incident_that_nobody_has_judged_says_what_is_missing() -> None:
    """Without attribution there is no verdict, and the page reports that (A11.1)."""
    (line,) = verdict_lines({"verdict": None})
    assert line == "verdict: none yet; attribution judges it within seconds, or once it runs again"


def test_where_ranks_kept_their_states_the_story_tells_what_became_of_all() -> None:
    """A round of an older service has no such sentence."""
    healed = "rank 5 was replaced, 7 kept their state"
    entries = {"heal_s": 0.5, "other_s": 0.0, "wall_s": 0.5}
    incident = {"ledger": entries, "outcome": "recovered", "round": 1, "next_round": 2,
                "story": "round 2 has made its first step", "restored_step": None,
                "lost_steps": 0}  # fmt: skip
    rounds = ({"round": 1}, {"round": 2, "healed": healed})
    lines = list(PARTS["Where the time went"](incident | {"rounds": rounds}))
    assert [line.split()[0] for line in lines[1:3]] == ["heal", "in"]
    assert lines[3:] == [f"  {healed}, 0 steps lost"]
    older = incident | {"rounds": ({"round": 1}, {"round": 2})}
    assert not list(PARTS["Where the time went"](older))[3:]


def test_a_recovery_that_nobody_saw_has_only_a_limit() -> None:
    """A bare loop may be well long before its job ends; who restarts in its process is seen."""
    entries = ("detect", "evidence", "decide", "stop", "rendezvous", "start", "restore")
    ledger = {f"{name}_s": 0.0 for name in (*entries, "first_step")} | {"wall_s": 5.3}
    none = ("lost_steps", "restored_step", "restored_tier", "lost_s")
    unseen = dict.fromkeys(none) | {
        "rounds": (),
        "incident": "i", "job": "j", "outcome": "recovered", "round": 1, "next_round": 2,
        "ledger": ledger | {"other_s": 5.3}, "story": "every rank has finished",
    }  # fmt: skip
    told = "no step was seen"
    assert next(iter(story(unseen))) == "incident i of j: recovered within 5.3 s"
    assert told in "".join(PARTS["Where the time went"](unseen))
    first = unseen | {"ledger": ledger | {"other_s": 0.0, "first_step_s": 0.3, "wall_s": 0.9}}
    assert next(iter(story(first))) == "incident i of j: recovered in 900 ms"
    assert "until the first collective began" in "".join(PARTS["Where the time went"](first))
    stepped = first | {"story": "rank 1 was ended by SIGKILL; round 2 has made its first step"}
    assert told not in "".join(PARTS["Where the time went"](stepped))
    stayed = unseen | {"next_round": 1}
    assert next(iter(story(stayed))) == "incident i of j: recovered in 5.3 s"
    assert told not in "".join(PARTS["Where the time went"](stayed))
