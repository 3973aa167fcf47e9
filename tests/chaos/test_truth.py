"""Faults on a real cluster, and all that people read of each, against a truth written before."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.chaos.truth.cases import CASES
from tests.chaos.truth.outputs import sentences
from tests.chaos.truth.scene import Case, Scene
from tests.chaos.truth.statements import Facts, untrue
from tests.chaos.truth.tally import Row, Tally, judged
from tests.corpus.surroundings import surroundings
from tests.e2e import failure_logs
from tests.e2e.cluster import Cluster
from tests.e2e.control_planes import PATIENT, Up, running_up
from tests.e2e.processes import kill_all

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
_LOOPS_A_CORE = 5
_numbers = itertools.count(1)


Ups = Callable[[Mapping[str, str]], Up]


@pytest.fixture(scope="module")
def ups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ups]:
    """One control plane for all cases with the same settings."""
    folder = tmp_path_factory.mktemp("ups")
    made: dict[str, Up] = {}
    with failure_logs.shared("ups", folder), ExitStack() as stack:

        def up(settings: Mapping[str, str]) -> Up:
            key = str(sorted(settings.items()))
            if key not in made:
                own = folder / f"up{len(made)}"
                own.mkdir()
                made[key] = stack.enter_context(running_up(own, **PATIENT, **settings))
            return made[key]

        yield up


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    tally = Tally()
    yield tally
    print(f"\n{tally.text()}")
    assert not tally.shortfalls(), "\n".join(tally.shortfalls())


@contextmanager
def loaded(is_wanted: bool) -> Iterator[None]:
    """Five busy loops for each core, as niced processes."""
    count = _LOOPS_A_CORE * len(os.sched_getaffinity(0)) if is_wanted else 0
    command = ["nice", "-n", "5", sys.executable, "-S", "-c", "while True: pass"]
    loops = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


CASES_AND_LOADS = [
    *(pytest.param(case, False, id=case.name) for case in CASES),
    *(pytest.param(case, True, id=f"{case.name}-loaded") for case in CASES if case.is_loaded),
]


@pytest.mark.parametrize(("case", "is_loaded"), CASES_AND_LOADS)
def test_all_that_is_said_of_a_fault_is_true(
    case: Case, is_loaded: bool, ups: Ups, tally: Tally, tmp_path: Path, job: str
) -> None:
    folder = tmp_path / job
    folder.mkdir()
    up = ups(case.settings)
    cluster = Cluster(folder, job, up)
    row = Row(case.name, is_loaded)
    tally.rows.append(row)
    row.action = "it did not come to its end"
    scene = Scene(cluster, up, case, next(_numbers))
    try:
        with loaded(is_loaded), surroundings(case.needs) as environ:
            scene.start(environ)
            row.action = _action(scene)
            incidents = scene.incidents()
            judged(row, scene, incidents)
            read = sentences(scene, incidents)
            (folder / "read.log").write_text("".join(f"{it.place}: {it.text}\n" for it in read))
            row.untrue = untrue(read, Facts(scene, is_open=row.culprit == "hedged"))
    finally:
        if scene.others:  # other launchers leave theirs behind
            kill_all(cluster.left())
        for process in scene.others:
            process.kill()
        cluster.close()
        print("\n".join([f"{row.case}: {'not ' if row.faults else ''}right", *row.faults]))
    assert not row.faults, "\n".join(row.faults)


def _action(scene: Scene) -> str:
    try:
        scene.case.act(scene)
    except AssertionError as error:
        return f"{error}"[:300]
    return "right"
