"""Commands that show slow ranks: the record as it is served, and straggler's answers on the bus."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from everstep.bus.ports import Bus
from everstep_services.cli.errors import Exit
from everstep_services.cli.pages import ranks as ranks_page
from tests.integration.history.served_story import Run, ServedStory
from tests.integration.history.test_rest_stragglers import OWN, Straggler
from tests.unit.history.facts import make


@asynccontextmanager
async def straggler(bus: Bus) -> AsyncIterator[None]:
    """Straggler's answers, before the service is there in this process."""
    answers = Straggler()
    async with bus.answer("straggler", {"scores": answers.scores, "timings": answers.timings}):
        yield


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStory]:
    slow = make(
        "straggler_found",
        job="j",
        round=2,
        rank=3,
        node="n2",
        cause="input",
        section="data",
        scores=(OWN,),
        slowdown_ratio=0.2,
        reason="25 % above the median",
    )
    old = make(
        "straggler_found",
        job="j",
        round=1,
        rank=1,
        node="n1",
        cause="host",
        section=None,
        scores=(),
        slowdown_ratio=None,
        reason="its processor was taken",
    )
    halting = make(
        "straggler_found", job="halted", round=2, rank=3, node="n2", cause="device", section=None,
        scores=(OWN,), reason="25 % above the median",
    )  # fmt: skip
    keeping = make(
        "straggler_found", job="kept", round=2, rank=1, node="n1", cause="host", section=None,
        scores=(OWN,), reason="25 % above the median",
    )  # fmt: skip
    more = [
        make("job_started", job="j", round=None),
        make("round_formed", job="j", round=2),
        make("round_started", job="j", round=2),
        old,
        make("straggler_cleared", job="j", round=1, finding=old.id, lost_s=12.5, lasted_s=60.0),
        make("step_time_shifted", job="j", round=1, step=640, before_s=0.4, now_s=0.5,
             section="data"),
        slow,
        make("incident_opened", job="j", incident="i1", round=2, node="n2", rank=3),
        make("job_started", job="halted", round=None),
        make("round_formed", job="halted", round=2),
        make("incident_opened", job="halted", incident="i0", round=1, node="n1", rank=1),
        halting,
        make("straggler_acted", job="halted", round=2, finding=halting.id, action="stop",
             outcome="asked", reason="rank 3 scores below 0.7"),
        make("straggler_acted", job="halted", round=2, finding=halting.id, action="exclude",
             outcome="refused", reason="no spare"),
        make("job_ended", job="halted", round=2, state="stopped", exit_code=93,
             reason="straggler stopped the job: rank 3 scores below 0.7"),
        make("job_started", job="kept", round=None),
        make("round_formed", job="kept", round=2),
        make("round_started", job="kept", round=2),
        keeping,
        make("straggler_acted", job="kept", round=2, finding=keeping.id, action="exclude",
             outcome="asked", reason="rank 1 is slow; n1 leaves"),
        make("job_started", job="fine", round=None),
        make("round_formed", job="fine", round=1),
    ]  # fmt: skip
    folder = tmp_path_factory.mktemp("served")
    with ServedStory(folder, more, answers=[straggler]) as served:
        yield served


@pytest.mark.parametrize("words", [["j"], ["show", "j"], ["-n", "5", "j"]], ids=" ".join)
def test_a_job_shows_its_ranks_the_slowest_first_with_cause_and_price(
    run: Run, words: list[str]
) -> None:
    """Rank, cause, who waits for whom and the price are on one screen (A6.1)."""
    code, out, err = run("stragglers", *words)
    assert code == 0
    slow, other = (line.split("\t") for line in out.splitlines())
    assert slow == ["3", "n2", "all", "500 ms", "+25 %", "100 ms", "0 ms", "input (data)"]
    assert other == ["0", "n1", "all", "400 ms", "0 %", "", "100 ms", ""]
    for said in (
        "round 2, up to step 320: a step takes 500 ms\n2 ranks compared\n",
        "UTC: rank 3 (n2, input, +25 %) in section data\n  25 % above the median\n",
        "group dp (2 ranks): the others wait 100 ms a step for rank 3, last in 90 % of its "
        "collectives\n",
        "without it the job would be 20.0 % faster\n",
        "ranks 1 and 2 were not heard\n",
    ):
        assert said in err


def test_a_wide_table_in_a_pipe_has_a_line_a_rank(run: Run) -> None:
    head, slow, other = run("stragglers", "j", "-o", "wide")[1].splitlines()
    assert head.split()[-1] == "REASON"
    assert slow.rstrip().endswith("25 % above the median")
    assert other.split()[0] == "0"


def test_watching_shows_it_again_and_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until Ctrl-C, which ends it as it ends other commands."""
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(ranks_page.watch_ranks, "__defaults__", (pause,))
    code, out, err = run("stragglers", "j", "--watch")
    assert (code, pauses) == (130, [2.0, 2.0, 2.0])
    assert [line.split("\t")[0] for line in out.splitlines()] == ["3", "0"] * 3
    assert err.count("2 ranks compared") == 3


def test_programs_get_the_whole_comparison(run: Run) -> None:
    record = json.loads(run("stragglers", "j", "-o", "json")[1])
    assert (record["schema"], record["window"]) == ("everstep.rank_scores/v1", 320)
    assert [one["rank"] for one in record["found"]] == [3]
    lines = run("stragglers", "j", "-o", "jsonl")[1].splitlines()
    assert [json.loads(line)["rank"] for line in lines] == [3, 0]
    assert run("stragglers", "j", "-o", "name")[1].split() == ["3", "0"]


def test_the_history_has_what_ended_and_what_it_cost(run: Run) -> None:
    code, out, err = run("stragglers", "j", "--history")
    assert code == 0
    slow, old = (line.split("\t") for line in out.splitlines())
    assert slow[:2] + slow[3:] == [
        "3", "n2", "open", "input (data)", "+25 %", "+20 %", "", "25 % above the median",
    ]  # fmt: skip
    assert old[3:8] == ["cleared", "host", "", "", "12.5 s"]
    assert "step 640: steps of all ranks went from 400 ms to 500 ms (+25 %), mostly in" in err
    assert run("stragglers", "j", "--history", "--cause", "host", "-o", "name")[1] == "1\n"
    assert run("stragglers", "j", "--history", "--state", "open", "-o", "name")[1] == "3\n"
    assert run("stragglers", "fine", "--history") == (0, "", "no such slow ranks\n")
    code, out, err = run("stragglers", "j", "--history", "--node", "nope")
    assert (code, out, "are shown" in err) == (0, "", False)
    assert "no such slow ranks" in err
    _, out, _ = run("stragglers", "halted", "--history", "-o", "wide")
    assert "refused exclude" in out
    assert "asked stop" in out
    record = json.loads(run("stragglers", "j", "--history", "-o", "json")[1])
    assert [len(record[name]) for name in ("items", "step_shifts")] == [2, 1]


def test_timings_are_numbers_for_programs_and_all_pages_are_fetched(run: Run) -> None:
    code, out, err = run("stragglers", "j", "--timings", "-n", "3")
    assert (code, out) == (0, "0\tn1\tall\t0.4\t\n1\tn1\tall\t0.4\t\n2\tn1\tall\t0.4\t\n")
    assert "only 3 are shown, and there are more" in err
    assert "sections, for --section: data\n" in err
    record = json.loads(run("stragglers", "j", "--section", "data", "-n", "1", "-o", "json")[1])
    assert (record["measure"], record["section"], len(record["rows"])) == ("section", "data", 1)
    _, out, _ = run("stragglers", "j", "--timings", "-n", "1", "-o", "table")
    assert out.splitlines()[0] == "own, steps 1 to 32: ▁ 400 ms to 400 ms █, · not known"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["j", "--cause", "host"], "--cause is an option of --history: add it"),
        (["j", "--history", "--timings"], "exclude each other"),
        (["j", "--measure", "own", "--section", "data"], "not both"),
        (["j", "--history", "--role", "all"], "--role"),
        (["j", "--section", "nope"], "job j has no section 'nope': use one of data\n"),
        (
            ["j", "--history", "--cause", "bogus"],
            "'input', 'compute', 'host', 'network', 'device', 'design', 'injected', 'unknown'",
        ),
        (["analyse", "trace.json"], "unexpected extra argument"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused_in_one_line(
    run: Run, words: list[str], said: str
) -> None:
    code, out, err = run("stragglers", *words)
    assert (code, out, err.count("\n")) == (Exit.USAGE, "", 1)
    assert said in err


def test_what_cannot_be_answered_says_why_in_one_line(run: Run) -> None:
    code, out, err = run("stragglers", "nobody")
    assert (code, out, err) == (Exit.NOT_FOUND, "", "everstep: there is no job nobody\n")


def test_a_job_and_its_incident_name_the_slow_rank(run: Run) -> None:
    """`everstep why` mentions a rank that was slow when the incident began (A6.1)."""
    out = run("job", "show", "j")[1]
    assert "slow      rank 3 (n2, input, +25 %)\n" in out
    assert "slow " not in run("job", "show", "fine")[1]
    out = run("why", "j")[1]
    assert "  was slow: rank 3 (n2, input, +25 %) in section data, found 0 ms before\n" in out
    record = json.loads(run("why", "j", "-o", "json")[1])
    assert [one["rank"] for one in record["slow_ranks"]] == [3, 1]


def test_why_names_the_slow_rank_that_the_policy_stopped_the_job_for(run: Run) -> None:
    """The policy's stop is shown with its reason and its rank (A6.1)."""
    code, out, _ = run("why", "halted")
    first, slow, reason, *more = out.splitlines()
    assert (code, first) == (
        0,
        "halted: stopped (exit code 93): straggler stopped the job: rank 3 scores below 0.7",
    )
    assert slow.startswith("  slow: rank 3 (n2, device, +25 %), found at ")
    assert reason == "    25 % above the median"
    assert more == [
        "    exclude: refused, no spare",
        "    stop: asked, rank 3 scores below 0.7",
        "  all of its slow ranks: everstep stragglers halted --history",
        "  its newest incident before: everstep incident show halted",
    ]
    record = json.loads(run("why", "halted", "-o", "json")[1])
    assert (record["schema"], record["state"]) == ("everstep.job/v1", "stopped")
    assert [one["rank"] for one in record["slow_ranks"]] == [3]


def test_why_names_the_slow_rank_of_a_job_without_an_incident(run: Run) -> None:
    """Its node was kept out by the policy, which does not make an incident (A6.1)."""
    code, out, _ = run("why", "kept")
    first, slow, *more = out.splitlines()
    assert (code, first) == (0, "kept: running, and had no incident so far")
    assert slow.startswith("  slow: rank 1 (n1, host, +25 %), found at ")
    assert more == [
        "    25 % above the median",
        "    exclude: asked, rank 1 is slow; n1 leaves",
        "  all of its slow ranks: everstep stragglers kept --history",
    ]
    assert run("why", "fine")[0] == Exit.NOT_FOUND
