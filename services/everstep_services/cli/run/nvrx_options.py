"""The options of NVRx's ft_launcher: what each is here, or why it is nothing here."""

from everstep_services.cli.run.options import Kind, Option

_TAKEN: dict[str, tuple[str, str, Kind]] = {
    "--ft-segment": ("segment", "--segment", "whole"),
    "--ft-max-no-progress-cycles": ("no_progress_limit", "--no-progress-limit", "whole"),
    "--workers-stop-timeout": ("stop_grace_s", "--stop-grace", "seconds"),
    "--term-timeout": ("preempt_grace_s", "--preempt-grace", "seconds"),
    "--ft-attribution-stop-action": ("stop_on_repeat", "--stop-on-repeat", "text"),
    "--ft-initial-rank-heartbeat-timeout": ("limit", "--limit first-step=", "text"),
    "--ft-rank-heartbeat-timeout": ("limit", "--limit heartbeat=", "text"),
    "--ft-rank-section-timeouts": ("limit", "--limit ", "text"),
    "--ft-rank-out-of-section-timeout": ("limit", "--limit outside=", "text"),
}
"""Options that have a counterpart: its name in the plan, as typed, and what a value is."""

_DETECTION = "limits are learned from the training itself"
_LOGS = "every line of every rank is kept by --log-dir, and the console shows it"
_ATTRIBUTION = (
    "the service attribution has settings of its own, `[attribution]`; see `everstep why`"
)
_HEALTH = "checks of nodes are the agent's: see [checks]"
_STORAGE = "name the folders to look at under [checks]: storage_paths"
_DEVICES = (
    "a round ends when its last process is gone, and the next waits until no device counts memory "
    "for those processes, 50 s at most"
)
_NOTED = {
    **dict.fromkeys(
        [
            "--ft-workload-check-interval", "--ft-safety-factor", "--ft-skip-section-response",
            "--ft-restart-check-interval",
        ],
        _DETECTION,
    ),
    **dict.fromkeys(
        [
            "--ft-node-health-check-interval", "--ft-node-health-check-endpoint",
            "--ft-enable-nic-monitor", "--ft-enable-nic-healthcheck", "--ft-pci-topo-file",
            "--ft-link-down-path-template", "--ft-link-state-path-template",
        ],
        _HEALTH,
    ),
    **dict.fromkeys(
        ["--ft-enable-dist-storage-healthcheck", "--ft-storage-health-check-path"], _STORAGE
    ),
    **dict.fromkeys(
        [
            "--ft-gpu-memory-reclaim-timeout", "--ft-gpu-memory-tolerance-mb",
            "--ft-gpu-memory-poll-interval",
        ],
        _DEVICES,
    ),
    **dict.fromkeys(
        [
            "--ft-per-cycle-applog-prefix", "--ft-nvrx-logfile", "--ft-enable-log-server",
            "--ft-log-server-port", "--ft-log-aggregator-count",
            "--ft-log-leaf-max-queue-chunks", "--ft-log-server-log-prefix",
            "--ft-log-server-graceful-shutdown-timeout",
        ],
        _LOGS,
    ),
    **dict.fromkeys(
        [
            "--ft-attribution-endpoint", "--ft-attribution-startup-timeout",
            "--ft-attribution-llm-api-key-file", "--ft-attribution-llm-base-url",
            "--ft-attribution-llm-model", "--ft-attribution-analysis-backend",
            "--ft-attribution-log-level", "--ft-attribution-export-url",
        ],
        _ATTRIBUTION,
    ),
    "--ft-rank-termination-signal": "a stalled rank gets SIGTERM, then SIGKILL: --stop-grace",
    "--ft-log-level": "set level in [log]",
    "--ft-restart-policy": "any failed rank ends the round, as with its only value",
    "--ft-rdzv-impl": "agents meet on the bus",
    "--ft-numa-bind-strict": "ranks may use every CPU that this process may",
    "--ft-check-remaining-processes": "no process outlives its round",
    "--ft-install-exception-hook": "every exception is recorded, without a hook of yours",
    "--ft-min-progress-iterations": "any new step is progress",
    "--ft-checkpoint-iteration-file": "steps are counted inside the ranks",
    "--ft-cycle-info-dir": "rounds are in the record: `everstep facts`",
    "--ft-ignore-missing-cfg": "there is no such file to miss",
}  # fmt: skip
_REFUSED = {
    "--ft-cfg-path": "write what it says as options, or under [agent] in everstep.toml: "
    "`everstep config show agent` lists them",
    "--ft-no-restart-exit-code": "the code for 'do not restart' is always 93, and 90 asks to be "
    "requeued: change the script around it",
}
_FLAGS = frozenset({"--ft-ignore-missing-cfg", "--ft-check-remaining-processes"})


def _taken(name: str) -> Option:
    to, ours, kind = _TAKEN[name]
    return Option(
        names=(name,), to=f"{name[2:].replace('-', '_')}>{to}", group="", metavar="VALUE",
        help=f"Taken as {ours}.", kind="limit" if kind == "whole" else kind,
    )  # fmt: skip


def _noted(name: str) -> Option:
    return Option(
        names=(name,), to=name[2:].replace("-", "_"), group="", metavar="VALUE",
        kind="flag" if name in _FLAGS else "text", quiet=("", "none", "null"),
        help=f"Not used: {_NOTED[name]}.", note=_NOTED[name],
    )  # fmt: skip


def _refused(name: str) -> Option:
    return Option(
        names=(name,), to=name[2:].replace("-", "_"), group="", metavar="VALUE",
        quiet=("", "none", "null"), help=f"Refused: {_REFUSED[name]}.", instead=_REFUSED[name],
    )  # fmt: skip


NVRX = (
    *(_taken(name) for name in _TAKEN),
    *(_noted(name) for name in _NOTED),
    *(_refused(name) for name in _REFUSED),
)
