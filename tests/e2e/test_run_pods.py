"""Pods of the manifest that `everstep kubernetes job` writes, each as a process on this machine.

A pod has the command, the environment and the mounts of its container; a Job controller in the
test replaces it by the rules of the manifest. Acceptance: A12.4.
"""

import shutil
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from everstep_services.cli.group import everstep
from tests.e2e.cluster import Agent, Cluster
from tests.e2e.operators import ask
from tests.e2e.processes import SCRIPTS, environment, python
from tests.fakes.job_controller import Action, after_exit, container_environment, expanded, job_spec
from tests.waiting import until

START_WITHIN_S = 120.0


class Pods:
    """The pods of one Job, on as many nodes."""

    def __init__(self, cluster: Cluster, *run: str) -> None:
        self.cluster = cluster
        self.pods: dict[int, Agent] = {}
        self.failures: Counter[int] = Counter()
        """By index, as far as they count for `backoffLimitPerIndex`."""
        self._login = cluster.plane.login(cluster.job)
        words = (
            "kubernetes", "job", "--job", cluster.job, "--image", "train", "--grace", "60",
            "--volume", "shared:/shared", "--bus-url", self._login["EVERSTEP_BUS__URL"],
        )  # fmt: skip
        done = CliRunner().invoke(everstep, [*words, "--", *run])
        assert done.exit_code == 0, done.output
        self.spec = job_spec(list(yaml.safe_load_all(done.output)))
        (self._container,) = self.spec["template"]["spec"]["containers"]

    def start_all(self) -> None:
        for index in range(self.spec["completions"]):
            self.start(index)

    def start(self, index: int) -> None:
        """Start the pod of an index, on the node of that number, with empty volumes."""
        number = len(self.cluster.agents)
        root = self.cluster.folder / f"pod-{index}-{number}"
        paths = self._mounted(root)
        node = f"{self.cluster.job}-{index}"
        fields = {
            "spec.nodeName": f"{node}.example",
            "status.podIP": "127.0.0.1",
            "metadata.labels['batch.kubernetes.io/job-name']": self.cluster.job,
            "metadata.labels['batch.kubernetes.io/job-completion-index']": str(index),
        }
        given = container_environment(self._container, fields)
        kubelet = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": str(index)}
        environ = {
            **environment(root, self.cluster.tag),  # that of the image
            **kubelet,
            **{name: _below(value, paths) for name, value in given.items()},
        }
        assert self._container["command"] == ["everstep", "run"]
        arguments = [_below(expanded(word, given), paths) for word in self._container["args"]]
        command = python("-m", "everstep_services.cli", "run", *arguments)
        log = self.cluster.folder / f"pod-{index}.{number}.log"
        self.pods[index] = Agent(f"{node}-example", command, environ, log)
        self.cluster.agents.append(self.pods[index])

    def _mounted(self, root: Path) -> Mapping[str, Path]:
        """A folder for each mount but those that every machine has; the claim is shared."""
        paths = {}
        for mount in self._container["volumeMounts"]:
            path = mount["mountPath"]
            if path == "/shared":
                paths[path] = self.cluster.folder
            elif path not in {"/tmp", "/dev/shm"}:
                paths[path] = root / path.strip("/")
                paths[path].mkdir(parents=True)
        shutil.copy(
            self._login["EVERSTEP_BUS__CREDENTIALS_FILE"], paths["/run/everstep/bus"] / "bus.creds"
        )
        return paths

    def ended(self, index: int) -> tuple[int, Action]:
        """The code of a pod once it has ended, and what the controller does: it replaces it."""
        code = self.pods[index].wait(START_WITHIN_S)
        code = code if code >= 0 else 128 - code  # as containers report a signal
        action = after_exit(self.spec, code)
        self.failures[index] += action == "Count"
        if action in {"Ignore", "Count"}:
            assert self.failures[index] <= self.spec["backoffLimitPerIndex"], "the job fails"
            self.start(index)
        return code, action

    def index_of(self, node: str) -> int:
        return next(index for index, pod in self.pods.items() if pod.node == node)


def _below(text: str, paths: Mapping[str, Path]) -> str:
    for path, folder in paths.items():
        if text == path or text.startswith(f"{path}/"):
            return text.replace(path, str(folder), 1)
    return text


def stands_by(cluster: Cluster, pod: Agent) -> None:
    until(lambda: "standing by as a spare" in pod.said, f"{pod.log.name} stands by",
          within_s=START_WITHIN_S)  # fmt: skip


@pytest.fixture
def script(cluster: Cluster) -> str:
    """The training, in the volume that all pods share."""
    for path in SCRIPTS.glob("*.py"):
        shutil.copy(path, cluster.folder)
    return "/shared/asking.py"


@pytest.mark.chaos
def test_pods_that_are_taken_away_or_killed_are_replaced_and_the_job_ends_well(
    cluster: Cluster, script: str
) -> None:
    """`kubectl delete pod` costs no step and no retry; a lost node costs a round and a retry."""
    pods = Pods(cluster, "--nnodes", "2", "--spares", "1", script, "/shared", "ask")
    pods.start_all()
    cluster.until_stepping(1, START_WITHIN_S)
    first = cluster.members(1)
    assert {pod.node for pod in pods.pods.values()} >= {*first.values()}
    (spare,) = {pod.node for pod in pods.pods.values()} - {*first.values()}
    stands_by(cluster, pods.pods[pods.index_of(spare)])

    taken = pods.index_of(first[1])
    pods.pods[taken].send(signal.SIGTERM)
    assert pods.ended(taken) == (91, "Ignore")
    cluster.until_stepping(2, START_WITHIN_S)
    assert cluster.members(2) == {0: first[0], 1: spare}
    saved = {(cluster.folder / f"saved-{rank}").read_text() for rank in range(2)}
    assert len(saved) == 1, "all ranks saved after the same step"
    stands_by(cluster, pods.pods[taken])

    lost = pods.index_of(spare)
    pods.pods[lost].kill_node()
    assert pods.ended(lost) == (137, "Count")
    cluster.until_stepping(3, START_WITHIN_S)
    assert cluster.members(3) == {0: first[0], 1: pods.pods[taken].node}
    assert pods.failures == Counter({lost: 1, taken: 0})

    (cluster.folder / "end").touch()
    assert {pod.wait(START_WITHIN_S) for pod in pods.pods.values()} == {0}
    assert cluster.until_fact("job_ended")["state"] == "done"


def test_a_job_that_a_person_stops_fails_and_is_not_tried_again(
    cluster: Cluster, script: str
) -> None:
    pods = Pods(cluster, "--cold", "/shared/steady.py", "/shared")
    pods.start_all()
    cluster.until_stepping(1, START_WITHIN_S)
    ask(cluster, "stop", cluster.job, "--no-save")
    assert pods.ended(0) == (93, "FailJob")


def test_a_pod_whose_login_is_missing_fails_the_job_in_one_line(
    cluster: Cluster, script: str, tmp_path: Path
) -> None:
    """Another pod would end in the same way: it is not tried again (code 2)."""
    pods = Pods(cluster, "--cold", "/shared/steady.py", "/shared")
    (empty := tmp_path / "empty").touch()
    pods._login["EVERSTEP_BUS__CREDENTIALS_FILE"] = str(empty)
    pods.start_all()
    assert pods.ended(0) == (2, "FailJob")
    assert "bus.creds" in pods.pods[0].said
