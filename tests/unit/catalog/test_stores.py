"""A place that goes away while it is looked at says nothing about what was in it (A15.2)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep_services.catalog import stores
from everstep_services.catalog.storage_threads import OutOfReachError
from everstep_services.catalog.stores import CheckpointStores
from tests.checkpoint_helpers.checkpoint_shelves import save

JOB = "llama"


@pytest.fixture
def going(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A root that is unmounted just before this is done in it."""
    root = tmp_path / "root"
    save(str(root), JOB, 100)

    def before(name: str) -> str:
        real = getattr(stores, name)

        def gone(*arguments: Any) -> Any:
            root.rename(tmp_path / "unmounted")
            return real(*arguments)

        monkeypatch.setattr(stores, name, gone)
        return str(root)

    return before


async def test_a_scan_finds_nothing_missing(going: Callable[[str], str]) -> None:
    with pytest.raises(OutOfReachError, match="the catalog cannot see"):
        await CheckpointStores(1 << 30).scan(going("stored_checkpoints"))


@pytest.mark.parametrize("name", ["look", "verify"])
async def test_a_reading_finds_nothing_wrong(going: Callable[[str], str], name: str) -> None:
    with pytest.raises(OutOfReachError, match="the catalog cannot see"):
        await CheckpointStores(1 << 30).verify(JOB, going(name), 100)
