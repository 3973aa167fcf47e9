"""A rank is killed while a step is judged, under `everstep run`: the training goes on rightly."""

import json
from pathlib import Path

import pytest

from tests.chaos.numerics_runs import killed
from tests.e2e.processes import Process, environment, kill_all, python, tagged

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
RANKS = 2
_WITHIN_S = 240


def trained(folder: Path, point: str) -> list[dict[int, str]]:
    """The losses of the steps that count on each rank, after a good end."""
    folder.mkdir()
    command = python(
        "-m", "everstep_services.cli", "run", "--job", f"killed-{point}", "--nproc-per-node",
        str(RANKS), "--max-restarts", "2", killed.__file__, str(folder), point,
    )  # fmt: skip
    run = Process(command, environment(folder, point), folder / "run.log", folder)
    try:
        assert run.wait(_WITHIN_S) == 0, run.said
    finally:
        run.kill()
        kill_all(tagged(point))
    losses = []
    for rank in range(RANKS):
        lines = (folder / f"told-{rank}").read_text().splitlines()
        # What a round has made again counts, not what was made before.
        losses.append({int(step): loss for step, loss in map(str.split, lines)})
    return losses


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, str]]:
    return trained(tmp_path_factory.mktemp("never") / "job", "never")


@pytest.mark.parametrize("point", ["none", *killed.POINTS])
def test_nothing_is_skipped_twice(
    point: str, undisturbed: list[dict[int, str]], tmp_path: Path
) -> None:
    losses = trained(tmp_path / "job", point)
    assert (tmp_path / "job/killed").exists() == (point != "none")
    acts = json.loads((tmp_path / "job/states/numerics.json").read_text())["acts"]
    unit = killed.BATCH * RANKS
    assert [(act["action"], act["samples"]) for act in acts] == [
        ("skip", [(killed.BAD_AT - 1) * unit, killed.BAD_AT * unit])
    ]
    assert losses == undisturbed
