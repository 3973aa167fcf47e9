"""What stands back for urgent work."""

import asyncio
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep_services.agent.runtime import urgent_work
from everstep_services.agent.runtime.urgent_work import (
    begin_urgent_work,
    end_urgent_work,
    imports_stand_back,
)
from everstep_services.cli.stack import services


@pytest.fixture(autouse=True)
def without_bound(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(urgent_work, "_AT_MOST_S", 600.0)
    yield
    end_urgent_work()


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A module that imports another; each says that it begins, and is in a hurry from then on."""
    text = "import urgent_trial; urgent_trial.begins(__name__)\n"
    (tmp_path / "trial_outer.py").write_text(text + "import trial_inner\n")
    (tmp_path / "trial_inner.py").write_text(text)
    (tmp_path / "urgent_trial.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    trial = importlib.import_module("urgent_trial")
    order = list[str]()
    trial.begins = order.append  # type: ignore[attr-defined]
    yield order
    for name in ("urgent_trial", "trial_outer", "trial_inner"):
        sys.modules.pop(name, None)


async def test_each_module_of_a_service_is_imported_after_urgent_work(
    modules: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each looks anew: urgent work may begin at any time."""
    loop = asyncio.get_running_loop()

    def calm_down() -> None:
        modules.append("calm")
        end_urgent_work()

    async def hurry() -> None:
        begin_urgent_work()
        loop.call_soon(calm_down)

    def begins(name: str) -> None:
        modules.append(name)
        asyncio.run_coroutine_threadsafe(hurry(), loop).result(600)

    monkeypatch.setattr(sys.modules["urgent_trial"], "begins", begins)
    opened = {"trial": lambda _: importlib.import_module("trial_outer")}
    monkeypatch.setattr(services, "SERVICES", opened)
    await asyncio.to_thread(services.imported, "trial")
    assert modules[:3] == ["trial_outer", "calm", "trial_inner"]


async def test_other_threads_import_while_one_stands_back(modules: list[str]) -> None:
    begin_urgent_work()
    with imports_stand_back():
        await asyncio.to_thread(importlib.import_module, "trial_outer")
    assert modules == ["trial_outer", "trial_inner"]


def test_ranks_that_do_not_come_back_hold_nothing_up(
    modules: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that has failed for good has its end recorded at once, also without a loop."""
    monkeypatch.setattr(urgent_work, "_AT_MOST_S", 0.01)

    async def hurry() -> None:
        begin_urgent_work()

    asyncio.run(hurry())
    with imports_stand_back():
        importlib.import_module("trial_outer")
    assert modules == ["trial_outer", "trial_inner"]


def test_what_is_set_for_imports_is_as_before_afterwards() -> None:
    before = sys.getswitchinterval(), list(sys.meta_path)
    with imports_stand_back():
        assert sys.getswitchinterval() < before[0]
    assert (sys.getswitchinterval(), sys.meta_path) == before
