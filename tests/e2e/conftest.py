"""A control plane that tests share, one that a test may kill, and the agents of a job."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e import failure_logs
from tests.e2e.cluster import Cluster
from tests.e2e.control_planes import ALL, PATIENT, ControlPlane, Pieces, Up, running_up
from tests.e2e.postgres import Postgres

NewCluster = Callable[[ControlPlane, str], Cluster]
ENDS_WITHIN_S = 300
"""Whatever waits for something gives up before, and says for what."""
START_WITHIN_S = 120.0
"""Five processes; each imports much."""
EVIDENCE_WITHIN_S = 30.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(ENDS_WITHIN_S))


@pytest.fixture(scope="session")
def shared_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One `everstep up` for all tests that leave it as it is.

    Their jobs have nodes of the same names: what one loses makes none suspect for the others.
    """
    folder = tmp_path_factory.mktemp("up")
    settings = {**PATIENT, "EVERSTEP_HEALTH__NODES__STRIKES_LIMIT": "1000"}
    with failure_logs.shared("shared_up", folder), running_up(folder, **settings) as up:
        yield up


@pytest.fixture(scope="session")
def patient_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A control plane that lets agents look for evidence, however long this machine takes."""
    budgets = {
        f"EVERSTEP_RENDEZVOUS__{kind}_EVIDENCE_S": f"{EVIDENCE_WITHIN_S:g}"
        for kind in ("CRASH", "STALL")
    }
    folder, settings = tmp_path_factory.mktemp("patient-up"), {**PATIENT, **budgets}
    with failure_logs.shared("patient_up", folder), running_up(folder, **settings) as up:
        yield up


@pytest.fixture(scope="module")
def quick_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """For slow ranks: with short windows, in which only what is slow beyond noise counts."""
    folder = tmp_path_factory.mktemp("quick-up")
    settings = {
        **PATIENT,
        "EVERSTEP_STRAGGLER__WINDOW_S": "1.5",
        "EVERSTEP_STRAGGLER__SLOWER_RATIO": "0.5",
        "EVERSTEP_STRAGGLER__EXCLUDE_AFTER_S": "1",
        "EVERSTEP_STRAGGLER__DRAIN_WITHIN_S": "5",
    }
    with failure_logs.shared("quick_up", folder), running_up(folder, **settings) as up:
        yield up


@pytest.fixture
def pieces(tmp_path: Path) -> Iterator[Pieces]:
    """Server and services as processes of their own, to kill."""
    pieces = Pieces(tmp_path, **PATIENT)
    try:
        pieces.start(START_WITHIN_S)
        yield pieces
    finally:
        pieces.stop()


@pytest.fixture
def shared_pieces(_shared_pieces: Pieces) -> Pieces:
    """The same for tests that kill no more: whatever they leave dead is started again."""
    for name in ALL:
        if _shared_pieces.processes[name].poll() is not None:
            _shared_pieces.revive(name)
    return _shared_pieces


@pytest.fixture(scope="session")
def _shared_pieces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pieces]:
    folder = tmp_path_factory.mktemp("pieces")
    pieces = Pieces(folder, **PATIENT)
    with failure_logs.shared("_shared_pieces", folder):
        try:
            pieces.start(START_WITHIN_S)
            yield pieces
        finally:
            pieces.stop()


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    """The PostgreSQL server of one module."""
    # Not below pytest's own folder: as root, the server runs as a user who cannot get there.
    folder = Path(tempfile.mkdtemp(prefix="everstep-pg-"))
    postgres = Postgres(folder)
    with failure_logs.shared("postgres", folder):
        try:
            yield postgres
        finally:
            postgres.stop()


@pytest.fixture
def new_cluster(tmp_path: Path) -> Iterator[NewCluster]:
    """Makes the clusters of tests that need several jobs, or a control plane of their own."""
    made: list[Cluster] = []

    def make(plane: ControlPlane, job: str) -> Cluster:
        folder = tmp_path / job
        folder.mkdir()
        made.append(Cluster(folder, job, plane))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


@pytest.fixture
def cluster(new_cluster: NewCluster, shared_up: Up, job: str) -> Cluster:
    """The agents of one job, on the shared control plane."""
    return new_cluster(shared_up, job)
