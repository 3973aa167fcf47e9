"""A cluster for all tests of a module; each test finds it whole."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.servers import Cluster, cluster_of_three
from tests.e2e import failure_logs


@pytest.fixture(scope="module")
def _shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("cluster")
    with failure_logs.shared("cluster", folder), cluster_of_three(folder) as cluster:
        yield cluster


@pytest.fixture
def cluster(_shared_cluster: Cluster) -> Iterator[Cluster]:
    """Three servers with all streams, three copies of each; whatever a test breaks is mended."""
    yield _shared_cluster
    _shared_cluster.heal()
