"""Commands that say who caused an incident: the verdict first, a correction, a report to send."""

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from pathlib import Path

import pytest

from everstep.bus.ports import Bus
from everstep.evidence.archive import ArchiveMember, pack
from everstep.messages import Alternative, CorrectVerdict, Done, EvidenceItem, Message
from everstep_services.cli.errors import Exit
from tests.integration.history.served_story import Run, ServedStory
from tests.unit.history.facts import make
from tests.unit.history.story import INCIDENT, JOB

HOSTILE = "</pre><script>alert(1)</script> ``` [x](javascript:1) \x1b[31m\u202e https://a:pw@b/"
MINE = {"job": JOB, "incident": INCIDENT}
STACKS = """Process 7: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 7 (active): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2810)
    main (train.py:61)
"""
ASKED: list[CorrectVerdict] = []


@asynccontextmanager
async def attribution(bus: Bus) -> AsyncIterator[None]:
    """Takes corrections down, and has evidence of its incident on the bus."""

    async def correct(question: Message) -> Done:
        assert isinstance(question, CorrectVerdict)
        ASKED.append(question)
        return Done(text="taken down: host")

    async with bus.answer("attribution", {"correct": correct}):
        yield


VERDICT = make(
    "verdict_reached",
    **MINE,
    cause="user_code",
    kind="python_exception",
    confidence=0.93,
    reason=f"rank 2 raised ValueError {HOSTILE}",
    culprit_ranks=(2,),
    culprit_nodes=(),
    evidence=(EvidenceItem(says="rank 2 raised ValueError", analyzer="ends", weight=0.95),),
    alternatives=(Alternative(cause="network", confidence=0.04, reason="less speaks for it"),),
    missing=("flight_recorder of node-2: the rank had exited",),
    advice="stop",
    retry="after_change",
    explanation=f"One batch has no labels.\nLook at it {HOSTILE}",
    fingerprint="f1",
    revision=0,
    is_inconclusive=False,
    is_corrected=False,
)
UNSURE = make(
    "verdict_reached",
    job="unsure",
    incident="0" * 32,
    cause="unknown",
    reason="inconclusive: there is no evidence for a cause of rank_exited",
    missing=("stacks of node-1: timed out after 5 s",),
    is_inconclusive=True,
    is_corrected=False,
    culprit_ranks=(),
    culprit_nodes=(),
)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStory]:
    more = [
        VERDICT,
        make("job_started", job="unsure"),
        make("incident_opened", job="unsure", incident="0" * 32, node="node-1", reason=HOSTILE),
        UNSURE,
        make("incident_opened", job="other", incident="1" * 32, node="n9"),
        make("verdict_reached", job="other", incident="1" * 32, fingerprint="f1", culprit_nodes=()),
        make("job_started", job="alone"),
        make("allocation_started", job="alone", allocation="a"),
        make("incident_opened", job="alone", incident="2" * 32, node="n9"),
        make("incident_closed", job="alone", incident="2" * 32, outcome="recovered"),
        make(
            "allocation_ended",
            job="alone",
            allocation="a",
            state="failed",
            exit_code=92,
            reason="round 5: 1 of 2 nodes joined within 600 s",
        ),
    ]
    with ServedStory(
        tmp_path_factory.mktemp("served"), more, scope="operate", answers=[attribution]
    ) as served:
        yield served


@pytest.mark.parametrize("named", [JOB, INCIDENT, INCIDENT[:12]])
def test_why_has_the_verdict_first(run: Run, named: str) -> None:
    """One command says cause, rank, confidence, evidence, and what was done (A11.1)."""
    code, out, err = run("why", named)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    first = lines.index("verdict: user_code, python exception (93 % sure)")
    assert lines[first - 1] == ""
    assert first < lines.index("what happened")
    for said in (
        "  rank: 2",
        "    +0.95  ends  rank 2 raised ValueError",
        "  not network (4 %): less speaks for it",
        "  missing: flight_recorder of node-2: the rank had exited",
        "  advice: change something, or it may come again: the training goes on",
        "  what to do: docs/runbooks/cause-user-code.md",
        "  in the words of a language model, which decided nothing",
        "  │ One batch has no labels.",
    ):
        assert said in lines
    assert "1 other incident with the same failure; the newest is 111111111111 of other" in out
    assert "\x1b" not in out
    assert "\u202e" not in out


def test_an_inconclusive_verdict_says_what_is_missing(run: Run) -> None:
    """It accuses nobody (A11.1)."""
    out = run("why", "unsure")[1]
    assert "\nverdict: inconclusive\n" in out
    assert "  missing: stacks of node-1: timed out after 5 s" in out
    assert "what to do" not in out


def test_a_job_that_gave_up_tells_of_its_end_and_not_of_a_mended_incident(run: Run) -> None:
    code, out, _ = run("why", "alone")
    assert code == 0
    first, then, before = out.splitlines()
    assert first.startswith("alone: its last allocation has ended at ")
    assert first.endswith(" UTC (exit code 92): round 5: 1 of 2 nodes joined within 600 s")
    assert then == "  the job is not done: it continues when its agents are started again"
    assert before.endswith("everstep incident show alone")


def test_what_is_no_job_and_no_incident_says_so(run: Run) -> None:
    code, _, err = run("why", "nobody")
    assert (code, err) == (Exit.NOT_FOUND, "everstep: there is no job nobody\n")
    code, _, err = run("why", "f" * 32)
    assert (code, err) == (Exit.NOT_FOUND, f"everstep: there is no incident {'f' * 32}\n")
    code, _, err = run("why", "f" * 12)
    assert (code, err) == (
        Exit.NOT_FOUND,
        f"everstep: the record has no incident {'f' * 12}: see everstep incidents\n",
    )


def test_a_person_corrects_a_verdict(run: Run) -> None:
    """By a part of its id, with a note for the record (A11.1)."""
    words = ("--cause", "host", "--node", "node-2", "--rank", "2", "--note", "its fan had stopped")
    code, out, _ = run("incident", "correct", INCIDENT[:12], *words)
    assert (code, out) == (0, f"{INCIDENT} of {JOB}: taken down: host\n")
    asked = ASKED[-1]
    assert (asked.cause, asked.culprit_nodes, asked.culprit_ranks) == ("host", ("node-2",), (2,))
    assert (asked.reason, asked.origin) == ("its fan had stopped", "rest")
    assert run("incident", "correct", INCIDENT, "--cause", "gremlins", "--note", "x")[0] == 2
    assert run("incident", "correct", INCIDENT, "--cause", "host")[0] == 2
    named = ("--cause", "host", "--note", "x", "--node", "bad node!")
    code, _, err = run("incident", "correct", INCIDENT, *named)
    assert (code, err) == (
        Exit.USAGE,
        "everstep: 'bad node!' is not the name of a node: see everstep nodes\n",
    )
    code, _, err = run("incident", "correct", JOB, "--cause", "host", "--note", "x")
    assert (code, err) == (
        Exit.USAGE,
        f"everstep: {JOB} is a job; name one of its incidents: everstep incidents {JOB}\n",
    )


# -- reports -------------------------------------------------------------------------------


class _Page(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [str(value) for name, value in attrs if name in {"href", "src"}]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_report_is_one_page_that_needs_nothing_else(run: Run, tmp_path: Path) -> None:
    """Nothing that a rank wrote is markup, and known secrets are not in it (A11.1, A13.3)."""
    file = tmp_path / "report.html"
    code, out, err = run("incident", "report", INCIDENT, "-o", "html", "-f", str(file))
    assert (code, out) == (0, "")
    assert str(file) in err
    page = _Page()
    page.feed(text := file.read_text())
    assert "script" not in page.tags
    assert page.links == []
    assert "<script>alert(1)" in page.text
    assert "a:pw@b" not in text
    assert "https://a:***@b/" in page.text
    for said in (
        f"Incident {INCIDENT} of {JOB}",
        "verdict: user_code, python exception (93 % sure)",
        "decided: restart, by rule restart.budget_left",
        "in all         1.157 s",
        "the rank had exited",
        "CUDA out of memory — „naïve“",
        "Similar incidents",
        "in the words of a language model, which decided nothing",
    ):
        assert said in page.text
    assert re.search(r"[0-9a-f]{64}", page.text), "the hash of the log"


def test_a_report_that_cannot_be_written_says_why(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "nothing" / "report.md"
    code, _, err = run("incident", "report", JOB, "-f", str(file))
    why = "cannot be written: No such file or directory; name another with --file"
    assert (code, err) == (Exit.ERROR, f"everstep: {file} {why}\n")


def test_a_report_in_markdown_has_no_markup_of_strangers(run: Run) -> None:
    """Of a job it is its newest incident."""
    code, out, _ = run("incident", "report", JOB)
    assert code == 0
    assert out.startswith(f"# Incident {INCIDENT} of llama\\-8b\n")
    outside, fence = [], ""
    for line in out.splitlines():
        ticks = re.match("`{3,}", line)
        if ticks and not fence:
            fence = ticks[0]
        elif line == fence:
            fence = ""
        elif not fence:
            outside.append(line)
    assert fence == ""
    assert not any("<script>" in line for line in outside)
    assert "a:pw@b" not in out


def test_a_report_is_json_for_nobody(run: Run) -> None:
    code, _, err = run("incident", "report", INCIDENT, "-o", "json")
    assert code == Exit.USAGE
    assert "html" in err
    assert json.loads(run("why", INCIDENT, "-o", "json")[1])["verdict"]["cause"] == "user_code"


def test_stacks_and_collectives_of_archives_are_read() -> None:
    """Members of all archives count together; one that is damaged is left out (A13.3)."""
    from everstep_services.attribution.readings import flight_report, stack_report

    whole = pack(
        [ArchiveMember(rank, "txt", STACKS.encode()) for rank in (0, 1)], {2: "it had exited"}
    )
    found = stack_report([(None, whole), (None, whole[:40]), (None, b"\x1f\x8bnothing")], 3)
    assert found is not None
    assert [one.ranks for one in found.groups] == [(0, 1)]
    assert found.missing == (2,)
    assert stack_report([], None) is None
    assert flight_report([(None, whole[:40])], None) is None
    dumps = pack(
        [ArchiveMember(0, "json", b'{"version": "2.10", "entries": []}')], {1: "it had exited"}
    )
    report = flight_report([(None, dumps), (None, dumps[:40])], 2)
    assert report is not None
    assert report.dumps == 1
    assert "rank 1 was left out: it had exited" in report.notes
    assert any(note.startswith("an archive was left out: ") for note in report.notes)
