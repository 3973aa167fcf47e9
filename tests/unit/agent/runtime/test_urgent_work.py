"""What stands back for urgent work."""

import threading
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


def test_a_service_is_imported_after_urgent_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part looks anew: urgent work may begin at any time."""
    order: list[str] = []

    def calm_down() -> None:
        order.append("calm")
        end_urgent_work()

    def import_module(name: str) -> None:
        order.append(name)
        begin_urgent_work()
        threading.Thread(target=calm_down).start()

    monkeypatch.setattr("importlib.import_module", import_module)
    monkeypatch.setattr(services, "SERVICES", {"straggler": lambda _: order.append("opened")})
    monkeypatch.setattr(services, "_HEAVY", {"straggler": ("one", "two")})
    services.imported("straggler")
    assert order == ["one", "calm", "two", "calm", "opened"]


def test_urgent_work_without_end_holds_nothing_up_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urgent_work, "_AT_MOST_S", 0.01)
    begin_urgent_work()
    stand_back()


@pytest.mark.parametrize("name", services._HEAVY)
def test_the_parts_of_a_service_are_there(name: str) -> None:
    services.imported(name)
