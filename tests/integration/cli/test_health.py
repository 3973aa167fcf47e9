"""Commands that show ranks, limits, nodes and stalls, with a real history behind them."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from everstep.messages import CheckResult, Member, NodeBeat, RankBeat, SectionLimit
from everstep_services.cli.errors import Exit
from tests.integration.history.served_story import Run, ServedStory
from tests.unit.history.facts import make
from tests.unit.history.story import stalled

LIMIT = SectionLimit(
    section="data", limit_s=30.0, source="learned", longest_s=6.0, observations=900
)
FAILED = CheckResult(check="gpu", state="failed", subject="GPU-5e", reason="XID 79")
FINE = CheckResult(check="host", state="ok", reason="all is well")


def beat(ranks: tuple[RankBeat, ...]) -> NodeBeat:
    return NodeBeat(
        job="now", node="n1", sequence=1, at=datetime.now(UTC), state="running", round=1, slot=0,
        ranks=ranks, watch="armed",
    )  # fmt: skip


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStory]:
    member = Member(slot=0, node="n1", first_rank=0, ranks=2)
    more = [
        *stalled("stuck"),
        make("job_started", job="now", round=None),
        make("round_formed", job="now", round=1, members=(member,)),
        make("round_started", job="now", round=1),
        make("watch_changed", job="now", node="n1", round=1, state="armed", reason="all is known"),
        make("limits_learned", job="now", round=1, limits=(LIMIT,), reason="5 times the longest"),
        make("operator_acted", job="now", round=1, by="ann", action="restart_job", target="",
             outcome="accepted", reason="a new data mix"),
        make("operator_acted", job="now", round=1, by="straggler", action="drain_node", target="n1",
             outcome="accepted", reason="slow for 60 s", origin="service"),
        make("node_joined", node="n1", job="now", topology=("block-3", "rack-12"), round=None),
        make("node_joined", node="n2", job="now", round=None),
        make("node_suspected", node="n2", job="_cluster", round=None, strikes=3, strikes_limit=3,
             reason="culprit of 3 incidents in 7 days", failure_class="reboot"),
        make("node_check_finished", node="n2", job="now", round=None, is_healthy=False,
             occasion="join", results=(FINE, FAILED), checks=("gpu", "host"), took_s=1.5),
    ]  # fmt: skip
    ranks = (
        RankBeat(rank=0, state="stalled", step=9, section="data", section_age_s=31.0, limit_s=30.0,
                 limit_source="learned", progress_age_s=31.0, resident_bytes=1 << 30),
        RankBeat(rank=1, step=9, progress_age_s=0.25),
    )  # fmt: skip
    with ServedStory(tmp_path_factory.mktemp("served"), more, [beat(ranks)]) as served:
        yield served


def test_ranks_are_shown_with_where_they_are_and_past_which_limit(run: Run) -> None:
    code, out, err = run("ranks", "now")
    assert code == 0
    stuck, moving = (line.split("\t") for line in out.splitlines())
    assert stuck[:7] == ["0", "n1", "stalled", "9", "data", "31 s", "30 s (learned)"]
    assert moving[:7] == ["1", "n1", "running", "9", "", "250 ms", ""]
    assert "round 1: 1 running, 1 stalled\n" in err
    assert run("ranks", "now", "--state", "stalled", "-o", "name")[1].split() == ["0"]
    record = json.loads(run("ranks", "now", "-o", "json", "-n", "1")[1])
    assert (record["schema"], record["round"], len(record["items"])) == ("everstep.rank/v1", 1, 1)
    code, out, err = run("ranks", "stuck")
    assert (code, out) == (0, "")
    assert "no ranks run: the job is " in err
    assert run("ranks", "nobody")[0] == Exit.NOT_FOUND


def test_limits_are_shown_with_why_and_whether_health_says_so(run: Run) -> None:
    code, out, err = run("limits", "now")
    assert code == 0
    assert out.rstrip("\n").split("\t") == [
        "data",
        "30 s",
        "learned",
        "5 times the longest: the longest on any rank took 6 s, seen 900 times",
    ]
    assert "rule: 5 times the longest\n" in err
    assert "these are the last that are on record" in err
    record = json.loads(run("limits", "now", "-o", "json")[1])
    assert (record["schema"], record["is_live"]) == ("everstep.limit/v1", False)


def test_the_nodes_with_the_most_strikes_come_first(run: Run) -> None:
    """`everstep nodes --sort strikes` lists the suspect first (A10.6)."""
    names = run("nodes", "now", "--sort", "strikes", "-o", "name")[1].split()
    assert names == ["n2", "n1"]
    lines = run("nodes", "now")[1].splitlines()
    assert lines[0].split("\t")[:5] == ["n1", "joined", "now", "", ""]
    assert lines[1].split("\t")[:5] == ["n2", "joined", "now", "no", "3"]
    assert "culprit of 3 incidents" in lines[1]
    assert run("nodes", "--suspect", "-o", "name")[1].split() == ["n2"]
    assert run("nodes", "--excluded") == (0, "", "no such nodes\n")


def test_a_node_is_shown_with_what_speaks_against_it(run: Run) -> None:
    code, out, _ = run("node", "show", "n2")
    assert code == 0
    for said in (
        "n2: joined: health cannot be asked",
        "strikes  3 of 3",
        "culprit of 3 incidents in 7 days; what would help: reboot",
        "(join, 1.5 s): not healthy; ran gpu, host",
        "failed  gpu   GPU-5e  XID 79",
    ):
        assert said in out
    code, out, _ = run("node", "show", "n1")
    assert "agent    running, round 1, slot 0, heard" in out
    assert "stalls: armed" in out
    assert "place    block-3/rack-12" in out
    assert json.loads(run("node", "show", "n1", "-o", "json")[1])["schema"] == "everstep.node/v1"
    assert run("node", "show", "nowhere")[0] == Exit.NOT_FOUND


def test_a_stall_is_explained_in_plain_words(run: Run) -> None:
    code, out, _ = run("why", "stuck")
    assert code == 0
    for said in (
        "rank 2 on node-2 stopped first in section data, 4.2 s before all others",
        "rank 2 made no progress for 31.2 s in section data after step 1204; the limit there is "
        "30 s, learned from how long it takes",
        "of its process: it waits for a pipe (pipe_read)",
        "past their limits, too: rank 0 in section backward",
        "3 other ranks waited for it",
    ):
        assert said in out


def test_a_job_says_whether_stalls_are_looked_for_and_who_did_what(run: Run) -> None:
    """`everstep job show` has the state of the watch (A3.8)."""
    code, out, _ = run("job", "show", "now")
    assert code == 0
    assert "stalls    armed: all is known" in out
    assert "last acts of people" in out
    assert "ann  restart_job  accepted  a new data mix" in out
    assert "drain_node" not in out, "a service asked for it"
    record = json.loads(run("job", "show", "now", "-o", "json")[1])
    assert record["watch"]["nodes"] == {"armed": 1}
    assert [act["by"] for act in record["last_acts"]] == ["ann"]


def test_what_a_token_does_not_allow_is_said(run: Run) -> None:
    for arguments in (
        ["node", "exclude", "n1"],
        ["brake", "on"],
        ["limits", "now", "--set", "a=9s"],
    ):
        code, _, err = run(*arguments)
        assert (code, "needs a token with the scope operate" in err) == (Exit.FORBIDDEN, True)
