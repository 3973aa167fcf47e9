"""Commands that ask the record: a story with a real history behind it, as text and as JSON."""

import json
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from everstep_services.cli.errors import Exit
from tests.integration.history.served_story import Run, ServedStory
from tests.unit.history.facts import BEGAN, make
from tests.unit.history.story import INCIDENT, JOB, TRACEBACK


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStory]:
    more = [
        make("job_started", job="quiet"),
        make("round_formed", job="quiet", round=1),
        make("job_started", job="braked"),
        make("round_formed", job="braked", round=1),
        make("rank_stalled", job="braked", round=1, rank=1),
        make("job_started", job="unsaved"),
        make(
            "checkpoint_committed",
            job="unsaved",
            round=1,
            tier="global",
            step=420,
            at=BEGAN + timedelta(hours=2),
        ),
        make(
            "checkpoint_failed",
            job="unsaved",
            round=1,
            tier="global",
            step=600,
            reason="No space left on device: /mnt/ck",
        ),
        make("job_ended", job="unsaved", state="done", exit_code=0),
        make("job_ended", job="over", state="failed", exit_code=1, reason="budget spent"),
        make("incident_opened", job="over", incident="i1", round=4, node="node-9", rank=None),
        make("incident_opened", job="over", incident="i2", round=5, node="node-9", rank=None),
    ]
    with ServedStory(tmp_path_factory.mktemp("served"), more) as served:
        yield served


@pytest.mark.parametrize("command", ["why", "incident"])
def test_the_newest_job_is_meant_where_none_is_named(run: Run, command: str) -> None:
    assert run(command) == run(command, "over")


@pytest.mark.parametrize("command", ["job", "ranks", "ckpt ls", "logs", "stragglers"])
def test_it_is_told_which_job_is_the_newest_though_its_page_may_not_name_it(
    run: Run, command: str
) -> None:
    code, out, err = run(*command.split(), "over")
    assert run(*command.split()) == (code, out, f"job over, the newest\n{err}")


def test_a_job_a_node_and_an_incident_are_shown_by_their_names(run: Run) -> None:
    for command, name in (("job", JOB), ("node", "node-22"), ("incident", JOB)):
        assert run(command, name) == run(command, "show", name)
    code, out, _ = run("incident", INCIDENT)
    assert (code, out) == run("incident", "show", JOB)[:2]


def test_a_command_that_acts_names_its_job_unless_one_alone_is_at_work(run: Run) -> None:
    code, out, err = run("stop")
    assert (code, out) == (Exit.USAGE, "")
    assert "name the job: at work are" in err
    assert JOB in err


def test_jobs_are_listed_with_where_they_are(run: Run) -> None:
    code, out, _ = run("jobs", "-o", "json", "--state", "running")
    found = json.loads(out)
    assert (code, found["schema"]) == (0, "everstep.job/v1")
    assert [one["job"] for one in found["items"]] == [JOB]
    assert run("jobs", "-o", "name")[1].split() == ["over", "unsaved", "braked", "quiet", JOB]
    assert run("jobs", "--user", "ann")[1].split("\t")[:3] == [JOB, "running", "2"]
    code, out, err = run("jobs", "-q", "nothing-like-this")
    assert (code, out, err) == (0, "", "no such jobs\n")


def test_the_status_of_a_live_record_has_no_line_for_a_bundle(run: Run) -> None:
    """A value that is not there is not shown to people; programs get it as null."""
    code, out, _ = run("status")
    assert code == 0
    names = [line.split("\t")[0] for line in out.splitlines()]
    assert "history.last_n" in names
    assert "history.bundle" not in names
    assert json.loads(run("status", "-o", "json")[1])["history"]["bundle"] is None


def test_a_job_is_shown_with_its_rounds_and_incidents(run: Run) -> None:
    code, out, _ = run("job", "show", JOB)
    assert code == 0
    for said in (
        f"{JOB}: running, round 2, 4 ranks",
        "command   python train.py --lr 3e-4",
        "nodes     2 nodes of 2 ranks, 1 spare",
        "restarts  1; left: restarts 9 of 10, restarts_per_hour 3 of 4",
        "1     node-3  2 to 3",
        "recovered  1.16 s  rank 2 on node-2",
    ):
        assert said in out
    record = json.loads(run("job", "show", JOB, "-o", "json")[1])
    assert [one["round"] for one in record["last_rounds"]] == [2, 1]
    assert record["last_incidents"][0]["incident"] == INCIDENT


def test_a_job_that_is_over_says_how_and_why(run: Run) -> None:
    code, out, _ = run("job", "show", "over")
    assert (code, out.splitlines()[0]) == (0, "over: failed (exit code 1): budget spent")
    assert run("job", "show", "quiet")[0] == 0
    code, out, err = run("job", "show", "nobody")
    assert (code, out, err) == (Exit.NOT_FOUND, "", "everstep: there is no job nobody\n")


def test_a_mistyped_name_is_found_and_a_value_that_cannot_be_is_refused(run: Run) -> None:
    mistyped, meant = f"{JOB}x", f"; did you mean {JOB}?\n"
    for arguments in (["job", "show"], ["why"], ["logs"], ["incidents"]):
        code, out, err = run(*arguments, mistyped)
        assert (code, out) == (Exit.NOT_FOUND, ""), arguments
        assert err.endswith(f"there is no job {mistyped}{meant}"), err
    code, _, err = run("node", "show", "node-22")
    assert (code, err.startswith("everstep: there is no node node-22; did you mean node-2")) == (
        Exit.NOT_FOUND,
        True,
    )
    code, out, err = run("jobs", "--state", "running", "--state", "nope", "-q", "nothing-like-this")
    assert (code, out) == (Exit.USAGE, "")
    assert err == (
        "everstep: there is no state 'nope': there are forming, starting, running, restarting, "
        "idle, done, failed, stopped, unknown\n"
    )
    code, out, err = run("incidents", "--outcome", "nope")
    assert (code, out) == (Exit.USAGE, "")
    assert err == (
        "everstep: there is no outcome 'nope': there are recovered, repeated, stopped, failed, "
        "preempted, merged\n"
    )


def test_incidents_are_listed_and_filtered(run: Run) -> None:
    assert run("incidents", "-o", "name")[1].split() == ["i2", "i1", INCIDENT]
    assert run("incidents", "--outcome", "recovered", "-o", "name")[1].split() == [INCIDENT]
    assert run("incidents", "over", "--open", "-o", "name")[1].split() == ["i2", "i1"]
    assert run("incidents", "--node", "node-2", "-o", "name")[1].split() == [INCIDENT]
    line = run("incidents", JOB)[1].rstrip("\n").split("\t")
    assert line[:2] == [INCIDENT, JOB]
    assert line[3:8] == ["recovered", "1.16 s", "10", "node-2", "2"]
    assert run("incidents", "quiet") == (0, "", "no such incidents\n")


@pytest.mark.parametrize(
    "arguments",
    [["why", JOB], ["incident", "show", JOB], ["incident", "show", JOB, INCIDENT[:12]]],
    ids=" ".join,
)
def test_a_story_says_who_why_and_where_the_time_went(run: Run, arguments: list[str]) -> None:
    code, out, _ = run(*arguments)
    assert code == 0
    assert out.startswith(f"incident {INCIDENT} of {JOB}: recovered in 1.16 s\n")
    for said in (
        "  rank 2, node node-2, round 1, step 1010, phase step",
        "failed, too: rank 0 (ended by SIGABRT)",
        f"its log: everstep logs {JOB} --round 1 --rank 2",
        "decided: restart, by rule restart.budget_left",
        "not wait: a spare is warm: node-3",
        "flight_recorder  node-2  rank 2        none: the rank had exited",
        "+0.520 s  round 2 formed: 2 nodes, without node-2, with node-3",
        "+1.120 s  first step of round 2",
        "in all         1.157 s",
        "and made 10 steps again",
        "went on from step 1000 (global)",
        *(f"  │ {line}" for line in TRACEBACK.splitlines()),
    ):
        assert said in out


def test_a_story_is_one_record_for_programs(run: Run) -> None:
    record = json.loads(run("why", JOB, "-o", "json")[1])
    assert record["schema"] == "everstep.incident/v1"
    assert record["primary"]["traceback"] == TRACEBACK
    assert record["ledger"]["wall_s"] == pytest.approx(1.157)


def test_an_incident_that_cannot_be_found_says_what_to_do(run: Run) -> None:
    code, _, err = run("incident", "show", JOB, "77")
    assert (code, err) == (
        Exit.NOT_FOUND,
        f"everstep: {JOB} has no incident 77: see everstep incidents {JOB}\n",
    )
    code, _, err = run("incident", "show", "over", "i")
    assert (code, err) == (
        Exit.ERROR,
        "everstep: 2 incidents of over begin with i: give more of the id\n",
    )
    code, _, err = run("why", "quiet")
    assert (code, err) == (Exit.NOT_FOUND, "everstep: nothing has gone wrong with quiet so far\n")
    code, _, err = run("why", "braked")
    assert code == Exit.NOT_FOUND
    assert "ranks have stalled 1 time: other ranks were the reason, or they moved again" in err
    assert "1 on record" in run("job", "show", "braked")[1]


def test_a_job_that_lost_its_last_save_says_so_although_it_ended_well(run: Run) -> None:
    # The clock of the node that committed is two hours ahead: the order of the log counts.
    lost = (
        "the last save of step 600 to global has failed: No space left on device: /mnt/ck; "
        "the newest checkpoint there is step 420"
    )
    code, _, err = run("why", "unsaved")
    assert code == Exit.NOT_FOUND
    assert err == (
        f"everstep: unsaved has had no incident, but {lost}. See: everstep ckpt ls unsaved\n"
    )
    code, out, _ = run("job", "show", "unsaved")
    assert code == 0
    assert lost in out


def test_an_open_incident_is_shown_as_far_as_it_is_known(run: Run) -> None:
    code, out, _ = run("why", "over")
    assert code == 0
    assert out.startswith("incident i2 of over: open\n")
    assert "where the time went" not in out


# -- logs ----------------------------------------------------------------------------------


def test_away_from_the_node_the_kept_ends_are_shown(run: Run) -> None:
    code, out, err = run("logs", JOB)
    assert (code, out) == (0, "node-2:2| CUDA out of memory — „naïve“\n")
    assert "failed ranks of round 1" in err
    record = json.loads(run("logs", JOB, "--round", "1", "--rank", "2", "-o", "jsonl")[1])
    assert (record["rank"], record["stream"], record["round"]) == (2, "stderr", 1)


def test_when_nothing_is_kept_it_says_why_and_where_to_look(run: Run) -> None:
    for arguments, said in (
        ([JOB, "--round", "1", "--rank", "3"], "did not fail by itself"),
        ([JOB, "--rank", "77"], f"no rank 77 in round 1 of {JOB}: its ranks are 0 to 3"),
        ([JOB, "--node", "node-22"], f"no node node-22 in round 1 of {JOB}; did you mean node-2"),
        ([JOB, "--node", "nosuch"], f"no node nosuch in round 1 of {JOB}: its nodes are node-"),
        ([JOB, "--stdout"], "only its stderr was"),
        ([JOB, "--round", "2"], "nothing is kept of round 2"),
        (["quiet"], "no rank of quiet has failed"),
    ):
        code, out, err = run("logs", *arguments)
        assert (code, out) == (Exit.NOT_FOUND, "")
        assert said in err


def test_files_of_this_node_come_first(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "logs" / JOB / "round-7" / "rank-2"
    folder.mkdir(parents=True)
    (folder / "stdout").write_text("from the file\n")
    (folder / "about.json").write_text('{"node":"node-2","rank":2,"round":7}')
    assert run("logs", JOB, "--log-dir", str(tmp_path / "logs"))[1] == "node-2:2| from the file\n"
    code, out, _ = run("logs", JOB, "--log-dir", str(tmp_path / "logs"), "--round", "1")
    assert (code, out) == (0, "node-2:2| CUDA out of memory — „naïve“\n")


def test_rounds_are_exported_as_cycle_info_of_nvrx(run: Run, tmp_path: Path) -> None:
    """A file for each round, and a link to the newest, as tools for NVRx read them."""
    folder = tmp_path / "info"
    for _ in range(2):  # again: files of before are replaced
        code, out, err = run("export", JOB, "--cycle-info", str(folder))
        assert (code, "2 files" in out) == (0, True), err
    names = sorted(path.name for path in folder.iterdir())
    [current] = [name for name in names if name.endswith(".current")]
    files = [name for name in names if name != current]
    assert os.readlink(folder / current) == files[-1]
    first, second = (json.loads((folder / name).read_text()) for name in files)
    assert (first["cycle_number"], second["cycle_number"]) == (0, 1)
    assert first["active_nodes"] == "node-[1-2]"
    assert first["active_ranks"] == 4
    assert first["cycle_start_time"].endswith("Z")
    assert first["cycle_end_time"].endswith("Z")
    assert second["cycle_end_time"] is None
    assert run("export", JOB, "--cycle-info", str(folder), "--to", "x")[0] == Exit.USAGE
