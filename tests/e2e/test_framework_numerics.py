"""A framework on poisoned data under `everstep run`: noticed, or gone back over and skipped."""

import json
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.processes import ROOT

SCRIPTS = ROOT / "tests/integration/frameworks/scripts"
FRAMEWORKS = {
    "transformers": "hugging_face_numerics.py",
    "lightning": "lightning_numerics.py",
}
WITHIN_S = 400.0
STEPS, SPIKE_AT, NAN_AT = 84, 65, 20

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1500)]


@pytest.fixture(params=FRAMEWORKS)
def script(request: pytest.FixtureRequest) -> str:
    """The training of a framework that is installed."""
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    return str(SCRIPTS / FRAMEWORKS[request.param])


def train(
    cluster: Cluster, script: str, name: str, *, steps: int = STEPS, code: int = 0, **environ: str
) -> Path:
    """Train on two ranks to the end; returns the folder of the training."""
    folder = cluster.folder / name
    folder.mkdir()
    arguments = ("--nproc-per-node", "2", script, str(folder), str(steps))
    agent = cluster.run(*arguments, **environ)
    assert agent.wait(WITHIN_S) == code
    return folder


def losses(folder: Path) -> dict[int, dict[int, str]]:
    """The losses by step, for each round."""
    rounds: dict[int, dict[int, str]] = {}
    for line in (folder / "losses").read_text().splitlines():
        number, step, loss = line.split()
        rounds.setdefault(int(number), {})[int(step)] = loss
    return rounds


def test_a_nan_is_found_and_recorded_and_the_training_goes_on(
    cluster: Cluster, script: str
) -> None:
    folder = train(cluster, script, "observed", POISON=f"{NAN_AT - 1}:nan")
    suspected = cluster.until_fact("numerics_suspected")
    assert (suspected["moved_at"], suspected["signal"]) == (NAN_AT, "nan")
    assert suspected["step"] - NAN_AT in (0, 1)  # values may arrive with the next step
    assert [*losses(folder)] == [1]
    assert cluster.facts("numerics_acted") == []


def test_replicas_that_differ_stop_the_job(cluster: Cluster, script: str) -> None:
    """A rank has changed a parameter alone; they are compared at step 100."""
    train(cluster, script, "differ", steps=115, code=93, SPOILED="20", REPLICA="stop")
    judged = cluster.until_fact("numerics_judged")
    assert (judged["kind"], judged["ranks"]) == ("replica_differs", [0, 1])
    assert judged["group"].endswith("linear.weight")
    acted = cluster.until_fact("numerics_acted")
    assert (acted["action"], acted["outcome"]) == ("stop", "done")
    assert cluster.until_fact("job_ended")["state"] == "stopped"


def test_replicas_that_differ_lead_back_to_equal_ones(cluster: Cluster, script: str) -> None:
    """They were equal at step 100, and differ at 200: checkpoints since then are left out."""
    folder = train(cluster, script, "back", steps=215, SPOILED="150", REPLICA="rollback")
    acted = cluster.until_fact("numerics_acted")
    assert (acted["action"], acted["outcome"]) == ("rollback", "done")
    assert min(losses(folder)[2]) == 91


def test_a_spike_is_gone_back_over_and_its_data_are_skipped(cluster: Cluster, script: str) -> None:
    """From then on losses are bit for bit those of a training whose data do not have it."""
    spiky = train(cluster, script, "spiky", POISON=f"{SPIKE_AT - 1}:spike", POLICY="skip")
    acted = cluster.until_fact("numerics_acted")
    assert (acted["action"], acted["outcome"]) == ("skip", "done")
    (act,) = json.loads((spiky / "checkpoints/numerics.json").read_text())["acts"]
    assert (act["action"], act["before_step"]) == ("skip", SPIKE_AT)
    first, end = act["samples"]
    assert (first, end - first) in ((SPIKE_AT - 1, 1), (SPIKE_AT - 1, 2))
    rounds = losses(spiky)
    assert [*rounds[2]] == [*range(SPIKE_AT // 10 * 10 + 1, STEPS + 1)]
    left_out = ",".join(map(str, range(first, end)))
    (expected,) = losses(train(cluster, script, "without", WITHOUT=left_out)).values()
    before = {step: loss for step, loss in rounds[1].items() if step < SPIKE_AT}
    assert before | rounds[2] == expected
