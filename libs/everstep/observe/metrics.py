"""The metrics of a process for Prometheus: its own, and those that each component counts."""

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from everstep import __version__
from everstep.clock import Clock

log = logging.getLogger(__name__)

Statistics = Callable[[], Mapping[str, float]]
"""The counts of a component so far; values whose names end in `_total` only grow."""

CONTENT_TYPE = CONTENT_TYPE_LATEST
LAG_WARNING_S = 1.0

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_LAG_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30)


class MetricRegistry:
    """The metrics of one process, all with the prefix `everstep_` except `process_*`."""

    def __init__(self, service: str) -> None:
        self.registry = CollectorRegistry()
        self._watched: dict[str, _Statistics] = {}
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        Gauge(
            "everstep_build_info",
            "The version that is running.",
            ["version", "service"],
            registry=self.registry,
        ).labels(__version__, service).set(1)
        self.loop_lag = Gauge(
            "everstep_loop_lag_seconds",
            "How late the event loop was when last measured.",
            registry=self.registry,
        )
        self.loop_lags = Histogram(
            "everstep_loop_lag_distribution_seconds",
            "How late the event loop was, over time.",
            buckets=_LAG_BUCKETS,
            registry=self.registry,
        )

    def watch(self, component: str, statistics: Statistics, *, of: str = "") -> None:
        """Publish what a component counts as `everstep_<component>_<name>`, read when asked.

        Where several services in one process have such a component, `of` says whose it is: it
        becomes the label `of`.
        """
        collector = self._watched.get(component)
        if collector is None:
            collector = self._watched[component] = _Statistics(component)
            self.registry.register(collector)
        collector.sources.append((of, statistics))

    def collect(self, collectors: Iterable[Collector]) -> None:
        """Publish the metrics of these collectors, read at each request."""
        for collector in collectors:
            self.registry.register(collector)

    async def exposition(self) -> bytes:
        """All metrics in Prometheus' text format; it has `CONTENT_TYPE`."""
        # The process's come from files; the components' belong to the loop.
        process = await asyncio.to_thread(generate_latest, self._process)
        return process + generate_latest(self.registry)


async def measure_loop_lag(metrics: MetricRegistry, clock: Clock, *, every_s: float = 0.5) -> None:
    """A loop that measures its own lateness: a blocked event loop shows here."""
    while True:
        due = clock.now() + every_s
        await clock.sleep(every_s)
        lag_s = max(0.0, clock.now() - due)
        metrics.loop_lag.set(lag_s)
        metrics.loop_lags.observe(lag_s)
        if lag_s >= LAG_WARNING_S:
            log.warning("loop_blocked lag_s=%.2f limit_s=%.2f", lag_s, LAG_WARNING_S)


class _Statistics(Collector):
    def __init__(self, component: str) -> None:
        self._component = component
        self.sources: list[tuple[str, Statistics]] = []

    def describe(self) -> list[Metric]:
        return []  # or registering would call `statistics`, before the component is ready

    def collect(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for of, statistics in self.sources:
            for name, value in statistics().items():
                if not _NAME.fullmatch(name):
                    continue
                family = families.get(name) or self._family(name, labelled=bool(of))
                families[name] = family
                family.add_metric([of] if of else [], value)
        yield from families.values()

    def _family(self, name: str, *, labelled: bool) -> CounterMetricFamily | GaugeMetricFamily:
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        text = f"{name.replace('_', ' ')}, as counted by {self._component}."
        labels = ["of"] if labelled else []
        return kind(f"everstep_{self._component}_{name}", text, labels=labels)
