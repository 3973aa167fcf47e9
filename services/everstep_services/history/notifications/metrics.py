"""Metrics of each target of notifications, for Prometheus."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from everstep_services.history.notifications.service import Notifications

GAUGES: Mapping[str, str] = {
    "waiting": "Messages that wait to be sent, or to be sent again.",
    "failing_seconds": "How long every attempt at this target has failed; 0 after a success.",
}
COUNTERS: Mapping[str, str] = {
    "sent": "Messages that a target has accepted.",
    "failed": "Messages that were given up; the log has each reason.",
    "retries": "Attempts that failed and are repeated.",
}


class TargetMetrics(Collector):
    """`everstep_notify_…` with the label `target`."""

    def __init__(self, notifications: Notifications) -> None:
        self._notifications = notifications

    def describe(self) -> list[Metric]:
        """Nothing: the targets come from the settings."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The values of now."""
        by_target = self._notifications.by_target()
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(f"everstep_notify_{name}", text, labels=["target"])
            yield _filled(gauge, name, by_target)
        for name, text in COUNTERS.items():
            counter = CounterMetricFamily(f"everstep_notify_{name}", text, labels=["target"])
            yield _filled(counter, name, by_target)


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily,
    name: str,
    by_target: Mapping[str, Mapping[str, float]],
) -> Metric:
    for target, values in by_target.items():
        family.add_metric([target], values[name])
    return family
