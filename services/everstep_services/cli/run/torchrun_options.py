"""The options of torchrun, with the same names, values and PET_* variables."""

from typing import Any

from everstep_services.agent.settings import AgentSettings
from everstep_services.cli.run.options import Option

RUN, WHERE, RESTARTS, LOGS, OTHER = (
    "What to run",
    "On which nodes",
    "Restarts",
    "Logs",
    "Accepted from torchrun",
)


def _option(group: str, *names: str, help: str, pet: bool = True, **rest: Any) -> Option:
    to = next(name for name in names if name.startswith("--"))[2:].replace("-", "_")
    environment = f"PET_{to.upper()}" if pet else ""
    if "note" in rest:
        help = f"{help} Not used: {rest['note']}."
    return Option(
        names=names, group=group, to=to, help=help, environment=environment,
        from_torchrun=True, **rest,
    )  # fmt: skip


TORCHRUN = (
    _option(RUN, "-m", "--module", kind="flag",
            help="SCRIPT is a module, run as `python -m` would."),
    _option(RUN, "--no-python", kind="flag",
            help="SCRIPT is a program of any kind; it is always started cold."),
    _option(RUN, "--run-path", kind="flag",
            help="As torchrun's: run the script by its path. The same as without it."),
    _option(RUN, "--role", metavar="NAME", help="ROLE_NAME of the ranks (default)."),
    _option(WHERE, "--nnodes", metavar="N|MIN:MAX",
            help="So many nodes (1), or as many as there are within a range."),
    _option(WHERE, "--nproc-per-node", metavar="N|auto|gpu|cpu",
            help="Ranks on each node (1): a number, one for each GPU or CPU core, or `auto`: GPUs "
            "where there are any, else cores."),
    _option(WHERE, "--standalone", kind="flag",
            help="Needs nothing else: bus and services run inside this process. So it is when "
            "no bus is known and one node is asked for."),
    _option(RESTARTS, "--max-restarts", kind="limit", metavar="N|none", least=0,
            help="How many restarts the job may have in all "
            f"({AgentSettings().max_restarts}; torchrun's default is 0)."),
    _option(RESTARTS, "--shutdown-timeout", kind="seconds", metavar="SECONDS", least=0,
            help="Sets both --stop-grace and --preempt-grace, where those are not given."),
    _option(OTHER, "--signals-to-handle", metavar="NAMES",
            help="TERM, INT, HUP, QUIT, USR1 and USR2 are always handled, and no others."),
    _option(LOGS, "--log-dir", metavar="DIR",
            help="Where every line of every rank is kept (`logs` in the state directory), as "
            "JOB/round-N/rank-R/stdout and stderr."),
    _option(LOGS, "-r", "--redirects", metavar="SPEC",
            help="Streams that are only kept and not shown: 1 stdout, 2 stderr, 3 both, or for "
            "single local ranks 0:3,1:2."),
    _option(LOGS, "-t", "--tee", metavar="SPEC",
            help="Streams that are shown although -r names them."),
    _option(LOGS, "--local-ranks-filter", metavar="R,R",
            help="Show only these local ranks."),
    _option(OTHER, "--virtual-local-rank", kind="flag",
            help="LOCAL_RANK is 0 for all, and each rank sees one device."),
    _option(OTHER, "--node-rank", kind="whole", metavar="N", least=0,
            help="The same as --infra-rank."),
    _option(OTHER, "--local-addr", metavar="HOST", help="The same as --address."),
    _option(OTHER, "--rdzv-id", metavar="ID", help="The job's id, where --job is not given."),
    _option(OTHER, "--rdzv-conf", metavar="KEY=VALUE,…",
            help="`join_timeout` and `timeout` are taken as --join-timeout, `segment` as "
            "--segment; what else it says has no meaning here."),
    _option(OTHER, "--rdzv-backend", metavar="NAME", quiet=("static", "c10d"),
            help="Which rendezvous.", note="agents meet on the bus"),
    _option(OTHER, "--rdzv-endpoint", metavar="HOST:PORT", quiet=("", "localhost:0"),
            help="Where agents meet.", note="agents meet on the bus, and no node is special"),
    _option(OTHER, "--master-addr", metavar="HOST", quiet=("127.0.0.1", "localhost"),
            help="Where ranks meet.", note="ranks meet at the node that holds slot 0, "
            "whichever that is in a round"),
    _option(OTHER, "--master-port", metavar="PORT", kind="whole", least=0,
            help="The port there.", note="each round has a fresh port, so that no round meets "
            "another's leftovers"),
    _option(OTHER, "--monitor-interval", metavar="SECONDS", kind="seconds", least=0,
            help="How often to look at ranks.",
            note="the kernel says at once when a rank ends"),
    _option(OTHER, "--start-method", metavar="NAME", choices=("spawn", "fork", "forkserver"),
            quiet=("spawn",), help="How ranks are started.",
            note="see --warm and --cold"),
    _option(OTHER, "--event-log-handler", metavar="NAME", quiet=("null",),
            help="Where torchrun's events go.", note="every event is a fact in the record"),
    _option(OTHER, "--logs-specs", metavar="NAME", pet=False, help="A plugin for logs.",
            note="such plugins are part of torchrun"),
    _option(OTHER, "--duplicate-stdout-filters", metavar="TEXTS", quiet=("",),
            help="A second file with some of the lines.",
            note="every line is kept: search it there"),
    _option(OTHER, "--duplicate-stderr-filters", metavar="TEXTS", quiet=("",),
            help="A second file with some of the lines.",
            note="every line is kept: search it there"),
    _option(OTHER, "--numa-binding", metavar="MODE", pet=False,
            choices=("node", "socket", "exclusive", "core-complex"),
            help="Bind ranks to CPUs near their GPU.",
            note="ranks may use every CPU that this process may; bind them in the script, or "
            "start it through numactl with --no-python"),
)  # fmt: skip
