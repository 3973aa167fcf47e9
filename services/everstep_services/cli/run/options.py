"""The options of `everstep run`: those of torchrun, our own, and those of NVRx's ft_launcher."""

from dataclasses import dataclass
from typing import Any, Literal

from everstep_services.agent.settings import AgentSettings

Kind = Literal["flag", "text", "whole", "limit", "seconds"]
"""`limit` is a whole number or `none`; `seconds` may end in s, m or h."""
WORDS_FOR_NONE = frozenset({"", "none", "null"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOption:
    """One option. Its names may be written with dashes, underscores or both."""

    names: tuple[str, ...]
    """As typed, the long one last."""
    to: str
    """Under which name the plan asks for its value."""
    group: str
    """Its heading on the help page; empty for an option that is not shown there."""
    help: str
    kind: Kind = "text"
    metavar: str = ""
    least: float | None = None
    """The smallest number allowed."""
    choices: tuple[str, ...] = ()
    sets: bool = True
    """The value that a flag sets."""
    environment: str = ""
    """A variable that stands for it, as torchrun's PET_*."""
    note: str = ""
    """It is accepted and does nothing: why. Said when it is given."""
    quiet: tuple[str, ...] = ()
    """Values that ask for nothing, so that there is nothing to note."""
    instead: str = ""
    """It is refused: what takes its place."""
    from_torchrun: bool = False

    @property
    def long(self) -> str:
        """Its long name, with dashes."""
        return self.names[-1]


RUN, WHERE, RESTARTS, LOGS = "What to run", "On which nodes", "Restarts", "Logs"
PLACEMENT, STARTING, BUS, GENERAL = "Placement", "Fast restarts", "The bus", "Every command"
STALLS, OTHER = "Stalls and faults", "Accepted from torchrun"
_DEFAULTS = AgentSettings()


def _torchrun(group: str, *names: str, help: str, pet: bool = True, **rest: Any) -> RunOption:
    to = next(name for name in names if name.startswith("--"))[2:].replace("-", "_")
    environment = f"PET_{to.upper()}" if pet else ""
    if "note" in rest:
        help = f"{help} Not used: {rest['note']}."
    return RunOption(
        names=names, group=group, to=to, help=help, environment=environment,
        from_torchrun=True, **rest,
    )  # fmt: skip


TORCHRUN = (
    _torchrun(RUN, "-m", "--module", kind="flag",
            help="SCRIPT is a module, run as `python -m` would."),
    _torchrun(RUN, "--no-python", kind="flag",
            help="SCRIPT is a program of any kind; it is always started cold."),
    _torchrun(RUN, "--run-path", kind="flag",
            help="torchrun's option to run the script by its path. Not needed: that is "
            "how every script runs."),
    _torchrun(RUN, "--role", metavar="NAME", help="ROLE_NAME of the ranks (default)."),
    _torchrun(WHERE, "--nnodes", metavar="N|MIN:MAX",
            help="The number of nodes (1), or MIN:MAX: as many as are present."),
    _torchrun(WHERE, "--nproc-per-node", metavar="N|auto|gpu|cpu",
            help="Ranks on each node (1): a number, one for each GPU or CPU core, or `auto`: GPUs "
            "where there are any, else cores."),
    _torchrun(WHERE, "--standalone", kind="flag",
            help="Run bus and services inside this process: the default for one node if no "
            "bus is known."),
    _torchrun(RESTARTS, "--max-restarts", kind="limit", metavar="N|none", least=0,
            help="How many restarts the job may have in all "
            f"({_DEFAULTS.max_restarts}; torchrun's default is 0)."),
    _torchrun(RESTARTS, "--shutdown-timeout", kind="seconds", metavar="SECONDS", least=0,
            help="Sets both --stop-grace and --preempt-grace, where those are not given."),
    _torchrun(OTHER, "--signals-to-handle", metavar="NAMES",
            help="TERM, INT, HUP, QUIT, USR1 and USR2 are always handled, and no others."),
    _torchrun(LOGS, "--log-dir", metavar="DIR",
            help="Where every line of every rank is kept (`logs` in the state directory), as "
            "JOB/round-N/rank-R/stdout and stderr."),
    _torchrun(LOGS, "-r", "--redirects", metavar="SPEC",
            help="Streams that are only kept and not shown: 1 stdout, 2 stderr, 3 both, or for "
            "single local ranks 0:3,1:2."),
    _torchrun(LOGS, "-t", "--tee", metavar="SPEC",
            help="Streams that are shown although -r names them."),
    _torchrun(LOGS, "--local-ranks-filter", metavar="R,R",
            help="Show only these local ranks."),
    _torchrun(OTHER, "--virtual-local-rank", kind="flag",
            help="LOCAL_RANK is 0 for all, and each rank sees one device."),
    _torchrun(OTHER, "--node-rank", kind="whole", metavar="N", least=0,
            help="The same as --infra-rank."),
    _torchrun(OTHER, "--local-addr", metavar="HOST", help="The same as --address."),
    _torchrun(OTHER, "--rdzv-id", metavar="ID", help="The job's id, where --job is not given."),
    _torchrun(OTHER, "--rdzv-conf", metavar="KEY=VALUE,…",
            help="`join_timeout` and `timeout` are taken as --join-timeout, `segment` as "
            "--segment, `replacement_group_size` as --group-size; other keys have no meaning "
            "here."),
    _torchrun(OTHER, "--rdzv-backend", metavar="NAME", quiet=("static", "c10d"),
            help="Which rendezvous.", note="agents meet on the bus"),
    _torchrun(OTHER, "--rdzv-endpoint", metavar="HOST:PORT", quiet=("", "localhost:0"),
            help="Where agents meet.", note="agents meet on the bus, and no node is special"),
    _torchrun(OTHER, "--master-addr", metavar="HOST", quiet=("127.0.0.1", "localhost"),
            help="Where ranks meet.", note="ranks meet at the node that holds slot 0, "
            "whichever that is in a round"),
    _torchrun(OTHER, "--master-port", metavar="PORT", kind="whole", least=0,
            help="The port of that address.", note="each round has a fresh port, so that no round "
            "meets another's leftovers"),
    _torchrun(OTHER, "--monitor-interval", metavar="SECONDS", kind="seconds", least=0,
            help="How often to look at ranks.",
            note="the kernel reports the end of a rank at once"),
    _torchrun(OTHER, "--start-method", metavar="NAME", choices=("spawn", "fork", "forkserver"),
            quiet=("spawn",), help="How ranks are started.",
            note="see --warm and --cold"),
    _torchrun(OTHER, "--event-log-handler", metavar="NAME", quiet=("null",),
            help="The receiver of torchrun's events.", note="every event is a fact in the record"),
    _torchrun(OTHER, "--logs-specs", metavar="NAME", pet=False, help="A plugin for logs.",
            note="such plugins are part of torchrun"),
    _torchrun(OTHER, "--duplicate-stdout-filters", metavar="TEXTS", quiet=("",),
            help="A second file with some of the lines.",
            note="every line is kept in --log-dir, where you can search it"),
    _torchrun(OTHER, "--duplicate-stderr-filters", metavar="TEXTS", quiet=("",),
            help="A second file with some of the lines.",
            note="every line is kept in --log-dir, where you can search it"),
    _torchrun(OTHER, "--numa-binding", metavar="MODE", pet=False,
            choices=("off", "node", "socket", "exclusive", "core-complex"),
            help="Bind each rank to the CPUs of its GPU's NUMA `node` or `socket`, to an "
            "`exclusive` part of the node's cores, or to a `core-complex`, whose cores share a "
            "cache (off). Without GPUs, the NUMA nodes are spread over the ranks."),
)  # fmt: skip


def _own(group: str, *names: str, to: str = "", help: str, **rest: Any) -> RunOption:
    return RunOption(
        names=names, group=group, to=to or names[-1][2:].replace("-", "_"), help=help, **rest
    )


OWN = (
    _own(RUN, "--check", kind="flag",
            help="Print what would run, and what would be refused; start nothing."),
    _own(RUN, "--job", metavar="ID",
            help="The job's id: the same on all nodes, and again after a requeue."),
    _own(RUN, "--name", metavar="TEXT", help="The job's name for people (its id)."),
    _own(RUN, "--label", metavar="KEY=VALUE",
            help="A label, to find the job by; may be given several times."),
    _own(WHERE, "--spares", kind="whole", metavar="K", least=0,
            help="Nodes beyond --nnodes that stand by, warm, for one that is lost (0)."),
    _own(WHERE, "--unit", kind="whole", metavar="SLOTS", least=1,
            help="With MIN:MAX, grow and shrink by this number of nodes at once (1)."),
    _own(WHERE, "--join-timeout", to="join_within_s", kind="seconds", metavar="SECONDS",
            least=0.001,
            help="How long a round may take to form before the job gives up, with code 92."),
    _own(RESTARTS, "--max-restarts-per-hour", kind="limit", metavar="N|none", least=0,
            help="How many restarts within an hour (none)."),
    _own(RESTARTS, "--no-progress-limit", kind="limit", metavar="N|none", least=1,
            help=f"Rounds in a row without a new step ({_DEFAULTS.no_progress_limit}: advice); "
            "given, it stops the job."),
    _own(RESTARTS, "--stop-on-repeat", kind="flag",
            help="Stop the job, with code 93, when it fails twice in the same way, or "
            "makes no new step in as many rounds as --no-progress-limit allows; "
            "without this option, Everstep only advises it."),
    _own(RESTARTS, "--allow-fresh-start", kind="flag",
            help="Let a script that saves with `trainer_sdk.checkpoint` begin from scratch where "
            "none of its checkpoints can be used; else that ends the round."),
    _own(RESTARTS, "--local-root", metavar="DIR",
            help="A folder on a disk of each node, where states are kept instead of in memory, and "
            "outlive a reboot."),
    _own(RESTARTS, "--stop-grace", to="stop_grace_s", kind="seconds", metavar="SECONDS",
            least=0, help="From SIGTERM to SIGKILL for ranks of a broken round "
            f"({_DEFAULTS.stop_grace_s:g})."),
    _own(RESTARTS, "--preempt-grace", to="preempt_grace_s", kind="seconds",
            metavar="SECONDS", least=0,
            help="From SIGTERM, SIGUSR1 or SIGUSR2 to this process, passed on to the ranks, to "
            f"SIGKILL: time to save ({_DEFAULTS.preempt_grace_s:g})."),
    _own(STALLS, "--network-test", metavar="WHEN", choices=("off", "first", "failures"),
            help="Measure the network between the nodes, in pairs and as ranks use it, before the "
            "`first` round, or also after `failures` that are not those of the program (off). A "
            "node that is slow with each partner leaves the job if others can have its slot."),
    _own(STALLS, "--limit", metavar="NAME=SECONDS",
            help="How long a rank may be in a section, or in `first-step`, `step` (from one to the "
            "next), `heartbeat` (likewise) or `outside` (of all sections), from the script's "
            "first line on; may be given several times. Else it is learned."),
    _own(STALLS, "--warmup-steps", metavar="N", kind="whole", least=1,
            help="The number of first steps of a round that may take as long as "
            "`first-step` (the number that the script gives, otherwise 1)."),
    _own(STALLS, "--no-restart-on-stall", to="restart_on_stall", kind="flag", sets=False,
            help="Only record that a rank has stalled."),
    _own(STALLS, "--allow-injection", kind="flag",
            help="Let `everstep inject` and the script make faults on purpose, to test."),
    _own(STARTING, "--warm", kind="flag",
            help="Fork ranks from a process that has imported torch (the default)."),
    _own(STARTING, "--cold", to="warm", kind="flag", sets=False,
            help="Start a new interpreter for each rank."),
    _own(STARTING, "--leave-children", kind="flag",
            help="Let processes that ranks have started outlive a finished job."),
    _own(STARTING, "--preload", metavar="MODULES",
            help="What the process of --warm also imports: `auto` (what the script "
            "imports), `none`, or modules with commas."),
    _own(STARTING, "--as-nvrx", kind="flag",
            help="In ranks, `import nvidia_resiliency_ext` finds Everstep's modules, unless NVRx "
            "is installed."),
    _own(STARTING, "--replace-nvrx", kind="flag",
            help="Like --as-nvrx, and also if NVRx is installed."),
    _own(LOGS, "--console", metavar="all|none|R,R",
            help="Whose output is shown here (all): global ranks, 0-3 for several."),
    _own(LOGS, "--no-prefix", to="prefix", kind="flag", sets=False,
            help="Show lines as they are, without `node:rank| `."),
    _own(LOGS, "--store-logs", kind="flag",
            help="Send the output to the log store, too: `everstep logs` then has all of it on any "
            "machine."),
    _own(PLACEMENT, "--node-id", metavar="ID",
            help="This node's id (Slurm's name for it, else the host name)."),
    _own(PLACEMENT, "--infra-rank", kind="whole", metavar="N", least=0,
            help="This node's place among the nodes. Else GROUP_RANK, NODE_RANK, "
            "CROSS_SLURM_PROCID, Slurm's block topology, SLURM_PROCID, SLURM_NODEID or "
            "JOB_COMPLETION_INDEX say it."),
    _own(PLACEMENT, "--address", metavar="HOST",
            help="Where other nodes reach this one (the address that reaches the bus)."),
    _own(PLACEMENT, "--domain", metavar="NAME",
            help="This node's failure domain: its rack, its power unit."),
    _own(PLACEMENT, "--topology", metavar="A/B",
            help="This node's place in the network, outermost first."),
    _own(PLACEMENT, "--segment", kind="whole", metavar="SLOTS", least=1,
            help="The number of slots, next to each other, in one network domain (1)."),
    _own(PLACEMENT, "--group-size", kind="whole", metavar="NODES", least=1,
            help="Nodes are replaced in groups of this number: the rest of a group leaves with a "
            "lost node (1)."),
    _own(PLACEMENT, "--group", metavar="NAME",
            help="This node's replacement group, or @nvlink or @array (its --domain, else its "
            "--topology)."),
    _own(PLACEMENT, "--allocation", metavar="ID",
            help="This start of the job, the same on all nodes (from SLURM_JOB_ID, else random)."),
    _own(BUS, "--bus-url", metavar="URL", help="Where the bus is: nats://, or tls://."),
    _own(BUS, "--bus-user", metavar="NAME", help="The user to log in as."),
    _own(BUS, "--bus-password-file", metavar="FILE", help="The file with the password."),
    _own(BUS, "--bus-credentials-file", metavar="FILE", help="A NATS .creds file instead."),
    _own(GENERAL, "--config", metavar="FILE", help="Read this settings file only."),
    _own(GENERAL, "-o", "--output", metavar="FORMAT",
            choices=("table", "json", "jsonl", "name"), help="How --check prints."),
    _own(GENERAL, "--no-color", to="color", kind="flag", sets=False,
            help="No colour, also on a terminal."),
    _own(GENERAL, "--state-dir", metavar="DIR",
            help="Where `everstep up` keeps its data, and the logs of ranks are."),
    _own(GENERAL, "-h", "--help", kind="flag", help="Show this page."),
)  # fmt: skip


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
    "--ft-num-warmup-iterations": ("warmup_steps", "--warmup-steps", "whole"),
    "--ft-node-health-check-endpoint": ("daemon", "the setting daemon of [checks]", "text"),
    "--ft-numa-bind-strict": ("numa_strict", "--numa-binding that must hold", "text"),
}
"""Options that have a counterpart: its name in the plan, as typed, and what a value is."""

_DETECTION = "limits are learned from the training itself"
_LOGS = "every line of every rank is kept by --log-dir, and the console shows it"
_ATTRIBUTION = {
    "endpoint": "every incident is judged by the service attribution, over the bus: `everstep why`",
    "startup-timeout": "no job waits for attribution, which judges once it is there",
    "llm-api-key-file": "set key_file in [attribution.explainer] of the services",
    "llm-base-url": "set url in [attribution.explainer] of the services",
    "llm-model": "set model in [attribution.explainer] of the services",
    "analysis-backend": "all analyzers judge together; `everstep why JOB` names those that did",
    "log-level": "set level in [log] of the services",
    "export-url": "set [notify.webhook] of the services, which posts incidents with verdicts",
}
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
            "--ft-node-health-check-interval",
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
    **{f"--ft-attribution-{name}": note for name, note in _ATTRIBUTION.items()},
    "--ft-rank-termination-signal": "a stalled rank gets SIGTERM, then SIGKILL: --stop-grace",
    "--ft-log-level": "set level in [log]",
    "--ft-restart-policy": "any failed rank ends the round, as with its only value",
    "--ft-rdzv-impl": "agents meet on the bus",
    "--ft-check-remaining-processes": "no process outlives its round",
    "--ft-install-exception-hook": "every exception is recorded, without a hook of yours",
    "--ft-min-progress-iterations": "any new step is progress",
    "--ft-checkpoint-iteration-file": "steps are counted inside the ranks",
    **dict.fromkeys(
        ["--ft-cycle-info-dir", "--ft-cycle-info-job-id"],
        "rounds are in the record: `everstep facts`",
    ),
    "--ft-segment-health-check-dir": _HEALTH,
}  # fmt: skip
_REFUSED = {
    "--ft-no-restart-exit-code": "the code for 'do not restart' is always 93, and 90 asks to be "
    "requeued: change the script around it"
}
_FLAGS = frozenset({"--ft-check-remaining-processes"})
_FILE = (
    RunOption(
        names=("--ft-cfg-path",),
        to="ft_cfg_path",
        group="",
        metavar="FILE",
        help="A YAML file of NVRx's launcher: each key under `fault_tolerance:` is taken as its "
        "option below would be.",
    ),
    RunOption(
        names=("--ft-ignore-missing-cfg",),
        to="ft_ignore_missing_cfg",
        group="",
        kind="flag",
        help="The file of --ft-cfg-path may lack the section `fault_tolerance:`.",
    ),
)


def _taken(name: str) -> RunOption:
    to, ours, kind = _TAKEN[name]
    return RunOption(
        names=(name,), to=f"{name[2:].replace('-', '_')}>{to}", group="", metavar="VALUE",
        help=f"Taken as {ours}.", kind="limit" if kind == "whole" else kind,
    )  # fmt: skip


def _noted(name: str) -> RunOption:
    return RunOption(
        names=(name,), to=name[2:].replace("-", "_"), group="", metavar="VALUE",
        kind="flag" if name in _FLAGS else "text", quiet=("", "none", "null"),
        help=f"Not used: {_NOTED[name]}.", note=_NOTED[name],
    )  # fmt: skip


def _refused(name: str) -> RunOption:
    return RunOption(
        names=(name,), to=name[2:].replace("-", "_"), group="", metavar="VALUE",
        quiet=("", "none", "null", "93"), help=f"Refused: {_REFUSED[name]}.",
        instead=_REFUSED[name],
    )  # fmt: skip


NVRX = (
    *_FILE,
    *(_taken(name) for name in _TAKEN),
    *(_noted(name) for name in _NOTED),
    *(_refused(name) for name in _REFUSED),
)


OPTIONS: tuple[RunOption, ...] = (*TORCHRUN, *OWN, *NVRX)
