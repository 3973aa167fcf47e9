"""Plug-ins of attribution's README, installed as a package and used by the service."""

import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everstep.bus import connect
from everstep.bus.auth.roles import SERVICE
from everstep.bus.client import NatsBus
from everstep.bus.server.dev_server import DevServer
from everstep.messages import EvidenceCollected
from everstep_services.attribution.analyzers.panel import BUILT_IN, installed
from everstep_services.attribution.incident import Analyzer
from tests.integration.attribution.replicas import PEER, Training, at_work, verdicts

_README = Path(__file__).parents[3] / "services/everstep_services/attribution/README.md"
_ENTRY_POINTS = re.compile(r'^\[project\.entry-points\."(.+)"\]\n(\w+) = "(.+)"', re.MULTILINE)
_SECOND = re.compile(r'entry point is `(\w+) = "(.+?)"`')


@pytest.fixture
def analyzers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Analyzer]:
    """All analyzers, with those of the README's package, which has the metadata that pip writes."""
    text = _README.read_text()
    codes = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    first, second = _ENTRY_POINTS.search(text), _SECOND.search(text)
    assert first is not None
    assert second is not None
    group, name, place = first.groups()
    package, metadata = tmp_path / "our_cluster", tmp_path / "our_cluster-1.0.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").touch()
    for code, of in zip(codes, (place, second[2]), strict=True):
        module = of.partition(":")[0].rpartition(".")[2]
        (package / f"{module}.py").write_text(code)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: our-cluster\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[{group}]\n{name} = {place}\n{second[1]} = {second[2]}\n"
    )
    for module in [one for one in sys.modules if one.partition(".")[0] == "our_cluster"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(tmp_path)
    return installed()


@pytest.fixture
async def training(shared_nats: DevServer, job: str, tmp_path: Path) -> AsyncIterator[Training]:
    settings = shared_nats.settings(SERVICE)
    async with connect(settings, "attribution", spool=tmp_path / "spool") as bus:
        yield Training(bus, job)


async def lose_each_other(training: Training) -> None:
    await training.form()
    for rank in range(4):
        await training.exit(rank, "RuntimeError", PEER)
    await training.open()


async def test_a_claim_of_an_installed_analyzer_is_in_the_verdict(
    training: Training, analyzers: dict[str, Analyzer]
) -> None:
    assert analyzers.keys() == {*BUILT_IN, "cooling", "hanging"}
    await lose_each_other(training)
    blob = await training.bus.blobs.put(training.job, b'{"gpus": []}')
    await training.bus.record(
        EvidenceCollected(
            **training.about(), incident=training.incident, node="n1", evidence="gpu",
            blob=blob, summary="GPU 3: SW thermal slowdown",
        )
    )  # fmt: skip
    await training.stop()
    async with at_work(training.bus, analyzers=analyzers):
        assert isinstance(training.bus, NatsBus)
        (verdict,) = await verdicts(training.bus, training.job)
    everything = repr(verdict)
    assert "n1: GPU 3: SW thermal slowdown" in everything


async def test_an_analyzer_of_nvrx_says_where_by_its_adapter(
    training: Training, analyzers: dict[str, Analyzer]
) -> None:
    await lose_each_other(training)
    await training.leave("log", b"it waits for data\n", rank=2)
    await training.stop()
    async with at_work(training.bus, analyzers=analyzers):
        assert isinstance(training.bus, NatsBus)
        (verdict,) = await verdicts(training.bus, training.job)
    everything = repr(verdict)
    assert "hanging ranks: [2]" in everything


def test_without_the_package_there_are_the_built_in_ones() -> None:
    assert installed().keys() == BUILT_IN.keys()
