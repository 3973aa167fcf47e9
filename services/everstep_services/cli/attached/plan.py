"""The plan of an agent in attach mode: what it watches, and on which bus."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from everstep.bus import BusSettings
from everstep.errors import EverstepError
from everstep.messages import JobSpec
from everstep.observe.logs import configure
from everstep.observe.redaction import redact_words
from everstep.observe.settings import LogSettings, ObserveSettings
from everstep.settings import DEFAULT, Loaded, Settings
from everstep_services.agent.attached.attached_plan import AttachedPlan
from everstep_services.agent.probes.settings import ChecksSettings
from everstep_services.agent.ranks.device_memory import has_devices
from everstep_services.agent.settings import AgentSettings
from everstep_services.agent.stalls.limits_table import external_limits
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.machine.state import StateDir, find_state_dir
from everstep_services.cli.run import environment
from everstep_services.cli.run.arguments import Given
from everstep_services.cli.run.fingerprint import fingerprint
from everstep_services.cli.run.limit_rules import limits_of
from everstep_services.cli.run.safe_names import node_id
from everstep_services.cli.stack.admission import agent_login
from trainer_sdk.launchers import LaunchedRank

_SECTIONS: dict[str, type[Settings]] = {
    "agent": AgentSettings,
    "bus": BusSettings,
    "checks": ChecksSettings,
    "log": LogSettings,
    "observe": ObserveSettings,
}


class NoBusError(EverstepError):
    """Neither settings nor a running `everstep up` name a bus."""

    def __init__(self) -> None:
        super().__init__(
            "no bus is known: set EVERSTEP_BUS__URL or [bus] in everstep.toml, or start "
            "`everstep up` on this machine; EVERSTEP_ATTACH=off does not look for one"
        )


def plan_attached(
    folder: Path, job: str, place: LaunchedRank, command: Sequence[str], environ: Mapping[str, str]
) -> tuple[AttachedPlan, BusSettings]:
    """The plan, and how to log in. Raises one-line errors."""
    loaded = Invocation(environ=environ).load(_SECTIONS)
    configure(loaded.section(LogSettings), "attached", environ=environ)
    state = find_state_dir(environ, None)
    bus = _bus(loaded, state, job)
    agent = loaded.section(AgentSettings)
    scheduler = environment.scheduler_of(environ)
    port = environ.get("MASTER_PORT", "")
    plan = AttachedPlan(
        job=job,
        node=agent.node_id or node_id(environ),
        folder=folder,
        place=place,
        spec=_spec(job, place, redact_words(command), environ),
        allocation=environment.allocation_id(scheduler),
        scheduler=scheduler,
        address=agent.address or environment.address_towards(bus.url),
        master=(environ.get("MASTER_ADDR", ""), int(port) if port.isdecimal() else 0),
        user=environ.get("USER", ""),
        state_dir=state.path,
        agent=agent,
        checks=loaded.section(ChecksSettings),
        traces_url=loaded.section(ObserveSettings).traces_url,
        environ=environ,
        limits=limits_of(Given(), agent),
        others=external_limits(
            environ,
            preempt_grace_s=None,
            scheduler_grace_s=agent.scheduler_grace_s,
            has_nccl=has_devices(),
            limited_by="EVERSTEP_AGENT__LIMITS=",
        ),
    )
    return plan, bus


def _bus(loaded: Loaded, state: StateDir, job: str) -> BusSettings:
    """The bus that the settings name, else that of a running `everstep up`."""
    if any(origin != DEFAULT for key, origin in loaded.origins.items() if key.startswith("bus.")):
        return loaded.section(BusSettings)
    running = state.running_at_last()
    if running is None or running.command != "up":
        raise NoBusError
    return agent_login(state, running, job)


def _spec(
    job: str, place: LaunchedRank, command: tuple[str, ...], environ: Mapping[str, str]
) -> JobSpec:
    local_size = place.local_size or 1
    nodes = max(1, place.world_size // local_size)
    return JobSpec(
        name=job,
        labels={"launcher": place.launcher},
        command=command,
        config_fingerprint=fingerprint(command, [place.launcher, str(place.world_size)], environ),
        nodes_min=nodes,
        nodes_max=nodes,
        ranks_per_node=local_size,
        max_restarts=place.max_restarts,
    )
