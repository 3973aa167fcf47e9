"""The handler that torchrun loads by the entry point `everstep` of `torchrun.handlers`.

A round of torchrun is one of Everstep's: rendezvous assigns the slots, and ends the round on all
nodes when one of them fails or is lost. What torchrun does itself stays: it starts, watches and
restarts the ranks.
"""

import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from everstep.bus.errors import BusError
from everstep.bus.settings import BusSettings
from everstep.ids import new_id
from everstep.messages import JobSpec
from everstep.settings import Flag, Settings, config_files, load
from everstep_services.agent.settings import AgentSettings
from everstep_services.agent.stalls.limits import BY_SETTING, LimitRules, read_limits
from everstep_services.agent.torchrun.member import JobOverError, NodeIdentity, RendezvousMember
from trainer_sdk.attachment import folder_for
from trainer_sdk.launchers import LaunchedRank

BACKEND = "everstep"
_JOIN_WITHIN_S = 600.0
_LONGEST_S = 1e9
_OPTIONS = ("join_timeout", "node_id")
_OPTIONS_OF_TORCHRUN = frozenset({"rank", "timeout"})  # it passes them to every backend
_STOP_WITHIN_S = 30.0
_STORE_WITHIN_S = 300.0
_DONE, _FAILED = 0, 1
_TORCHRUN = ("torchrun", "torch/distributed/run.py", "torch/distributed/launch.py")
"""Its programs, by the ends of their paths; the last is the older one, with the same options."""


class EverstepRendezvous(RendezvousHandler):
    """Rounds of Everstep for torchrun."""

    def __init__(
        self, member: RendezvousMember, run_id: str, address: str, join_within_s: float
    ) -> None:
        self._member = member
        self._run_id = run_id
        self._address = address
        self._join_within_s = join_within_s
        self._store: TCPStore | None = None
        self._has_begun = self._is_closed = False

    def get_backend(self) -> str:
        """The name of this backend."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Ranks use the store of slot 0's torchrun, whose port rendezvous has named."""
        return True

    def get_run_id(self) -> str:
        """The id of the job."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round; a call during a round means that its ranks have failed."""
        if self._is_closed:
            raise RendezvousClosedError
        if self._has_begun:
            self._member.end_round("torchrun starts its ranks again", _STOP_WITHIN_S)
        self._store = None  # its port is that of the former round
        try:
            order = self._member.next_round(_free_port, self._join_within_s)
        except JobOverError as error:
            self._is_closed = True
            sys.stderr.write(f"everstep: {error}\n")
            raise RendezvousClosedError from error
        except TimeoutError as error:
            raise RendezvousTimeoutError(
                f"no round has formed within {self._join_within_s:g} s: too few nodes have joined"
            ) from error
        self._has_begun = True
        self._store = TCPStore(
            order.master_address,
            order.master_port,
            is_master=order.slot == 0,
            timeout=timedelta(seconds=_STORE_WITHIN_S),
            wait_for_workers=False,
            multi_tenant=True,
        )
        self._member.report("started", "torchrun starts its ranks")
        store = PrefixStore(f"everstep/{self._run_id}/{order.round}", self._store)
        bootstrap = RendezvousStoreInfo(order.master_address, order.master_port)
        return RendezvousInfo(store, order.slot, order.slots, bootstrap)

    def is_closed(self) -> bool:
        """Whether the job is over."""
        return self._is_closed or self._member.leaves is not None

    def set_closed(self) -> None:
        """Form no more rounds."""
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        """More than 0 if torchrun must stop its ranks and come to the next round."""
        return int(self._has_begun and self._member.round_is_over)

    def shutdown(self) -> bool:
        """Report how the job has ended on this node, and leave. Torchrun calls it at its end."""
        if not self._is_closed:
            self._is_closed = True
            error = sys.exc_info()[1]
            if error is None:
                self._member.report("finished", "all ranks have exited with 0")
            else:
                self._member.end_round(f"torchrun gives up: {error}"[:500], _STOP_WITHIN_S)
        code = _DONE if sys.exc_info()[1] is None else _FAILED
        self._member.leave("done" if code == _DONE else "failed", "torchrun has ended", code)
        return True


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """The handler for torchrun's options; `--rdzv-endpoint` may name the bus."""
    within_s = _join_within_s(parameters)
    flags = []
    if parameters.endpoint:
        scheme = "" if "://" in parameters.endpoint else "nats://"
        flags = [Flag("--rdzv-endpoint", "bus.url", f"{scheme}{parameters.endpoint}")]
    environ = os.environ  # noqa: TID251 - torchrun has no settings file of ours
    sections: dict[str, type[Settings]] = {"bus": BusSettings, "agent": AgentSettings}
    loaded = load(sections, files=config_files(environ), environ=environ, flags=flags)
    settings = loaded.section(BusSettings)
    address = parameters.local_addr or _address_towards(settings.url)
    node = parameters.get("node_id") or environ.get("SLURMD_NODENAME") or socket.gethostname()
    job, ranks = _safe(parameters.run_id), _local_world_size()
    # Ranks attach to this process, as members of this job.
    environ.setdefault("EVERSTEP_JOB", job)
    identity = NodeIdentity(
        job=job,
        node=_safe(node),
        instance=new_id()[12:24],
        address=address,
        spec=_spec(parameters, ranks),
        allocation=f"torchrun-{job}",
        place=LaunchedRank("torchrun", 0, 0, ranks, ranks, 0, 0, 0),
        folder=Path(folder_for(environ, environ["EVERSTEP_JOB"])),
        limits=_limits(loaded.section(AgentSettings)),
    )
    try:
        member = RendezvousMember(identity, settings)
    except BusError as error:
        raise RendezvousConnectionError(str(error)) from error
    return EverstepRendezvous(member, parameters.run_id, address, within_s)


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The entry point: returns the function that makes handlers."""
    return create_handler


def _join_within_s(parameters: RendezvousParameters) -> float:
    """The `join_timeout`; options of `--rdzv-conf` that are not used are named on stderr."""
    unused = sorted(set(parameters.config).difference(_OPTIONS, _OPTIONS_OF_TORCHRUN))
    if unused:
        options = " and ".join(_OPTIONS)
        sys.stderr.write(
            f"everstep: --rdzv-conf {', '.join(unused)}: not used here; there is {options}\n"
        )
    given = parameters.get("join_timeout", _JOIN_WITHIN_S)
    try:
        within_s = float(given)
    except ValueError:
        within_s = 0.0
    if not 0 < within_s < _LONGEST_S:
        raise ValueError(f"--rdzv-conf join_timeout={given}: write seconds, above 0")
    return within_s


def _spec(parameters: RendezvousParameters, ranks: int) -> JobSpec:
    return JobSpec(
        name=parameters.run_id,
        labels={"launcher": "torchrun"},
        command=("torchrun",),
        config_fingerprint="",
        nodes_min=parameters.min_nodes,
        nodes_max=parameters.max_nodes,
        ranks_per_node=ranks,
        max_restarts=None,
        launcher="torchrun",
        launcher_restarts=restart_limit(),
    )


def _limits(agent: AgentSettings) -> LimitRules:
    """The limits before anything is learned, and those of `[agent] limits`."""
    configured = read_limits(agent.limits, BY_SETTING)
    origins = dict.fromkeys(configured, BY_SETTING)
    return LimitRules(agent, agent.warmup_steps, configured, origins)


def _local_world_size() -> int:
    """The ranks of this node by torchrun's own command line; 1 if it was called otherwise."""
    from torch.distributed.run import determine_local_world_size

    given = _torchrun_options()
    try:
        return 1 if given is None else int(determine_local_world_size(given.nproc_per_node))
    except (ValueError, TypeError):
        return 1


def restart_limit() -> int | None:
    """The limit by torchrun's own command line or `PET_MAX_RESTARTS`; None if it is not known."""
    given = _torchrun_options()
    try:
        return None if given is None else int(given.max_restarts)
    except (ValueError, TypeError):
        return None


def _torchrun_options() -> Any:
    from torch.distributed.run import get_args_parser

    if not any(Path(sys.argv[0]).match(program) for program in _TORCHRUN):
        return None
    try:
        return get_args_parser().parse_known_args(sys.argv[1:])[0]
    except (SystemExit, ValueError, TypeError):
        return None


def _address_towards(url: str) -> str:
    """The address by which other nodes reach this host; the host name if it is not known."""
    bus = urlsplit(url.partition(",")[0])
    try:
        kind = socket.SOCK_DGRAM  # no packet is sent
        family, *_, place = socket.getaddrinfo(bus.hostname, bus.port or 4222, type=kind)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return socket.gethostname()


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("", 0))
        return int(opened.getsockname()[1])


def _safe(name: str) -> str:
    """The name with nothing that a subject must not have."""
    return "".join(each if each.isalnum() or each in "-_" else "-" for each in name)[:64] or "job"
