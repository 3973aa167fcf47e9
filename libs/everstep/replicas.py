"""A replica of a service that meets the others on the bus, opened for its process."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from everstep.bus import BusSettings, connect
from everstep.bus.ports import Bus
from everstep.clock import Clock, SystemClock
from everstep.runtime import Loop, Parts
from everstep.settings import Settings


class ServiceReplica(Protocol):
    """A service whose state another replica can continue from."""

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The loops, checks and statistics of the replica."""

    def statistics(self) -> dict[str, float]:
        """Its state and counts so far, for metrics."""


@asynccontextmanager
async def on_bus(
    name: str,
    settings: BusSettings,
    make: Callable[[Bus, Clock], ServiceReplica],
    spool: Path | None = None,
) -> AsyncIterator[Parts]:
    """A replica, open whether or not the bus is there.

    Its decisions wait in `spool`, or below the `spool_dir` of the bus, for the stream.
    """
    folder = spool or settings.spool_for(name)
    async with connect(settings.of_service, name, spool=folder, wait=False) as bus:
        replica = make(bus, SystemClock())
        yield Parts(
            loops=replica.loops,
            checks={"bus": bus.prove},
            statistics={name: replica.statistics, "bus": bus.statistics},
        )


Section = TypeVar("Section", bound=Settings, contravariant=True)


class OpenReplica(Protocol[Section]):
    """Opens a replica by its own settings and those of the bus."""

    def __call__(
        self, settings: Section, bus_settings: BusSettings, spool: Path | None = None
    ) -> AbstractAsyncContextManager[Parts]: ...


def opening(
    name: str, make: Callable[[Section, Bus, Clock], ServiceReplica]
) -> OpenReplica[Section]:
    """The function that opens a replica as `on_bus` does, made by `make` from its settings."""

    def opened(
        settings: Section, bus_settings: BusSettings, spool: Path | None = None
    ) -> AbstractAsyncContextManager[Parts]:
        return on_bus(name, bus_settings, partial(make, settings), spool)

    return opened
