"""The manifests that `everstep kubernetes job` writes, without a cluster.

Acceptance: A12.4.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from everstep.errors import EverstepError
from everstep.ids import checked_name, name_of_host
from everstep_services.cli.group import everstep
from everstep_services.cli.kubernetes.job_manifest import FINAL, NOT_COUNTED, job_manifest
from everstep_services.cli.kubernetes.job_request import ClaimMount, JobRequest
from everstep_services.cli.run.arguments import scan
from everstep_services.cli.slurm.allocations import EndedAllocation, outcome
from tests.fakes.job_controller import after_exit
from tests.restricted_pods import complaints, pod_specs
from tests.unit.agent.run_plans import BUS, plan

RUN = ("--nnodes", "4", "--spares", "1", "--nproc-per-node", "8", "train.py", "--lr", "3e-4")
RACKS: dict[str, Any] = {"kind": "jobset", "pods_per_rack": 5, "rack_label": "example.com/rack"}


def manifests(*words: str, **options: Any) -> dict[str, dict[str, Any]]:
    """The objects by kind."""
    request = JobRequest(
        words=words, **{"job": "llama", "image": "registry.example/train:1", **options}
    )
    documents = list(yaml.safe_load_all(job_manifest(request, scan(words, {}))))
    return {document["kind"]: document for document in documents}


def job_spec(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any]
    if "JobSet" in objects:
        (job,) = objects["JobSet"]["spec"]["replicatedJobs"]
        spec = job["template"]["spec"]
    else:
        spec = objects["Job"]["spec"]
    return spec


def container(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (only,) = job_spec(objects)["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def refused(*words: str, **options: Any) -> str:
    with pytest.raises(EverstepError) as error:
        manifests(*words, **options)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_pod_for_each_node_and_spare() -> None:
    objects = manifests(*RUN)
    assert list(objects) == [
        "ServiceAccount", "Service", "NetworkPolicy", "PodDisruptionBudget", "Job",
    ]  # fmt: skip
    spec = job_spec(objects)
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (5, 5, "Indexed")
    assert objects["PodDisruptionBudget"]["spec"]["minAvailable"] == 4
    assert container(objects)["args"] == [
        "--job", "llama", "--preempt-grace", "600", "--max-restarts", "3", *RUN,
    ]  # fmt: skip


def test_one_pod_has_no_disruption_budget() -> None:
    """With a budget of its only pod a node could never be drained."""
    assert "PodDisruptionBudget" not in manifests("train.py")


@pytest.mark.parametrize("options", [{}, {"kind": "jobset"}, RACKS, {"gpus": 8}])
def test_pods_pass_the_restricted_profile(options: dict[str, Any]) -> None:
    """No root, no privilege, no writable root, no secret in the environment (A12.4)."""
    for manifest in manifests(*RUN, mounts=(ClaimMount("data", "/data"),), **options).values():
        for pod in pod_specs(manifest):
            assert complaints(pod) == []
            assert pod["automountServiceAccountToken"] is False


@pytest.mark.parametrize("options", [{}, RACKS])
def test_what_follows_after_an_exit_code(options: dict[str, Any]) -> None:
    """The first rule that fits wins; what fits none counts (A12.3)."""
    spec = job_spec(manifests(*RUN, **options))
    rules = spec["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["FailJob", "Ignore", "Ignore"]
    assert rules[0]["onExitCodes"]["values"] == list(FINAL)
    assert rules[1]["onExitCodes"]["values"] == list(NOT_COUNTED)
    assert rules[2]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (2, 0)
    assert "backoffLimit" not in spec


@pytest.mark.parametrize(
    ("code", "action"),
    [
        (0, "Complete"), (2, "FailJob"), (93, "FailJob"), (130, "FailJob"),
        (90, "Ignore"), (91, "Ignore"),
        (1, "Count"), (92, "Count"), (94, "Count"), (137, "Count"), (143, "Count"), (255, "Count"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"kind": "jobset"}, RACKS])
def test_what_the_job_controller_does_after_each_code(
    code: int, action: str, options: dict[str, Any]
) -> None:
    """A pod that was preempted after saving costs no retry; a stopped job is not restarted."""
    spec = job_spec(manifests(*RUN, **options))
    assert after_exit(spec, code) == action
    # Evicted and killed before its ranks had saved; but a code that is final stays final.
    evicted = {"Count": "Ignore"}.get(action, action)
    assert after_exit(spec, code, is_disrupted=True) == evicted


def test_codes_mean_the_same_as_under_slurm() -> None:
    """Only 90 differs: a pod that is replaced costs no allocation."""
    assert {
        code for code in range(1, 256) if outcome(EndedAllocation(id="7", code=code)) == "final"
    } == set(FINAL)
    assert {
        code for code in range(1, 256) if outcome(EndedAllocation(id="7", code=code)) == "preempted"
    } | {90} == set(NOT_COUNTED)


@pytest.mark.parametrize("grace_s", [1, 600, 86400])
def test_the_pod_waits_longer_than_its_ranks_may_save(grace_s: int) -> None:
    """A12.1: the kubelet's SIGKILL comes after the agent's own."""
    objects = manifests(*RUN, grace_s=grace_s)
    pod_grace_s = job_spec(objects)["template"]["spec"]["terminationGracePeriodSeconds"]
    words = container(objects)["args"]
    assert words[words.index("--preempt-grace") + 1] == str(grace_s)
    assert pod_grace_s == grace_s + 30
    assert environment(objects)["EVERSTEP_AGENT__SCHEDULER_GRACE_S"] == str(pod_grace_s)


def environment(objects: dict[str, dict[str, Any]], **fields: str) -> dict[str, str]:
    """The environment of a container, as a kubelet makes it from these fields of its pod."""
    values: dict[str, str] = {}
    for variable in container(objects)["env"]:
        if "valueFrom" in variable:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            values[variable["name"]] = fields.get(path.split("/")[-1].strip("']"), "")
        else:
            text = variable["value"]
            for name, value in values.items():
                text = text.replace(f"$({name})", value)
            values[variable["name"]] = text
    return values


@pytest.mark.parametrize(
    ("options", "index", "job_index", "place", "address"),
    [
        ({}, "3", "", 3, "10.1.2.3"),
        ({"address": "service"}, "3", "", 3, "llama-3.llama"),
        (RACKS, "3", "0", 3, "10.1.2.3"),
        (RACKS, "2", "4", 22, "10.1.2.3"),
    ],
)
def test_the_agent_knows_its_place_and_address(
    home: Any, options: dict[str, Any], index: str, job_index: str, place: int, address: str
) -> None:
    """`everstep run` reads its environment as the manifest sets it."""
    words = ("--nnodes", "24", "--spares", "1", "train.py")
    environ = environment(
        manifests(*words, **options),
        **{
            "spec.nodeName": "gpu-7.rack-2.example",
            "status.podIP": "10.1.2.3",
            "job-name": "llama",
            "job-index": job_index,
            "job-completion-index": index,
            "zone": "zone-b",
        },
    )
    assert environ.pop("EVERSTEP_AGENT__ADDRESS") == address  # plans resolve it: not in this test
    for name in ("HOME", "EVERSTEP_STATE_DIR"):
        environ.pop(name)
    made = plan(
        home, *BUS, *words,
        **environ, KUBERNETES_SERVICE_HOST="10.0.0.1", JOB_COMPLETION_INDEX=index,
    )  # fmt: skip
    assert (made.node, made.infra_rank, made.scheduler.name) == (
        "gpu-7-rack-2-example", place, "kubernetes",
    )  # fmt: skip
    expected = ("rack-4",) if job_index == "4" else ("rack-0",) if job_index else ("zone-b",)
    assert made.topology == expected


def test_words_reach_the_script_as_they_were() -> None:
    """Kubernetes would replace `$(HOME)`, and YAML would read `yes` and `1e3` as values."""
    words = (
        "train.py",
        "$(HOME)",
        "$$",
        'say "hi"',
        "yes",
        "1e3",
        "a\nb",
        "# x",
        "é🙂\u2028\x85\x07",
    )
    expanded = [word.replace("$$", "$") for word in container(manifests(*words))["args"]]
    assert expanded[-len(words) :] == list(words)


def test_racks_are_the_jobs_of_a_job_set() -> None:
    job_set = manifests("--nnodes", "14", "--spares", "1", "train.py", **RACKS)["JobSet"]
    (job,) = job_set["spec"]["replicatedJobs"]
    assert (job["replicas"], job["template"]["spec"]["completions"]) == (3, 5)
    annotations = job_set["metadata"]["annotations"]
    assert annotations == {"alpha.jobset.sigs.k8s.io/exclusive-topology": "example.com/rack"}


def test_only_pods_of_the_job_reach_its_pods() -> None:
    spec = manifests(*RUN)["NetworkPolicy"]["spec"]
    own = {"podSelector": {"matchLabels": {"everstep.io/job": "llama"}}}
    assert spec["policyTypes"] == ["Ingress"]
    assert spec["ingress"] == [{"from": [own]}]


@pytest.mark.parametrize(
    ("words", "options", "line"),
    [
        ((), {}, "which training shall run?"),
        (("--job", "x", "train.py"), {}, "--job after `--`: name the job before"),
        (("--node-rank", "1", "train.py"), {}, "--node-rank after `--`: each pod has its own"),
        (("--standalone", "train.py"), {}, "--standalone after `--`: leave it out"),
        (("--preempt-grace", "9", "train.py"), {}, "use --grace before `--`"),
        (("--bus-password-file", "x", "train.py"), {}, "a pod logs in with a secret"),
        (("--nodes", "4", "train.py"), {}, "there is no option --nodes; did you mean --nnodes?"),
        (("--nnodes", "100000", "--spares", "1", "train.py"), {}, "ask for 100001 pods"),
        (RUN, {"job": "a b"}, "--job: 'a b' cannot name a job"),
        (RUN, {"job": "x" * 62}, "62 characters, and pods of this job can be named after 61"),
        (RUN, {"job": "x" * 128}, "give a shorter --name"),
        (RUN, {"job": "9-lives"}, "a service begins with a letter"),
        (RUN, {"name": "Llama"}, "--name 'Llama': Kubernetes wants lower-case letters"),
        (RUN, {"name": "a.b"}, "--name 'a.b': Kubernetes wants lower-case letters"),
        (RUN, {"namespace": "a\nb: c"}, "--namespace 'a\\nb: c': Kubernetes wants"),
        (RUN, {"image": "a b"}, "--image 'a b': write an image's name"),
        (RUN, {"image": "x\n  evil: true"}, "--image 'x\\n  evil: true': write"),
        (RUN, {"image": ""}, "--image '': write"),
        (RUN, {"memory": "lots"}, "--memory 'lots': write a quantity"),
        (RUN, {"shared_memory": "99Gi"}, "--shared-memory 99Gi is a part of --memory 16Gi"),
        (RUN, {"memory": "8000Mi"}, "--shared-memory 8Gi is a part of --memory 8000Mi"),
        (RUN, {"bus_url": "nats://user:password@bus"}, "without a user"),
        (RUN, {"mounts": (ClaimMount("data", "/tmp"),)}, "/tmp is taken; choose another"),
        (RUN, {"mounts": (ClaimMount("d", "/a/../etc"),)}, "write CLAIM:/PATH"),
        (RUN, {"mounts": (ClaimMount("D", "/d"),)}, "--volume 'D': Kubernetes wants"),
        (RUN, {"user": 0}, "--user 0: the restricted profile allows no root"),
        (RUN, {"pods_per_rack": 5}, "it needs --kind jobset and --rack-label"),
        (RUN, {**RACKS, "pods_per_rack": 2}, "5 pods cannot be divided by it"),
        (RUN, {**RACKS, "job": "x" * 50}, "pods of this job can be named after"),
        (RUN, {"rack_label": "a b"}, "--rack-label 'a b': write a name"),
        (RUN, {"gpu_resource": "a: b"}, "--gpu-resource 'a: b': write a name"),
    ],
)
def test_bad_options_are_one_line(words: Sequence[str], options: dict[str, Any], line: str) -> None:
    assert line in refused(*words, **options)


@pytest.mark.parametrize(
    ("gpus", "ranks", "is_named"), [(4, "8", True), (8, "8", False), (8, "gpu", False)]
)
def test_ranks_without_a_gpu_of_their_own_are_named(gpus: int, ranks: str, is_named: bool) -> None:
    words = ("--nproc-per-node", ranks, "train.py")
    given = scan(words, {})
    request = JobRequest(words=words, job="llama", image="registry.example/x:1", gpus=gpus)
    job_manifest(request, given)
    line = "each pod has 4 GPUs (--gpus) and 8 ranks (--nproc-per-node): usually each rank has one"
    assert given.notes == ([f"{line} GPU"] if is_named else [])


def test_the_largest_job_is_as_short_as_the_smallest() -> None:
    objects = manifests("--nnodes", "100000", "train.py")
    assert job_spec(objects)["completions"] == 100_000


@pytest.mark.parametrize(
    "host", ["a", "n.b.c", "UPPER_9", "x" * 128, ".", "", "é", "a b", "x" * 253]
)
def test_every_name_of_a_node_gives_an_id(host: str) -> None:
    assert checked_name("node", name_of_host(host))


def test_long_names_of_nodes_stay_different() -> None:
    assert name_of_host("x" * 200 + "a") != name_of_host("x" * 200 + "b")


def test_the_command_writes_a_file(tmp_path: Any) -> None:
    file = tmp_path / "llama.yaml"
    words = ["kubernetes", "job", "--job", "llama", "--image", "x", "--write", str(file)]
    done = CliRunner().invoke(everstep, [*words, "--", *RUN])
    assert done.exit_code == 0, done.output
    assert f"apply it with: kubectl apply -f {file}" in done.output
    assert [each["kind"] for each in yaml.safe_load_all(file.read_text())][-1] == "Job"
    done = CliRunner().invoke(everstep, [*words, "--volume", "data", "--", *RUN])
    assert "--volume 'data': write CLAIM:/PATH" in str(done.exception)
