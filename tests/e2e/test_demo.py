"""`everstep demo`: to its end, and ended in the middle."""

import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from operator import not_
from pathlib import Path

import pytest

from everstep_services.cli.api.client import Api
from tests.e2e.control_planes import PATIENT
from tests.e2e.processes import Process, environment, kill_all, python, tagged
from tests.variants import variant
from tests.waiting import until


@pytest.mark.parametrize("number", [variant(signal.SIGTERM), variant(signal.SIGHUP), signal.SIGINT])
def test_whoever_ends_it_finds_nothing_left(tmp_path: Path, job: str, number: int) -> None:
    environ = environment(tmp_path, job, TMPDIR=str(tmp_path))
    demo = Process(python("-m", "everstep_services.cli", "demo"), environ, tmp_path / "demo.log")
    try:
        until(lambda: "three agents" in demo.said, "its agents are started")
        demo.send(number)
        assert demo.wait() == 128 + number
        until(lambda: tagged(job), "nothing is left", holds=not_)
    finally:
        demo.kill()
        kill_all(tagged(job))


ENDS_WITHIN_S = 240.0
IN_ORDER = {**PATIENT, "EVERSTEP_RENDEZVOUS__LAST_CALL_S": "60"}
"""However long a node takes to come, or to come back, its slot waits for it."""
_COMMAND = re.compile(r"^  (\S+ --state-dir (\S+) .*)$", re.M)


@pytest.mark.timeout(400)
def test_it_recovers_twice_and_what_it_says_at_the_end_is_so(tmp_path: Path, job: str) -> None:
    """The README's first command: two faults, two restarts, and REST has both (A1.3)."""
    environ = environment(tmp_path, job, TMPDIR=str(tmp_path), **IN_ORDER)
    log = tmp_path / "demo.log"
    demo = Process(python("-m", "everstep_services.cli", "demo"), environ, log)
    try:
        code = demo.wait(ENDS_WITHIN_S)
        said = demo.said
        assert code == 0, said
        until(lambda: tagged(job), "nothing of it runs on", holds=not_)
        rank, node = table(said)
        assert rank.pop("WHAT").endswith(" was ended by SIGKILL")
        assert node.pop("WHAT") == "node-2 is gone"
        phases = ["CUT", "DETECT", "LOOK", "DECIDE", "STOP", "FORM", "START", "STEP", "ALL"]
        for row in (rank, node):
            spent = [int(row[phase]) for phase in phases]
            assert abs(sum(spent[:-1]) - spent[-1]) <= 0.1 * spent[-1] + len(phases), row
        assert "The job is done after 3 rounds; exit codes {'node-1': 0, 'node-3': 0}." in said
        assert reads_again(said, environ, tmp_path) == ("done", 2)
        until(lambda: tagged(job), "nothing is left", holds=not_)
    finally:
        demo.kill()
        kill_all(tagged(job))


@pytest.mark.variant
@pytest.mark.timeout(400)
def test_a_rank_that_becomes_slow_is_named_with_its_cause_and_cleared(
    tmp_path: Path, job: str
) -> None:
    """A6.1, as a newcomer sees it."""
    environ = environment(tmp_path, job, TMPDIR=str(tmp_path), **IN_ORDER)
    log = tmp_path / "demo.log"
    demo = Process(python("-m", "everstep_services.cli", "demo", "--slow"), environ, log)
    try:
        code = demo.wait(ENDS_WITHIN_S)
        assert code == 0, demo.said
        assert "found: rank 2 on node-2 is slow, cause input" in demo.said
        assert "cleared: " in demo.said
        until(lambda: tagged(job), "nothing is left", holds=not_)
    finally:
        demo.kill()
        kill_all(tagged(job))


def table(said: str) -> list[dict[str, str]]:
    """The rows of the table, by the names of its columns."""
    head, *rows = said.partition("(milliseconds):")[2].strip().partition("\n\n")[0].splitlines()
    names = [" ".join(one.split()) for one in re.split(r"  +", head.strip())]
    cells = [re.split(r"  +", row.strip()) for row in rows]
    return [dict(zip(names, row, strict=True)) for row in cells]


def reads_again(said: str, environ: Mapping[str, str], folder: Path) -> tuple[str, int]:
    """What the URL at the end tells once it is served as the lines below it say."""
    found = re.search(r"serves it again at (http://\S+)/api/v1/(\S+):\n", said)
    assert found is not None, said
    up, why, show, down = (shlex.split(line)[1:] for line, _ in _COMMAND.findall(said))
    token = Path(_COMMAND.findall(said)[0][1]) / "token"
    run(up, environ, folder)
    with Api(found[1], token.read_text().strip()) as api:
        state = api.get(found[2])["state"]
        incidents = list(api.pages(f"{found[2]}/incidents", {}, most=None))
    assert "SIGKILL" in run(why, environ, folder) + run(show, environ, folder)
    run(down, environ, folder)
    return state, len(incidents)


def run(words: Sequence[str], environ: Mapping[str, str], folder: Path) -> str:
    log = folder / f"{words[2]}.log"
    process = Process(python("-m", "everstep_services.cli", *words), environ, log)
    assert process.wait() == 0, process.said
    return process.said
