"""Accelerator memory after the ranks are gone."""

from collections.abc import Collection
from pathlib import Path

from everstep_services.agent.ranks.device_memory import (
    DeviceMemory,
    HeldMemory,
    held,
    wait_until_free,
)
from tests.fakes.clock import NotedClock
from tests.fakes.nvml import Card, FakeNvml


async def test_it_waits_until_the_driver_has_taken_the_memory_back(tmp_path: Path) -> None:
    """A driver that is made up holds memory for two looks (A12.6)."""
    looks = iter([{7: 100, 8: 50}, {8: 50}, {}])
    asked: list[Collection[int]] = []

    def look(pids: Collection[int]) -> dict[int, int]:
        asked.append(pids)
        return next(looks)

    done = await wait_until_free([7, 8], 60.0, NotedClock(0.0), driver=tmp_path, look=look)
    assert (done.octets, done.by, asked) == (0, "", [[7, 8]] * 3)


async def test_who_still_holds_memory_in_the_end_is_named(tmp_path: Path) -> None:
    """The report has the processes and their bytes (A12.6)."""
    done = await wait_until_free(
        [7, 8], 0.0, NotedClock(), driver=tmp_path, look=lambda _: {8: 50, 7: 1}
    )
    assert (done.octets, done.by) in {
        (51, "process 7, process 8"),
        (0, "the driver does not answer"),
    }


async def test_a_node_without_a_driver_waits_for_nothing(tmp_path: Path) -> None:
    nowhere = tmp_path / "nvidiactl"
    assert await wait_until_free([7], 60.0, NotedClock(), driver=nowhere) == HeldMemory()
    assert await wait_until_free([], 60.0, NotedClock(), driver=tmp_path) == HeldMemory()


def test_only_our_own_processes_count_on_all_devices() -> None:
    cards = (
        Card("GPU-1", processes=((7, 100), (9, 5))),
        Card("GPU-2", processes=((7, 20), (8, None))),
    )
    assert held([7, 8], lambda: FakeNvml(cards)) == {7: 120, 8: 0}


def test_a_node_without_nvml_holds_nothing() -> None:
    def missing() -> object:
        raise ImportError

    assert held([7], missing) == {}


async def test_in_a_container_the_ranks_are_those_that_came_after_the_others(
    tmp_path: Path,
) -> None:
    """NVML names the host's ids there: 4001 is our rank 7, and 900 is of another container."""
    cards = iter([((900, 5),), ((900, 5), (4001, 80)), ((900, 5), (4001, 80)), ((900, 5),)])
    now: list[tuple[tuple[int, int], ...]] = []

    def library() -> FakeNvml:
        now[:] = [next(cards, ((900, 5),))]
        return FakeNvml((Card("GPU-1", processes=now[0]),))

    memory = DeviceMemory(NotedClock(0.0), driver=tmp_path, library=library, has_own_pids=True)
    await memory.note_others()
    done = await memory.wait_until_free([7], 60.0)
    assert (done.octets, done.by) == (0, "")
    assert now == [((900, 5),)], "until 4001 is gone"
    assert next(cards, None) is None


async def test_memory_of_ranks_that_are_kept_is_theirs(tmp_path: Path) -> None:
    """In a container a kept rank looks like a stranger: the agent does not wait for it."""
    alone, both = ((900, 5),), ((900, 5), (4001, 80))
    looks = iter([alone, both, both, both, alone, alone])
    clock = NotedClock(0.0)
    memory = DeviceMemory(
        clock,
        driver=tmp_path,
        library=lambda: FakeNvml((Card("GPU-1", processes=next(looks)),)),
        has_own_pids=True,
    )
    await memory.note_others()
    assert (await memory.wait_until_free([7], 60.0, has_kept=True)).octets == 0
    assert clock.waits == []
    await memory.wait_until_free([7], 60.0)
    assert len(clock.waits) == 1, "until 4001 is gone, which is stopped now"


async def test_on_the_host_nobody_else_is_waited_for(tmp_path: Path) -> None:
    cards = (Card("GPU-1", processes=((4001, 80),)),)
    memory = DeviceMemory(
        NotedClock(0.0), driver=tmp_path, library=lambda: FakeNvml(cards), has_own_pids=False
    )
    await memory.note_others()
    assert (await memory.wait_until_free([7], 60.0)).octets == 0
