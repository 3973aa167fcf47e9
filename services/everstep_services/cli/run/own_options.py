"""The options that torchrun does not have."""

from typing import Any

from everstep_services.agent.settings import AgentSettings
from everstep_services.cli.run.options import Option
from everstep_services.cli.run.torchrun_options import LOGS, RESTARTS, RUN, WHERE

PLACEMENT, STARTING, BUS, GENERAL = "Placement", "Fast restarts", "The bus", "Every command"
STALLS = "Stalls and faults"
_BY_DEFAULT = AgentSettings()


def _option(group: str, *names: str, to: str = "", help: str, **rest: Any) -> Option:
    return Option(
        names=names, group=group, to=to or names[-1][2:].replace("-", "_"), help=help, **rest
    )


OWN = (
    _option(RUN, "--check", kind="flag",
            help="Print what would run, and what would be refused; start nothing."),
    _option(RUN, "--job", metavar="ID",
            help="The job's id: the same on all nodes, and again after a requeue."),
    _option(RUN, "--name", metavar="TEXT", help="What people call it (its id)."),
    _option(RUN, "--label", metavar="KEY=VALUE",
            help="For finding the job again; may be given several times."),
    _option(WHERE, "--spares", kind="whole", metavar="K", least=0,
            help="Nodes beyond --nnodes that stand by, warm, for one that is lost (0)."),
    _option(WHERE, "--unit", kind="whole", metavar="SLOTS", least=1,
            help="With MIN:MAX, grow and shrink by so many nodes at once (1)."),
    _option(WHERE, "--join-timeout", to="join_within_s", kind="seconds", metavar="SECONDS",
            least=0.001,
            help="How long a round may take to form before the job gives up, with code 92."),
    _option(RESTARTS, "--max-restarts-per-hour", kind="limit", metavar="N|none", least=0,
            help="How many of them within an hour (none)."),
    _option(RESTARTS, "--no-progress-limit", kind="limit", metavar="N|none", least=1,
            help=f"Rounds in a row without a new step ({_BY_DEFAULT.no_progress_limit}: advice); "
            "given, it stops the job."),
    _option(RESTARTS, "--stop-on-repeat", kind="flag",
            help="Stop, with code 93, when it fails twice in the same way, or makes no new step "
            "for as many rounds as --no-progress-limit says; else that is only advised."),
    _option(RESTARTS, "--allow-fresh-start", kind="flag",
            help="Let a script that saves with `trainer_sdk.checkpoint` begin from scratch where "
            "none of its checkpoints can be used; else that ends the round."),
    _option(RESTARTS, "--local-root", metavar="DIR",
            help="A folder on a disk of each node, where states are kept instead of in memory, and "
            "outlive a reboot."),
    _option(RESTARTS, "--stop-grace", to="stop_grace_s", kind="seconds", metavar="SECONDS",
            least=0, help="From SIGTERM to SIGKILL for ranks of a broken round "
            f"({_BY_DEFAULT.stop_grace_s:g})."),
    _option(RESTARTS, "--preempt-grace", to="preempt_grace_s", kind="seconds",
            metavar="SECONDS", least=0,
            help="From SIGTERM, SIGUSR1 or SIGUSR2 to this process, passed on to the ranks, to "
            f"SIGKILL: time to save ({_BY_DEFAULT.preempt_grace_s:g})."),
    _option(STALLS, "--limit", metavar="NAME=SECONDS",
            help="How long a rank may be in a section, or in `first-step`, `step` (from one to the "
            "next), `heartbeat` (likewise) or `outside` (of all sections), from the script's "
            "first line on; may be given several times. Else it is learned."),
    _option(STALLS, "--warmup-steps", metavar="N", kind="whole", least=1,
            help="So many first steps of a round may take as long as `first-step` (what the "
            "script says, else 1)."),
    _option(STALLS, "--no-restart-on-stall", to="restart_on_stall", kind="flag", sets=False,
            help="Only say that a rank has stalled."),
    _option(STALLS, "--allow-injection", kind="flag",
            help="Let `everstep inject` and the script make faults on purpose, to test."),
    _option(STARTING, "--warm", kind="flag",
            help="Fork ranks from a process that has imported torch (the default)."),
    _option(STARTING, "--cold", to="warm", kind="flag", sets=False,
            help="Start a new interpreter for each rank."),
    _option(STARTING, "--leave-children", kind="flag",
            help="What ranks have started may outlive a job that is done; else it is killed."),
    _option(STARTING, "--preload", metavar="MODULES",
            help="What that process imports besides: `auto` (what the script imports), `none`, "
            "or modules with commas."),
    _option(LOGS, "--console", metavar="all|none|R,R",
            help="Whose output is shown here (all): global ranks, 0-3 for several."),
    _option(LOGS, "--no-prefix", to="prefix", kind="flag", sets=False,
            help="Show lines as they are, without `node:rank| `."),
    _option(PLACEMENT, "--node-id", metavar="ID",
            help="This node's id (Slurm's name for it, else the host name)."),
    _option(PLACEMENT, "--infra-rank", kind="whole", metavar="N", least=0,
            help="This node's place among the nodes. Else GROUP_RANK, NODE_RANK, SLURM_PROCID, "
            "SLURM_NODEID or JOB_COMPLETION_INDEX say it."),
    _option(PLACEMENT, "--address", metavar="HOST",
            help="Where other nodes reach this one (the address that reaches the bus)."),
    _option(PLACEMENT, "--domain", metavar="NAME",
            help="What fails together with this node: a rack, a power unit."),
    _option(PLACEMENT, "--topology", metavar="A/B",
            help="Where it sits in the network, outermost first."),
    _option(PLACEMENT, "--segment", kind="whole", metavar="SLOTS", least=1,
            help="So many slots, next to each other, in one network domain (1)."),
    _option(PLACEMENT, "--allocation", metavar="ID",
            help="This start of the job, the same on all nodes (from SLURM_JOB_ID, else random)."),
    _option(BUS, "--bus-url", metavar="URL", help="Where the bus is: nats://, or tls://."),
    _option(BUS, "--bus-user", metavar="NAME", help="Whom to log in as."),
    _option(BUS, "--bus-password-file", metavar="FILE", help="The file with the password."),
    _option(BUS, "--bus-credentials-file", metavar="FILE", help="A NATS .creds file instead."),
    _option(GENERAL, "--config", metavar="FILE", help="Read this settings file only."),
    _option(GENERAL, "-o", "--output", metavar="FORMAT",
            choices=("table", "json", "jsonl", "name"), help="How --check prints."),
    _option(GENERAL, "--no-color", to="color", kind="flag", sets=False,
            help="No colour, also on a terminal."),
    _option(GENERAL, "--state-dir", metavar="DIR",
            help="Where `everstep up` keeps its data, and the logs of ranks are."),
    _option(GENERAL, "-h", "--help", kind="flag", help="Show this page."),
)  # fmt: skip
