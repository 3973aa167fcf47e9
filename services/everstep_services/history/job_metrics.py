"""Metrics of jobs for Prometheus, from the record: of jobs that are not over, without ranks."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import Select, func, or_, select

from everstep.bus.input_failures import InputFailures
from everstep.clock import Clock
from everstep.store import tables
from everstep.store.database import Database
from everstep.store.errors import StoreError
from everstep.store.queries import Record, is_begun, is_over, jobs_with_state
from everstep.store.times import to_us
from everstep_services.history.beats import Beats, HeardBeat
from everstep_services.history.goodput.ledger import LedgerSegment, productive_ratio, seconds
from everstep_services.history.goodput.reader import GoodputReader, JobNews

log = logging.getLogger(__name__)

_EVERY_S = 15.0
_JOBS_MOST = 500
"""The most jobs that are shown: the newest."""
_SHOWN_AFTER_END_S = 3600.0
"""How long a job that is over is still shown, so that its last values are read."""
_WINDOWS_S: Mapping[str, float] = {"1h": 3600.0, "24h": 86400.0, "job": float("inf")}

GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "info": ("Always 1; the labels describe the job.", ("name", "user", "version")),
    "state": ("1 for the state that the job is in.", ("state",)),
    "ranks": ("Ranks in the newest round.", ()),
    "step": (
        "The newest step that was reported. Steps that the script does not number are counted "
        "anew in each round.",
        (),
    ),
    "total_steps": ("The step at which the training ends, if the script reported it.", ()),
    "progress_age_seconds": (
        "How long ago steps were last reported; agents report each minute.",
        (),
    ),
    "stragglers": ("Slow ranks that are not cleared.", ()),
    "incidents_open": ("Incidents that are not closed.", ()),
    "probes_failed": (
        "Nodes of the job on which a check that runs during the training has failed.",
        ("check", "policy"),
    ),
    "probe_cpu_ratio": ("The highest processor time of probes on a node, 1 for a core.", ()),
    "goodput_ratio": ("The productive share of the allocations' time in a window.", ("window",)),
    "checkpoint_last_committed_step": ("The newest step that was committed.", ("tier",)),
    "checkpoint_age_seconds": ("The age of that checkpoint.", ("tier",)),
    "checkpoint_stall_seconds": ("How long the newest save blocked a training step.", ("tier",)),
    "checkpoint_lag_seconds": (
        "The time from the call of the newest save until its checkpoint was visible.",
        ("tier",),
    ),
}
COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "restarts": ("Restarts of the job.", ()),
    "incidents": ("Incidents of the job, by the cause of their verdict.", ("cause",)),
    "stalls": ("Ranks that stalled.", ()),
    "nodes_lost": ("Nodes that were lost.", ()),
    "lost_steps": ("Steps that had to be trained again after a restart.", ()),
    "spent_seconds": ("Time of the allocations, by the class of goodput.", ("class",)),
    "checkpoint_commits": ("Checkpoints that were committed.", ("tier",)),
    "checkpoint_failures": ("Saves that failed.", ("tier",)),
}


@dataclass(slots=True)
class _Values:
    """The samples of one reading: by metric, labels and values."""

    samples: dict[str, list[tuple[tuple[str, ...], float]]] = field(default_factory=dict)

    def add(self, name: str, job: str, value: float | None, *labels: str | None) -> None:
        """Add a sample, unless the value is not known."""
        if value is not None:
            samples = self.samples.setdefault(name, [])
            samples.append(((job, *(label or "" for label in labels)), float(value)))


class JobMetrics(Collector):
    """Reads the record every 15 s, where this replica is the one that shows jobs."""

    def __init__(
        self, database: Database, goodput: GoodputReader, beats: Beats, clock: Clock
    ) -> None:
        self._database = database
        self._goodput = goodput
        self._beats = beats
        self._clock = clock
        self._values = _Values()
        self._input_failures = InputFailures("metrics of jobs")

    async def refresh_for_ever(
        self, *, is_mine: Callable[[], bool], stands_by: Callable[[], bool]
    ) -> None:
        """A loop. A replica that stands by shows no jobs, so that none is counted twice.

        While no replica can write, the last values stay: without them, alerts would be resolved.
        """
        while True:
            try:
                if is_mine():
                    self._values = await self.read()
                elif stands_by():
                    self._values = _Values()
            except StoreError as error:
                log.warning("job_metrics_not_read error=%s", error)
            except Exception as error:  # noqa: BLE001  a fact must not end the whole service
                self._input_failures.note("metrics of jobs", error)
            await self._clock.sleep(_EVERY_S)

    async def refresh(self) -> None:
        """Read the record once."""
        self._values = await self.read()

    async def read(self) -> _Values:
        """Return the values of this moment."""
        now = self._clock.wall()
        now_us, now_s = to_us(now), now.timestamp()
        values = _Values()
        jobs = await self._rows(_jobs(now_us))
        names = [str(row["job"]) for row in jobs]
        for row in jobs:
            _add_job(values, row, now_us)
        saves = tables.job_saves
        for row in await self._rows(select(saves).where(saves.c.job.in_(names))):
            _add_saves(values, row, now_us)
        for row in await self._rows(_incidents(names)):
            values.add("incidents", row["job"], row["count"], row["cause"] or "none")
        unclosed = {row["job"]: row["count"] for row in await self._rows(_open_incidents(names))}
        slow = {row["job"]: row["count"] for row in await self._rows(_open_findings(names))}
        for name in names:
            values.add("incidents_open", name, unclosed.get(name, 0))
            values.add("stragglers", name, slow.get(name, 0))
            _add_probes(values, name, self._beats.view(name).nodes)
        news = [JobNews(str(row["job"]), row["last_n"], row["facts"]) for row in jobs]
        async for name, parts in self._goodput.segments_of_many(news, now_s):
            _add_goodput(values, name, parts, now_s)
        return values

    async def _rows(self, query: Select[Any]) -> Sequence[Record]:
        async with self._database.read() as connection:
            rows: Sequence[Record] = (await connection.execute(query)).mappings().all()
        return rows

    def describe(self) -> list[Metric]:
        """Describe no metric: the record has them."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Return the values that were read last."""
        samples = self._values.samples
        for name, (text, labels) in GAUGES.items():
            gauge = GaugeMetricFamily(f"everstep_job_{name}", text, labels=["job", *labels])
            yield _filled(gauge, samples.get(name, ()))
        for name, (text, labels) in COUNTERS.items():
            counter = CounterMetricFamily(f"everstep_job_{name}", text, labels=["job", *labels])
            yield _filled(counter, samples.get(name, ()))


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily,
    samples: Iterable[tuple[tuple[str, ...], float]],
) -> Metric:
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _jobs(now_us: int) -> Select[Any]:
    jobs = tables.jobs
    ended_us = now_us - int(_SHOWN_AFTER_END_S * 1e6)
    shown = or_(~is_over(), jobs.c.ended_us > ended_us)
    query = jobs_with_state().where(is_begun(), shown)
    return query.order_by(jobs.c.first_n.desc()).limit(_JOBS_MOST)


def _incidents(names: Sequence[str]) -> Select[Any]:
    here = tables.incidents.c
    query = select(here.job, here.cause, func.count().label("count"))
    query = query.where(here.job.in_(names), here.opened_fact.is_not(None))
    return query.where(or_(here.outcome.is_(None), here.outcome != "merged")).group_by(
        here.job, here.cause
    )


def _open_incidents(names: Sequence[str]) -> Select[Any]:
    here = tables.incidents.c
    query = select(here.job, func.count().label("count"))
    query = query.where(here.job.in_(names), here.opened_fact.is_not(None))
    return query.where(here.closed_fact.is_(None)).group_by(here.job)


def _open_findings(names: Sequence[str]) -> Select[Any]:
    """Those of the newest round: a finding is over with its round."""
    here, jobs = tables.stragglers.c, tables.jobs.c
    query = select(here.job, func.count().label("count"))
    query = query.join(tables.jobs, (jobs.job == here.job) & (jobs.round == here.round))
    query = query.where(here.job.in_(names), here.n.is_not(None), here.cleared_fact.is_(None))
    return query.where(~is_over()).group_by(here.job)


def _add_job(values: _Values, row: Record, now_us: int) -> None:
    job = str(row["job"])
    values.add("info", job, 1, row["name"], row["user"], row["version"])
    values.add("state", job, 1, row["state"])
    values.add("ranks", job, row["world_size"])
    values.add("step", job, row["last_step"])
    values.add("total_steps", job, row["total_steps"])
    values.add("progress_age_seconds", job, _age_s(row["stepped_us"], now_us))
    for name in ("restarts", "stalls", "nodes_lost", "lost_steps"):
        values.add(name, job, row[name] or 0)


def _add_probes(values: _Values, job: str, nodes: Iterable[HeardBeat]) -> None:
    """Count the nodes by their last beats: of a probe that no node has, there is no sample."""
    failed: Counter[tuple[str, str]] = Counter()
    heard = [node for node in nodes if node.probes and not node.is_stale]
    for node in heard:
        for probe in node.probes:
            failed[probe.check, probe.policy] += probe.has_failed
    for (check, policy), count in sorted(failed.items()):
        values.add("probes_failed", job, count, check, policy)
    values.add("probe_cpu_ratio", job, max((n.beat.probe_cpu_ratio for n in heard), default=None))


def _add_saves(values: _Values, row: Record, now_us: int) -> None:
    job, tier = str(row["job"]), str(row["tier"])
    values.add("checkpoint_last_committed_step", job, row["committed_step"], tier)
    values.add("checkpoint_age_seconds", job, _age_s(row["committed_us"], now_us), tier)
    values.add("checkpoint_stall_seconds", job, row["stall_s"], tier)
    values.add("checkpoint_lag_seconds", job, row["lag_s"], tier)
    values.add("checkpoint_commits", job, row["commits"] or 0, tier)
    values.add("checkpoint_failures", job, row["failures"] or 0, tier)


def _add_goodput(values: _Values, job: str, parts: Sequence[LedgerSegment], now_s: float) -> None:
    for window, length_s in _WINDOWS_S.items():
        sums = seconds(parts, now_s - length_s, now_s)
        ratio = productive_ratio(sums)
        if ratio is not None:
            values.add("goodput_ratio", job, ratio, window)
    for time_class, spent_s in seconds(parts, until_s=now_s).items():
        values.add("spent_seconds", job, spent_s, time_class)


def _age_s(at_us: int | None, now_us: int) -> float | None:
    return None if at_us is None else max(0.0, (now_us - at_us) / 1e6)
