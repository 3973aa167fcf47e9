"""What is collected of real gloo trainings that hang or die, and of one that is well."""

from collections.abc import Mapping

import msgspec
import pytest

from everstep.evidence.archive import Archive, unpack
from everstep_services.agent.settings import KINDS
from everstep_services.attribution.flight_recorder.dump import read_dump
from tests.e2e.cluster import Body, Cluster
from tests.e2e.conftest import EVIDENCE_WITHIN_S, NewCluster
from tests.e2e.control_planes import Up
from tests.e2e.operators import command, operator
from tests.e2e.processes import SCRIPTS
from tests.variants import variant
from tests.waiting import until

SCRIPT = str(SCRIPTS / "hanging_gloo.py")
START_WITHIN_S = 120.0
LIMITS = [
    word
    for name, limit_s in {"data": 5, "exchange": 300, "outside": 300, "first-step": 300}.items()
    for word in ("--limit", f"{name}={limit_s}")
]
OF_OTHERS = {"gpu", "nccl_ras", "split_sizes"}
OF_RANKS = {"page", "process", "flight_recorder", "stacks"}


@pytest.fixture
def cluster(new_cluster: NewCluster, patient_up: Up, job: str) -> Cluster:
    return new_cluster(patient_up, job)


def ended(cluster: Cluster, kind: str, *, nodes: int = 1) -> Mapping[tuple[str, str], Body]:
    """The evidence of a training whose rank 1 fails so, by kind and node, once it is over."""
    options = ("--nnodes", str(nodes), "--nproc-per-node", str(2 // nodes), *LIMITS)
    agents = [
        cluster.run(*options, SCRIPT, kind, str(cluster.folder), node=f"node-{number}")
        for number in range(nodes)
    ]
    assert [agent.wait(START_WITHIN_S) for agent in agents] == [0] * nodes
    (incident,) = cluster.closed(1)
    wanted = {
        (one, f"node-{number}") for one in KINDS if one not in OF_OTHERS for number in range(nodes)
    }
    facts = until(
        lambda: {
            (body["evidence"], body["node"]): body
            for body in cluster.facts("evidence_collected")
            if body["incident"] == incident["incident"]
        },
        "every kind has a fact",
        holds=lambda found: found.keys() >= (wanted if kind != "dead" or nodes == 1 else set()),
    )
    assert incident["ledger"]["evidence_s"] < EVIDENCE_WITHIN_S
    return facts


def kept(cluster: Cluster, body: Body) -> Archive:
    path = f"incidents/{body['incident']}/evidence/{body['id']}"
    return unpack(cluster.api.content(path))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["gil", variant("skip"), variant("stopped")])
def test_a_hang_leaves_recorders_and_stacks_of_all_ranks(cluster: Cluster, kind: str) -> None:
    """A7.2, A7.5: each rank has its piece, or a reason; the restart waits no longer than it may."""
    facts = ended(cluster, kind)
    stacks = kept(cluster, facts["stacks", "node-0"])
    assert ([one.rank for one in stacks.members], stacks.missing) == ([0, 1], {})
    assert b'"all_reduce"' in stacks.members[0].content
    assert b'"hang"' in stacks.members[1].content
    said = facts["stacks", "node-0"]["summary"]
    # A rank that stops itself was in a call that does not give the lock away, too.
    holds = "holds the interpreter's lock" in said.partition("rank 1: ")[2]
    assert holds == (kind != "skip")
    recorders = kept(cluster, facts["flight_recorder", "node-0"])
    waits = read_dump(recorders.members[0].content, 0)
    assert waits.rank == 0
    if kind == "stopped":
        assert set(recorders.missing) == {1}  # its threads stand still, too
        assert recorders.missing[1].startswith("its recorder: no answer within")
    else:
        assert [one.rank for one in recorders.members] == [0, 1]
    surroundings = text(cluster, facts["environment", "node-0"])
    assert '"torch": "' in surroundings
    assert '"TORCH_INCLUDE_STACK_TRACE": "False"' in surroundings


def text(cluster: Cluster, body: Body) -> str:
    data = cluster.api.content(f"incidents/{body['incident']}/evidence/{body['id']}")
    return msgspec.json.format(data, indent=1).decode()


def test_a_rank_that_is_dead_has_a_reason(cluster: Cluster) -> None:
    """A7.2: the one that was killed has nothing, and that is on record."""
    facts = ended(cluster, "dead")
    for one in ("flight_recorder", "stacks"):
        body = facts[one, "node-0"]
        if not body.get("blob"):
            assert "rank 1" in body["missing"] or "the rank had exited" in body["missing"]
            continue
        # The other rank may report the broken connection before the kill itself is heard of.
        pieces = kept(cluster, body)
        assert 1 not in [member.rank for member in pieces.members]
        assert pieces.missing[1]


@pytest.mark.timeout(400)
def test_both_nodes_collect_what_is_theirs(cluster: Cluster) -> None:
    facts = ended(cluster, "skip", nodes=2)
    stacks = [body for (kind, _), body in facts.items() if kind == "stacks"]
    assert sorted(kept(cluster, body).members[0].rank or 0 for body in stacks) == [0, 1]


def captured(cluster: Cluster, *options: str) -> int:
    """What `everstep capture` exits with."""
    environ, api = operator(cluster.plane, cluster.folder), cluster.plane.api
    done = command(environ, "capture", cluster.job, *options, "--api", api)
    print(done.stdout, done.stderr)
    return done.returncode


@pytest.mark.timeout(400)
def test_a_capture_leaves_a_healthy_training_alone(cluster: Cluster) -> None:
    """Every kind is fetched; steps go on, nothing is an incident, and no stack pauses a rank."""
    agent = cluster.run("--nproc-per-node", "2", SCRIPT, "steady", str(cluster.folder))
    before = cluster.until_all_step(2)
    it = cluster.folder / "it"
    assert captured(cluster, "--into", str(it), "--within", "30") == 0
    step = before[0]["step"]
    until(cluster.ranks, "steps go on", holds=lambda now: now[0]["step"] > step)
    for kind in ("flight_recorder", "stacks"):
        names = {path.name for path in (it / kind / "node-1").iterdir()}
        assert names == {"rank_0.json", "rank_1.json", "missing.json"}
    assert {path.name for path in it.iterdir()} >= OF_RANKS | {"cgroup", "environment"}
    assert (it / "page" / "node-1.json").read_text().startswith("{")
    cluster.finish()
    assert agent.wait() == 0
    assert cluster.until_fact("job_ended")["rounds"] == 1
    assert cluster.incidents() == []
    (asked,) = cluster.facts("operator_acted")
    assert (asked["action"], asked["outcome"]) == ("capture", "accepted")


def test_a_capture_of_one_rank_and_kind_is_that_alone(cluster: Cluster) -> None:
    cluster.run("--nproc-per-node", "2", SCRIPT, "steady", str(cluster.folder))
    cluster.until_all_step(2)
    it = cluster.folder / "it"
    assert captured(cluster, "--rank", "1", "--kind", "stacks", "--into", str(it)) == 0
    files = {str(path.relative_to(it)) for path in it.glob("*/*/*")}
    assert files == {"stacks/node-1/rank_1.json", "stacks/node-1/missing.json"}
    assert captured(cluster, "--rank", "7") == 2
    cluster.finish()
