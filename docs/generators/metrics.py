"""What `/metrics` shows, as a page for people; the names come from the code."""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric

from everstep.bus import BusSettings
from everstep.bus.client import NatsBus
from everstep.bus.connection import Connection
from everstep.bus.facts.outbox import Outbox
from everstep.bus.facts.spool import Spool
from everstep.bus.jetstream import JetStream
from everstep.clock import SystemClock
from everstep.observe.metrics import MetricRegistry
from everstep.observe.traces import SpanExporter
from everstep.store.database import Database
from everstep.store.job_removal import JobRemovals
from everstep.store.log import FactLog
from everstep_services.attribution.replica import AttributionReplica
from everstep_services.attribution.settings import AttributionSettings
from everstep_services.catalog.replica import CatalogReplica
from everstep_services.catalog.settings import CatalogSettings
from everstep_services.health.replica import HealthReplica
from everstep_services.health.settings import HealthSettings
from everstep_services.history.beats import Beats
from everstep_services.history.goodput.reader import GoodputReader
from everstep_services.history.job_metrics import JobMetrics
from everstep_services.history.notifications.metrics import TargetMetrics
from everstep_services.history.notifications.service import Notifications
from everstep_services.history.notifications.settings import NotifySettings
from everstep_services.history.notifier import LogNotifier
from everstep_services.history.projector import Projector
from everstep_services.history.retention import JobRetention
from everstep_services.history.settings import HistorySettings
from everstep_services.kubernetes.service import NodeWatcher
from everstep_services.kubernetes.settings import KubernetesSettings
from everstep_services.rendezvous.service import Rendezvous
from everstep_services.rendezvous.settings import RendezvousSettings
from everstep_services.straggler.replica import Straggler
from everstep_services.straggler.settings import StragglerSettings

MEANINGS: Mapping[str, str] = {
    "everstep_history_facts_total": "Facts written into the log by this replica.",
    "everstep_history_missed_total": "Facts that the stream had dropped before they could be read.",
    "everstep_history_duplicates_total": "Facts that came a second time and were skipped.",
    "everstep_history_unknown_total": "Facts of a newer release: kept, not projected.",
    "everstep_history_refused_total": "Messages on the subject of a fact that are not that fact.",
    "everstep_history_unstorable_total": "Facts that the database cannot store.",
    "everstep_history_unprojected_total": "Facts in the log whose projection failed.",
    "everstep_history_input_failures_total": "Unforeseen errors that were contained.",
    "everstep_history_beats_input_failures_total": "Beats whose handling failed.",
    "everstep_rendezvous_input_failures_total": "Inputs whose handling failed: see the log.",
    "everstep_health_input_failures_total": "Inputs whose handling failed: see the log.",
    "everstep_catalog_input_failures_total": "Inputs whose handling failed: see the log.",
    "everstep_history_batches_total": "Transactions that wrote facts.",
    "everstep_history_retries_total": "Failures of the bus or the database.",
    "everstep_history_projecting": "1 while this replica writes the record.",
    "everstep_history_last_n": "How far the log reaches, as this replica knows.",
    "everstep_history_retention_jobs_total": "Old jobs that this replica has removed.",
    "everstep_history_retention_facts_total": "Their facts.",
    "everstep_history_retention_rows_total": "Their rows in all tables, facts included.",
    "everstep_history_retention_pages_total": "Transactions in which it was done.",
    "everstep_history_retention_kept": "Old jobs that stay: pinned, labelled, or corrected.",
    "everstep_history_retention_slowest_page_seconds": "The longest page, finding rows included.",
    "everstep_history_retention_input_failures_total": "Unforeseen errors that were contained.",
    "everstep_notify_leading": "1 while this replica is the one that sends notifications.",
    "everstep_notify_open": "Notices that not every target has all of.",
    "everstep_notify_cooled_total": "Notices that were sent together with another one.",
    "everstep_notify_dropped_total": "Notices that were dropped because there were too many.",
    "everstep_notify_facts_missed_total": "Facts that the stream had dropped before that.",
    "everstep_notify_pings_total": "Pings that the dead-man service has taken.",
    "everstep_notify_ping_failures_total": "Pings that it has not taken.",
    "everstep_notify_input_failures_total": "Facts whose handling failed: see the log.",
    "everstep_history_beats_nodes": "Nodes whose last beat this replica shows.",
    "everstep_rendezvous_jobs": "Jobs that this replica knows, ended ones included.",
    "everstep_rendezvous_suspects": "Suspect nodes, which get a slot only if no other node can.",
    "everstep_rendezvous_questions_total": "Questions of agents, people and services.",
    "everstep_rendezvous_batches_total": "Batches of a job's questions that were decided together.",
    "everstep_rendezvous_conflicts_total": "Decisions made anew: another replica wrote first.",
    "everstep_rendezvous_orders_total": "Orders sent to agents.",
    "everstep_rendezvous_facts_total": "Facts recorded about what was decided.",
    "everstep_rendezvous_probes_total": "Agents that were asked for a sign of life.",
    "everstep_health_jobs": "Jobs whose nodes are heard.",
    "everstep_health_nodes": "Nodes that are heard.",
    "everstep_health_nodes_lost": "Nodes that are lost now.",
    "everstep_health_findings_waiting": "Findings that are not on our own disk yet.",
    "everstep_health_blind_seconds_total": "Time in which this replica could hear nobody.",
    "everstep_health_beats_total": "Beats that were heard.",
    "everstep_health_lost_total": "Nodes that were declared lost.",
    "everstep_health_returned_total": "Lost nodes that were heard again.",
    "everstep_health_stalls_total": "Stalls for which it named the rank that stopped first.",
    "everstep_health_limits_total": "Times that this replica wrote the limits of a job.",
    "everstep_health_conflicts_total": "Times that another replica had written them first.",
    "everstep_health_judging": "1 while this replica judges nodes.",
    "everstep_health_nodes_known": "Nodes that were examined, or that something speaks against.",
    "everstep_health_nodes_suspect": "Nodes that may be bad.",
    "everstep_health_nodes_excluded": "Nodes that health keeps out by itself.",
    "everstep_health_checks_distrusted": "Checks that fail on too many nodes to be believed.",
    "everstep_health_breaker_open": "1 while health excludes no more nodes by itself.",
    "everstep_health_facts_read_total": "Facts read as evidence about nodes.",
    "everstep_health_facts_missed_total": "Facts that the stream had dropped before that.",
    "everstep_health_facts_not_believed_total": "Facts about nodes that rendezvous knows of no "
    "seat of in the job that told them.",
    "everstep_health_node_conflicts_total": "Times that what is known of nodes was changed first "
    "by another replica.",
    "everstep_catalog_leading": "1 while this replica leads: it reads facts and cleans up.",
    "everstep_catalog_jobs": "Jobs with checkpoints, as the replica that leads knows.",
    "everstep_catalog_checkpoints": "Their checkpoints.",
    "everstep_catalog_quarantined": "Those that are not to be restored.",
    "everstep_catalog_missing": "Checkpoints whose files are gone without a deletion on record.",
    "everstep_catalog_degraded": "Jobs whose states in memory survive fewer losses than wanted.",
    "everstep_catalog_facts_read_total": "Facts read about checkpoints.",
    "everstep_catalog_facts_missed_total": "Facts that the stream had dropped before that.",
    "everstep_catalog_conflicts_total": "Writes made anew: another replica wrote first.",
    "everstep_catalog_verified_total": "Checkpoints that were read back by themselves.",
    "everstep_catalog_flawed_total": "Verified checkpoints that are not what was saved.",
    "everstep_catalog_deleted_total": "Checkpoints that retention deleted.",
    "everstep_catalog_scans_total": "Times that the index was compared with the files of a root.",
    "everstep_catalog_swept_total": "Failed saves whose remains were removed.",
    "everstep_catalog_repairs_total": "Copies that were asked for because there were too few.",
    "everstep_traces_sent_total": "Spans that the collector has taken, where there is one.",
    "everstep_traces_dropped_total": "Spans that it has not: it was away, or there were too many.",
    "everstep_bus_connected": "1 while there is a connection to the bus.",
    "everstep_attribution_actions_done_total": "Jobs stopped and nodes replaced by the policy.",
    "everstep_attribution_actions_failed_total": "What the policy asked for, and was refused.",
    "everstep_attribution_actions_observed_total": "What the policy would have done.",
    "everstep_attribution_leading": "1 if this replica has the lease, and judges.",
    "everstep_attribution_jobs": "Jobs whose incidents are remembered.",
    "everstep_attribution_open_incidents": "Incidents that are not closed.",
    "everstep_attribution_waiting": "Incidents that wait to be judged, or judged again.",
    "everstep_attribution_verdict_s": "From the newest incident's opening until its first verdict.",
    "everstep_attribution_verdicts_total": "Verdicts of this replica, with revisions.",
    "everstep_attribution_amended_total": "Those that later evidence has changed.",
    "everstep_attribution_inconclusive_total": "Those that are inconclusive.",
    "everstep_attribution_corrections_total": "Words of people about verdicts.",
    "everstep_attribution_confirmations_total": "Those that said the same as the verdict.",
    "everstep_attribution_facts_read_total": "Facts that were read.",
    "everstep_attribution_facts_missed_total": "Facts that were gone before they were read.",
    "everstep_attribution_facts_not_believed_total": "Checks of nodes that rendezvous knows of no "
    "seat of in the job that told them.",
    "everstep_attribution_left_out_total": "Parts of incidents that were not weighed, for that "
    "reason.",
    "everstep_attribution_conflicts_total": "Writes made anew: another replica wrote first.",
    "everstep_attribution_analyzer_failures_total": "Analyses that failed or were late.",
    "everstep_attribution_explanations_total": "Verdicts that a model has put into words.",
    "everstep_attribution_explanation_failures_total": "Those that it has not: see the log.",
    "everstep_attribution_input_failures_total": "Inputs whose handling failed: see the log.",
    "everstep_kubernetes_nodes": "Nodes of the cluster.",
    "everstep_kubernetes_nodes_marked": "Nodes with our taint, or that we have cordoned.",
    "everstep_kubernetes_nodes_signed": "Nodes that are cordoned, taken away or bad.",
    "everstep_kubernetes_api_server_answers": "1 while the API server answers.",
    "everstep_kubernetes_leading": "1 while this replica acts.",
    "everstep_kubernetes_listed_total": "Times that all nodes were listed.",
    "everstep_kubernetes_excluded_total": "Exclusions asked of health, with their renewals.",
    "everstep_kubernetes_included_total": "Inclusions asked of health.",
    "everstep_kubernetes_drained_total": "Drains asked of rendezvous.",
    "everstep_kubernetes_marked_total": "Nodes that were tainted or cordoned.",
    "everstep_kubernetes_unmarked_total": "Nodes whose mark was removed.",
    "everstep_kubernetes_failed_total": "Attempts that failed: see the log.",
    "everstep_straggler_jobs": "Jobs whose timings are heard, or whose findings are open.",
    "everstep_straggler_open_findings": "Slow ranks that were found, and not cleared yet.",
    "everstep_straggler_windows": "Windows that were judged, of the rounds that run.",
    "everstep_straggler_slow_ranks": "Ranks that this replica holds for slow.",
    "everstep_straggler_missing_ranks": "Ranks without data in the newest window.",
    "everstep_straggler_own_s_min": "The least that a rank needs by itself for a step.",
    "everstep_straggler_own_s_median": "The median; over several jobs that of their medians.",
    "everstep_straggler_own_s_max": "The most.",
    "everstep_straggler_ratio_min": "How much longer the fastest rank needs: below 0.",
    "everstep_straggler_ratio_median": "The median.",
    "everstep_straggler_ratio_max": "The most: 0.1 for a rank that needs 10 % longer.",
    "everstep_straggler_waited_s_min": "The least that a rank waits for others in a step.",
    "everstep_straggler_waited_s_median": "The median.",
    "everstep_straggler_waited_s_max": "The most.",
    "everstep_straggler_messages_total": "Windows of nodes that were heard.",
    "everstep_straggler_messages_dropped_total": "Messages that were not read in time.",
    "everstep_straggler_refused_total": "Messages and values that were refused: see its README.",
    "everstep_straggler_input_failures_total": "Inputs whose handling failed: see the log.",
    "everstep_straggler_document_failures_total": "Documents whose handling failed: see the log.",
    "everstep_straggler_found_total": "Slow ranks that this replica has written down.",
    "everstep_straggler_cleared_total": "Those that it has cleared.",
    "everstep_straggler_shifted_total": "Changes of a whole job's step that it has recorded.",
    "everstep_straggler_conflicts_total": "Writes made anew: another replica wrote first.",
    "everstep_straggler_actions_observed_total": "What the policy would have asked for.",
    "everstep_straggler_actions_asked_total": "What it asked for, and others agreed to.",
    "everstep_straggler_actions_refused_total": "What it asked for, and did not get.",
    "everstep_bus_beats_waiting": "Losable messages not yet handed to the connection.",
    "everstep_bus_sent_total": "Losable messages sent.",
    "everstep_bus_send_dropped_total": "Losable messages dropped before they were sent.",
    "everstep_bus_heard_total": "Messages that subscriptions received.",
    "everstep_bus_heard_dropped_total": "Messages dropped because they were not taken in time.",
    "everstep_bus_undecodable_total": "Messages received that this release cannot read.",
    "everstep_bus_reconnects_total": "Times that the connection came back.",
    "everstep_bus_rebuilds_total": "Times that a new client was made, after the server closed us.",
    "everstep_bus_errors_total": "Errors that the client library reported.",
    "everstep_bus_slow_total": "Times that the client library reported a slow consumer.",
    "everstep_bus_denied_total": "Subjects that the server denied.",
    "everstep_bus_facts_recorded_total": "Facts written to the local spool since the start.",
    "everstep_bus_facts_acknowledged_total": "Facts that the stream has acknowledged.",
    "everstep_bus_facts_resent_total": "Facts sent again, after a loss or no answer.",
    "everstep_bus_facts_rejected_total": "Facts that the stream rejected for good: see the log.",
    "everstep_bus_facts_pending_bytes": "Bytes in the spool that the stream does not have yet.",
    "process_virtual_memory_bytes": "Virtual memory of the process.",
    "process_resident_memory_bytes": "Resident memory of the process.",
    "process_start_time_seconds": "When the process started, in Unix time.",
    "process_cpu_seconds_total": "Processor time used.",
    "process_open_fds": "Open file descriptors.",
    "process_max_fds": "The limit of open file descriptors.",
}
"""The meaning of each metric whose documentation is not in the code."""

_TOP = """# Metrics

<!-- Generated by docs/generate.py from what the processes register. Do not edit. -->

Each process serves its metrics at `/metrics` in Prometheus' text format. `/healthz` shows whether
the process can work, and if not, why; `/livez` shows whether its loop runs. The address is in
[`[observe]`](settings.md#observe) and needs no token: keep it inside your network. `everstep up`
takes a free port for it, and prints the port.
"""
_PARTS = (
    ("Every process", ("everstep_build", "everstep_loop", "everstep_traces_", "process_")),
    ("Rendezvous", ("everstep_rendezvous_",)),
    ("Health", ("everstep_health_",)),
    ("Catalog", ("everstep_catalog_",)),
    ("Kubernetes", ("everstep_kubernetes_",)),
    ("Straggler", ("everstep_straggler_",)),
    ("Attribution", ("everstep_attribution_",)),
    ("History", ("everstep_history_",)),
    ("Jobs, shown by the history service that writes the record", ("everstep_job_",)),
    ("Notifications, in the history service", ("everstep_notify_",)),
    ("The bus, as one process sees it", ("everstep_bus_",)),
)
_SPOOL = "\nMetrics with `facts_` exist in processes that record facts.\n"


def page() -> str:
    """The page, the same for the same release."""
    found = list(families())
    parts = [_TOP]
    for title, prefixes in _PARTS:
        rows = [_row(family) for family in found if family.name.startswith(prefixes)]
        parts.append(f"## {title}\n\n| metric | type | meaning |\n|---|---|---|\n{_lines(rows)}")
    return "\n".join(parts) + _SPOOL


def families() -> Iterator[Metric]:
    """Every metric that a process of Everstep shows."""
    metrics = MetricRegistry("page")
    metrics.watch("rendezvous", Rendezvous(RendezvousSettings(), _bus(), SystemClock()).statistics)
    metrics.watch("health", HealthReplica(HealthSettings(), _bus(), SystemClock()).statistics)
    metrics.watch("catalog", CatalogReplica(CatalogSettings(), _bus(), SystemClock()).statistics)
    watcher = NodeWatcher(KubernetesSettings(), _bus(), SystemClock())
    metrics.watch("kubernetes", watcher.statistics)
    metrics.watch("straggler", Straggler(StragglerSettings(), _bus(), SystemClock()).statistics)
    attribution = AttributionReplica(AttributionSettings(), {}, _bus(), SystemClock())
    metrics.watch("attribution", attribution.statistics)
    metrics.watch("history", _projector().statistics)
    removals, bus = JobRemovals(cast("Database", None)), _bus()
    retention = JobRetention(HistorySettings(), removals, bus, SystemClock(), bus.record)
    metrics.watch("history_retention", retention.statistics)
    metrics.watch("history_beats", Beats(_bus(), SystemClock()).statistics)
    notifications = Notifications(NotifySettings(), _bus(), SystemClock())
    metrics.watch("notify", notifications.statistics)
    metrics.watch("traces", SpanExporter("", "", SystemClock()).statistics)
    metrics.watch("bus", _bus().statistics)
    database = cast("Database", None)
    job_metrics = JobMetrics(
        database, GoodputReader(database), Beats(_bus(), SystemClock()), SystemClock()
    )
    metrics.collect([job_metrics, TargetMetrics(notifications)])
    yield from metrics.registry.collect()
    yield from ProcessCollector(registry=None).collect()


def name_of(family: Metric) -> str:
    """The name in the exposition, without the suffixes of histograms."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def _row(family: Metric) -> str:
    name = name_of(family)
    labels = getattr(family, "_labelnames", ())
    shown = f"`{name}`" + (f" {{{', '.join(labels)}}}" if labels else "")
    return f"| {shown} | {family.type} | {MEANINGS.get(name, family.documentation)} |"


def _lines(rows: Iterable[str]) -> str:
    return "".join(f"{row}\n" for row in rows)


def _projector() -> Projector:
    """A projector that only counts."""
    return Projector(
        HistorySettings(),
        _bus(),
        cast("Database", None),
        cast("FactLog", None),
        LogNotifier(),
        clock=SystemClock(),
        name="page",
    )


def _bus() -> NatsBus:
    """A bus that is never connected, with a spool that is never opened."""
    connection = Connection(BusSettings(), "page")
    spool = Spool(Path("never-made"), max_bytes=1, segment_bytes=1)
    outbox = Outbox(connection, spool, ThreadPoolExecutor(1))
    return NatsBus(connection, JetStream(connection), outbox)
