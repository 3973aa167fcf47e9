"""The catalog service, opened: its place on the bus, and what is to be run."""

from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

from everstep.bus import BusSettings
from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.replicas import on_bus
from everstep.runtime import Loop, Parts
from everstep_services.catalog.answers import Answers
from everstep_services.catalog.indexer import Indexer
from everstep_services.catalog.maintenance import Tender
from everstep_services.catalog.settings import CatalogSettings
from everstep_services.catalog.stores import Shelves


class Catalog:
    """One replica, put together."""

    def __init__(self, settings: CatalogSettings, bus: Bus, clock: Clock) -> None:
        self.indexer = Indexer(bus, clock)
        shelves = Shelves(settings.verify_bytes_per_s)
        self.tender = Tender(settings, bus, clock, self.indexer, shelves)
        self.answers = Answers(bus, clock, self.indexer, self.tender)

    @property
    def loops(self) -> tuple[Loop, ...]:
        """What is to be run."""
        return (
            self.indexer.keep_for_ever,
            self.tender.work_for_ever,
            self.tender.look_for_ever,
            self.tender.read_back_for_ever,
            self.answers.answer_for_ever,
        )

    def statistics(self) -> dict[str, float]:
        """What it knows and counted so far, for metrics."""
        return {**self.indexer.statistics(), **self.tender.statistics()}


def opened(
    settings: CatalogSettings, bus_settings: BusSettings, spool: Path | None = None
) -> AbstractAsyncContextManager[Parts]:
    """The replica, whether the bus is there or not: nothing that saves or restores needs it.

    Facts wait in `spool`, or below the `spool_dir` of the bus.
    """
    return on_bus("catalog", bus_settings, partial(Catalog, settings), spool)
