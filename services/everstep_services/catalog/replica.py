"""The catalog service, put together for the process that runs it."""

from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.replicas import opening
from everstep.runtime import Loop
from everstep_services.catalog.answers import CatalogAnswers
from everstep_services.catalog.indexer import Indexer
from everstep_services.catalog.maintenance import Maintenance
from everstep_services.catalog.settings import CatalogSettings
from everstep_services.catalog.stores import CheckpointStores


class CatalogReplica:
    """One replica of the catalog: its parts, and the loops to run."""

    def __init__(self, settings: CatalogSettings, bus: Bus, clock: Clock) -> None:
        self.indexer = Indexer(bus, clock)
        stores = CheckpointStores(settings.verify_bytes_per_s)
        self.maintenance = Maintenance(settings, bus, clock, self.indexer, stores)
        self.answers = CatalogAnswers(bus, clock, self.indexer, self.maintenance)

    @property
    def loops(self) -> tuple[Loop, ...]:
        """What the process runs until it ends."""
        return (
            self.indexer.keep_for_ever,
            self.maintenance.work_for_ever,
            self.maintenance.maintain_for_ever,
            self.maintenance.read_back_for_ever,
            self.answers.answer_for_ever,
        )

    def statistics(self) -> dict[str, float]:
        """The numbers for metrics."""
        return {**self.indexer.statistics(), **self.maintenance.statistics()}


opened = opening("catalog", CatalogReplica)
"""A replica, whether or not the bus is there: no save and no restore needs it."""
