"""The health service, opened: its place on the bus, and what is to be run."""

from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

from everstep.bus import BusSettings
from everstep.bus.ports import Bus
from everstep.bus.recorder import Recorder
from everstep.clock import Clock
from everstep.replicas import on_bus
from everstep.runtime import Loop, Parts
from everstep_services.health.answers import Answers
from everstep_services.health.limit_learner import Teacher
from everstep_services.health.nodes.actions import Deeds
from everstep_services.health.nodes.service import Registrar
from everstep_services.health.observer import Observer
from everstep_services.health.settings import HealthSettings


class Health:
    """One replica, put together."""

    def __init__(self, settings: HealthSettings, bus: Bus, clock: Clock) -> None:
        self.records = Recorder(bus, clock)
        self.teacher = Teacher(settings.limits, bus, clock, self.records)
        self.observer = Observer(settings, bus, clock, self.records, self.teacher)
        self.registrar = Registrar(settings.nodes, bus, clock, self.records, self.observer.nodes)
        deeds = Deeds(settings.nodes, bus, clock, self.records, self.registrar)
        self.answers = Answers(
            bus,
            clock,
            self.records,
            deeds=deeds,
            observer=self.observer,
            teacher=self.teacher,
            registrar=self.registrar,
        )

    @property
    def loops(self) -> tuple[Loop, ...]:
        """What is to be run."""
        observer, teacher = self.observer, self.teacher
        return (
            observer.hear_for_ever,
            observer.echo.hear_for_ever,
            observer.follow_jobs_for_ever,
            observer.follow_stalls_for_ever,
            observer.follow_recoveries_for_ever,
            observer.judge_for_ever,
            observer.remind_for_ever,
            teacher.follow_starts_for_ever,
            teacher.teach_for_ever,
            self.registrar.keep_for_ever,
            self.answers.answer_for_ever,
            self.records.record_for_ever,
        )

    def statistics(self) -> dict[str, float]:
        """What it knows and counted so far, for metrics."""
        return {
            **self.observer.statistics(),
            **self.teacher.statistics(),
            **self.registrar.statistics(),
            "findings_waiting": float(self.records.waiting),
        }


def opened(
    settings: HealthSettings, bus_settings: BusSettings, spool: Path | None = None
) -> AbstractAsyncContextManager[Parts]:
    """The replica, whether the bus is there or not: while it is not, nobody is lost.

    Facts wait in `spool`, or below the `spool_dir` of the bus.
    """
    return on_bus("health", bus_settings, partial(Health, settings), spool)
