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
from everstep.bus.server.copies import ServerWatch
from everstep.clock import SystemClock
from everstep.ids import id_from
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
    "everstep_history_unknown_total": "Facts of a newer release, which are kept in the log but "
    "not projected.",
    "everstep_history_refused_total": "Messages on the subject of a fact that are not that fact.",
    "everstep_history_unstorable_total": "Facts that the database cannot store.",
    "everstep_history_unprojected_total": "Facts in the log whose projection failed.",
    "everstep_history_input_failures_total": "Unexpected errors that did not stop the process; "
    "the log has each.",
    "everstep_history_beats_input_failures_total": "Beats whose handling failed; the log has "
    "each error.",
    "everstep_rendezvous_input_failures_total": "Inputs whose handling failed; the log has each "
    "error.",
    "everstep_health_input_failures_total": "Inputs whose handling failed; the log has each error.",
    "everstep_catalog_input_failures_total": "Inputs whose handling failed; the log has each "
    "error.",
    "everstep_history_batches_total": "Transactions that wrote facts.",
    "everstep_history_retries_total": "Failures of the bus or the database.",
    "everstep_history_projecting": "1 while this replica writes the record.",
    "everstep_history_last_n": "The number of the last fact in the log, as this replica knows it.",
    "everstep_history_retention_jobs_total": "Old jobs that this replica has removed.",
    "everstep_history_retention_facts_total": "Facts of the jobs that were removed.",
    "everstep_history_retention_rows_total": "Rows of the jobs that were removed, in all tables, "
    "facts included.",
    "everstep_history_retention_pages_total": "Transactions that removed rows of old jobs.",
    "everstep_history_retention_kept": "Old jobs that stay: pinned, labelled, or corrected.",
    "everstep_history_retention_slowest_page_seconds": "The duration of the longest such "
    "transaction, the search for rows included.",
    "everstep_history_retention_input_failures_total": "Unexpected errors that did not stop the "
    "process; the log has each.",
    "everstep_notify_leading": "1 while this replica is the one that sends notifications.",
    "everstep_notify_open": "Notices that some target has not received completely.",
    "everstep_notify_cooled_total": "Notices that were sent together with another one.",
    "everstep_notify_dropped_total": "Notices that were dropped because there were too many.",
    "everstep_notify_facts_missed_total": "Facts that the stream had dropped before they could "
    "be read.",
    "everstep_notify_pings_total": "Pings that the dead-man service has accepted.",
    "everstep_notify_ping_failures_total": "Pings that the dead-man service has not accepted.",
    "everstep_notify_input_failures_total": "Facts whose handling failed; the log has each error.",
    "everstep_history_beats_clock_offset_most_seconds": "The largest difference between the clock "
    "of a node that is heard and the clock of this replica, in either direction.",
    "everstep_history_beats_wrong_clocks": "Nodes that are heard and whose clocks differ from the "
    "clock of this replica by more than `clock_offset_limit_s` in [history].",
    "everstep_history_beats_nodes": "Nodes whose last beat this replica shows.",
    "everstep_rendezvous_jobs": "Jobs that this replica knows, ended ones included.",
    "everstep_rendezvous_suspects": "Suspect nodes, which get a slot only if no other node can.",
    "everstep_rendezvous_questions_total": "Questions from agents, people and services.",
    "everstep_rendezvous_batches_total": "Batches of a job's questions that were decided together.",
    "everstep_rendezvous_conflicts_total": "Decisions that were repeated because another replica "
    "had written first.",
    "everstep_rendezvous_orders_total": "Orders sent to agents.",
    "everstep_rendezvous_facts_total": "Facts recorded about what was decided.",
    "everstep_rendezvous_probes_total": "Probes sent to agents that did not answer in time.",
    "everstep_health_jobs": "Jobs with at least one node that sends beats.",
    "everstep_health_nodes": "Nodes that send beats.",
    "everstep_health_nodes_lost": "Nodes that are lost now.",
    "everstep_health_findings_waiting": "Findings that are not yet written to the spool on this "
    "machine.",
    "everstep_health_blind_seconds_total": "Time in which this replica received no beats, "
    "because of the bus or of itself.",
    "everstep_health_beats_total": "Beats received from agents.",
    "everstep_health_hails_total": "Beats that health asked silent nodes for.",
    "everstep_health_knocks_total": "Probes of the connections of silent nodes to the bus.",
    "everstep_health_inquiries_total": "Questions to other agents: does the node's warden live?",
    "everstep_health_lost_total": "Nodes that were declared lost.",
    "everstep_health_returned_total": "Lost nodes that were heard again.",
    "everstep_health_stalls_total": "Stalls for which health named the rank that stopped first.",
    "everstep_health_limits_total": "Times that this replica wrote the limits of a job.",
    "everstep_health_conflicts_total": "Writes of limits that were dropped because another "
    "replica had written first.",
    "everstep_health_judging": "1 while this replica judges nodes.",
    "everstep_health_nodes_known": "Nodes that were examined, or that have evidence against them.",
    "everstep_health_nodes_suspect": "Nodes that are suspect.",
    "everstep_health_nodes_excluded": "Nodes that health has excluded by its own decision.",
    "everstep_health_checks_distrusted": "Checks that fail on too many nodes to be believed.",
    "everstep_health_breaker_open": "1 while the breaker is open: health excludes no more nodes "
    "by its own decision.",
    "everstep_health_facts_read_total": "Facts read as evidence about nodes.",
    "everstep_health_facts_missed_total": "Facts that the stream had dropped before they could "
    "be read.",
    "everstep_health_facts_not_believed_total": "Facts that were ignored because their node "
    "never had a seat in the job that sent them.",
    "everstep_health_node_conflicts_total": "Writes of the document of nodes that were repeated "
    "because another replica had written first.",
    "everstep_catalog_leading": "1 while this replica leads: it reads facts and cleans up.",
    "everstep_catalog_jobs": "Jobs with checkpoints, as counted by the replica that leads.",
    "everstep_catalog_checkpoints": "Checkpoints of these jobs.",
    "everstep_catalog_quarantined": "Checkpoints in quarantine, which must not be restored.",
    "everstep_catalog_missing": "Checkpoints whose files are gone without a deletion on record.",
    "everstep_catalog_degraded": "Jobs whose states in memory survive fewer lost nodes than they "
    "should.",
    "everstep_catalog_roots_hung": "Roots of checkpoints whose storage does not answer; the log "
    "names each once.",
    "everstep_catalog_storage_threads": "Threads that read or change storages, or wait for them.",
    "everstep_catalog_facts_read_total": "Facts about checkpoints that were read.",
    "everstep_catalog_facts_missed_total": "Facts that the stream had dropped before they could "
    "be read.",
    "everstep_catalog_conflicts_total": "Writes that were repeated because another replica had "
    "written first.",
    "everstep_catalog_verified_total": "Checkpoints that the catalog has read back by its own "
    "decision.",
    "everstep_catalog_flawed_total": "Checkpoints that were read back and differ from what was "
    "saved.",
    "everstep_catalog_deleted_total": "Checkpoints that retention deleted.",
    "everstep_catalog_scans_total": "Comparisons of the index with the files of a root.",
    "everstep_catalog_swept_total": "Failed saves whose remains were removed.",
    "everstep_catalog_repairs_total": "Copies in memory that were requested because there were "
    "too few.",
    "everstep_traces_sent_total": "Spans that the OpenTelemetry collector has accepted, where "
    "one is set.",
    "everstep_traces_dropped_total": "Spans that were not sent: the collector did not answer, or "
    "too many waited.",
    "everstep_bus_connected": "1 while there is a connection to the bus.",
    "everstep_attribution_actions_done_total": "Jobs stopped and nodes replaced by the policy.",
    "everstep_attribution_actions_failed_total": "Actions that the policy requested, and that "
    "were refused.",
    "everstep_attribution_actions_observed_total": "Actions that the policy would have carried "
    "out in enforce mode.",
    "everstep_attribution_leading": "1 while this replica has the lease, and judges incidents.",
    "everstep_attribution_jobs": "Jobs whose incidents are remembered.",
    "everstep_attribution_open_incidents": "Incidents that are not closed.",
    "everstep_attribution_waiting": "Incidents that wait for a verdict, or for a revision of one.",
    "everstep_attribution_verdict_seconds": "The time from the opening of the newest incident "
    "to its first verdict.",
    "everstep_attribution_verdicts_total": "Verdicts of this replica, revisions included.",
    "everstep_attribution_amended_total": "Verdicts that later evidence has changed.",
    "everstep_attribution_inconclusive_total": "Verdicts that are inconclusive.",
    "everstep_attribution_corrections_total": "Corrections and confirmations of verdicts by "
    "people.",
    "everstep_attribution_confirmations_total": "Confirmations among them: the person named the "
    "same cause as the verdict.",
    "everstep_attribution_facts_read_total": "Facts that were read.",
    "everstep_attribution_facts_missed_total": "Facts that the stream had dropped before they "
    "could be read.",
    "everstep_attribution_facts_not_believed_total": "Checks that were ignored because their "
    "node never had a seat in the job that sent them.",
    "everstep_attribution_left_out_total": "Parts of incidents that were ignored for the same "
    "reason.",
    "everstep_attribution_conflicts_total": "Writes that were repeated because another replica "
    "had written first.",
    "everstep_attribution_analyzer_failures_total": "Analyses that failed or were late.",
    "everstep_attribution_explanations_total": "Verdicts that a language model has explained.",
    "everstep_attribution_explanation_failures_total": "Explanations that the language model did "
    "not give; the log has each error.",
    "everstep_attribution_input_failures_total": "Inputs whose handling failed; the log has each "
    "error.",
    "everstep_kubernetes_nodes": "Nodes of the cluster.",
    "everstep_kubernetes_nodes_marked": "Nodes that Everstep has tainted or cordoned.",
    "everstep_kubernetes_nodes_signed": "Nodes with a sign to act on: cordoned, about to be "
    "taken away, or in a bad condition.",
    "everstep_kubernetes_api_server_answers": "1 while the API server answers.",
    "everstep_kubernetes_leading": "1 while this replica is the one that acts.",
    "everstep_kubernetes_listed_total": "Lists of all nodes that were fetched from the API server.",
    "everstep_kubernetes_excluded_total": "Exclusions that were requested from health, renewals "
    "included.",
    "everstep_kubernetes_included_total": "Inclusions that were requested from health.",
    "everstep_kubernetes_drained_total": "Drains that were requested from rendezvous.",
    "everstep_kubernetes_marked_total": "Nodes that were tainted or cordoned.",
    "everstep_kubernetes_unmarked_total": "Nodes whose mark was removed.",
    "everstep_kubernetes_failed_total": "Attempts that failed; the log has each error.",
    "everstep_straggler_jobs": "Jobs that send timings, or have open findings.",
    "everstep_straggler_open_findings": "Slow ranks that were found and are not cleared yet.",
    "everstep_straggler_windows": "Windows of running rounds that were judged.",
    "everstep_straggler_slow_ranks": "Ranks that this replica has judged slow.",
    "everstep_straggler_missing_ranks": "Ranks without data in the newest window.",
    "everstep_straggler_own_seconds_min": "The shortest own time of any rank for a step: its time "
    "without waits for others.",
    "everstep_straggler_own_seconds_median": "The median own time of ranks for a step; over "
    "several jobs, the median of their medians.",
    "everstep_straggler_own_seconds_max": "The longest own time of any rank for a step.",
    "everstep_straggler_ratio_min": "How much longer the fastest rank needs than the median of "
    "its role group: below 0.",
    "everstep_straggler_ratio_median": "The same for the median rank.",
    "everstep_straggler_ratio_max": "The same for the slowest rank: 0.1 if it needs 10 % longer.",
    "everstep_straggler_waited_seconds_min": "The shortest time that any rank waits for others in "
    "a step.",
    "everstep_straggler_waited_seconds_median": "The median time that ranks wait for others in a "
    "step.",
    "everstep_straggler_waited_seconds_max": "The longest time that any rank waits for others in a "
    "step.",
    "everstep_straggler_messages_total": "Messages received, each with one window of a node.",
    "everstep_straggler_messages_dropped_total": "Messages that were not read in time.",
    "everstep_straggler_refused_total": "Messages and values that were refused; the README of "
    "straggler has the reasons.",
    "everstep_straggler_input_failures_total": "Inputs whose handling failed; the log has each "
    "error.",
    "everstep_straggler_document_failures_total": "Documents whose handling failed; the log has "
    "each error.",
    "everstep_straggler_found_total": "Slow ranks that this replica has recorded.",
    "everstep_straggler_cleared_total": "Slow ranks that this replica has recorded as cleared.",
    "everstep_straggler_shifted_total": "Changes of the step time of a whole job that this "
    "replica has recorded.",
    "everstep_straggler_conflicts_total": "Writes that were repeated because another replica had "
    "written first.",
    "everstep_straggler_actions_observed_total": "Actions that the policy would have requested "
    "in enforce mode.",
    "everstep_straggler_actions_asked_total": "Actions that the policy requested, and that were "
    "accepted.",
    "everstep_straggler_actions_refused_total": "Actions that the policy requested, and that "
    "were refused.",
    "everstep_bus_beats_waiting": "Messages without delivery guarantee (beats, for instance) "
    "that wait to be sent.",
    "everstep_bus_sent_total": "Messages without delivery guarantee that were sent.",
    "everstep_bus_send_dropped_total": "Messages without delivery guarantee that were dropped "
    "before they were sent.",
    "everstep_bus_heard_total": "Messages that subscriptions received.",
    "everstep_bus_heard_dropped_total": "Messages dropped because this process did not read them "
    "in time.",
    "everstep_bus_undecodable_total": "Messages received that this release cannot decode.",
    "everstep_bus_reconnects_total": "Reconnections to the bus.",
    "everstep_bus_rebuilds_total": "New clients that were made after the server had closed the "
    "connection for good.",
    "everstep_bus_errors_total": "Errors that the client library reported.",
    "everstep_bus_slow_total": "Reports of a slow consumer by the client library.",
    "everstep_bus_denied_total": "Subjects that the server denied.",
    "everstep_bus_facts_recorded_total": "Facts written to the local spool since the start.",
    "everstep_bus_facts_acknowledged_total": "Facts that the stream has acknowledged.",
    "everstep_bus_facts_resent_total": "Facts that were sent again after a lost connection or a "
    "missing acknowledgement.",
    "everstep_bus_facts_rejected_total": "Facts that the stream rejected for good; the log has "
    "each reason.",
    "everstep_bus_unacknowledged_seconds": "How long no stream has acknowledged a write of this "
    "process: most servers of the bus are away, or out of its reach.",
    "everstep_servers_seen": "Servers of the bus that have copies of streams; 0 with one server.",
    "everstep_servers_away": "Those that the leaders of streams do not reach.",
    "everstep_servers_lagging": "Those whose copies are not current.",
    "everstep_servers_lag_messages": "The most messages that a copy lacks.",
    "everstep_servers_streams_without_leader": "Streams and buckets that nobody can write.",
    "everstep_servers_store_ratio": "How full the fullest stream is of those that refuse what does "
    "not fit: evidence and documents.",
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
    ("The servers of the bus, as history sees them", ("everstep_servers_",)),
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
    retention = JobRetention(HistorySettings(), removals, bus, SystemClock(), bus.record, id_from)
    metrics.watch("history_retention", retention.statistics)
    metrics.watch("history_beats", Beats(_bus(), SystemClock()).statistics)
    notifications = Notifications(NotifySettings(), _bus(), SystemClock())
    metrics.watch("notify", notifications.statistics)
    metrics.watch("traces", SpanExporter("", "", SystemClock()).statistics)
    metrics.watch("bus", _bus().statistics)
    metrics.watch("servers", ServerWatch(_bus().jetstream).statistics)
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
