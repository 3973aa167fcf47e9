"""What stands back for urgent work."""

import asyncio
from collections.abc import Iterator

import pytest

from everstep_services.agent.runtime import urgent_work
from everstep_services.agent.runtime.urgent_work import (
    begin_urgent_work,
    end_urgent_work,
    stand_back,
)
from everstep_services.cli.stack import services


@pytest.fixture(autouse=True)
def without_bound(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(urgent_work, "_AT_MOST_S", 600.0)
    yield
    end_urgent_work()


async def test_a_service_is_imported_after_urgent_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part looks anew: urgent work may begin at any time."""
    loop, order = asyncio.get_running_loop(), list[str]()

    def calm_down() -> None:
        order.append("calm")
        end_urgent_work()

    def import_module(name: str) -> None:
        order.append(name)
        asyncio.run_coroutine_threadsafe(hurry(), loop).result(600)
        loop.call_soon_threadsafe(calm_down)

    async def hurry() -> None:
        begin_urgent_work()

    monkeypatch.setattr("importlib.import_module", import_module)
    monkeypatch.setattr(services, "SERVICES", {"straggler": lambda _: order.append("opened")})
    monkeypatch.setattr(services, "_HEAVY", {"straggler": ("one", "two")})
    await asyncio.to_thread(services.imported, "straggler")
    assert order == ["one", "calm", "two", "calm", "opened"]


async def test_ranks_that_do_not_come_back_hold_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that has failed for good has its end recorded at once."""
    with monkeypatch.context() as short:
        short.setattr(urgent_work, "_AT_MOST_S", 0.01)
        begin_urgent_work()
    await asyncio.to_thread(stand_back)


@pytest.mark.parametrize("name", services._HEAVY)
def test_the_parts_of_a_service_are_there(name: str) -> None:
    services.imported(name)
