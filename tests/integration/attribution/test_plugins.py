"""The plug-ins of the guide about analyzers, installed as a package and used by the service."""

import re
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from everstep.bus import connect
from everstep.bus.auth.roles import SERVICE
from everstep.bus.client import NatsBus
from everstep.bus.server.dev_server import DevServer
from everstep.messages import EvidenceCollected
from everstep_services.attribution.analyzers.runner import BUILT_IN, installed
from everstep_services.attribution.incident import Analyzer
from tests.integration.attribution.replicas import PEER, Training, at_work, verdicts

_GUIDE = Path(__file__).parents[3] / "docs/guides/analyzers.md"


def _blocks(text: str, language: str) -> list[str]:
    """The blocks of code in one language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def analyzers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Analyzer]:
    """All analyzers, with those of the guide's package, which has the metadata that pip writes."""
    text = _GUIDE.read_text()
    project = tomllib.loads(_blocks(text, "toml")[0])["project"]
    ((group, points),) = project["entry-points"].items()
    package = tmp_path / "our_cluster"
    metadata = tmp_path / f"our_cluster-{project['version']}.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").touch()
    for code, place in zip(_blocks(text, "python"), points.values(), strict=False):
        module = place.partition(":")[0].rpartition(".")[2]
        (package / f"{module}.py").write_text(code)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [f"{name} = {place}" for name, place in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
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


def test_the_test_of_the_guide_passes(analyzers: dict[str, Analyzer]) -> None:
    """The package's own test, as the guide shows it."""
    assert "cooling" in analyzers
    names: dict[str, Any] = {}
    exec(_blocks(_GUIDE.read_text(), "python")[-1], names)
    names["test_a_hot_gpu_is_blamed"]()


def test_without_the_package_there_are_the_built_in_ones() -> None:
    assert installed().keys() == BUILT_IN.keys()
