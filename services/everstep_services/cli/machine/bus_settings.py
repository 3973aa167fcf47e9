"""Which bus a command talks to: the one in the settings, else that of a running `everstep up`."""

from everstep.bus import BusSettings
from everstep.bus.auth.accounts import Operator
from everstep.bus.auth.job_access import login_file
from everstep.bus.auth.roles import ADMIN, SERVICE
from everstep.bus.client import NatsBus
from everstep.settings import DEFAULT
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.machine.state import find_state_dir
from everstep_services.cli.stack.admission import agent_login


def find_bus(invocation: Invocation) -> BusSettings:
    """How to log in, as `admin` where the bus belongs to `everstep up`."""
    return named_bus(invocation) or BusSettings()


def service_bus(invocation: Invocation) -> BusSettings:
    """How a process logs in, as `service` where the bus belongs to `everstep up`."""
    settings = named_bus(invocation, SERVICE)
    if settings is None:
        state = find_state_dir(invocation.environ, invocation.state_dir)
        raise CliError(
            f"no bus is known: `everstep up` is not running on {state.path}, and no settings name "
            f"another",
            Exit.UNREACHABLE,
        )
    return settings


def agents_bus(invocation: Invocation, job: str) -> BusSettings:
    """How the agents of a job log in to the bus of `everstep up`."""
    state = find_state_dir(invocation.environ, invocation.state_dir)
    running = state.running_at_last()
    if running is None:
        raise CliError(
            f"`everstep up` is not running on {state.path}: where the bus is another one, "
            f"`everstep bus login {job}` makes a login",
            Exit.UNREACHABLE,
        )
    return agent_login(state, running, job)


def named_bus(invocation: Invocation, role: str = ADMIN) -> BusSettings | None:
    """Where the bus is and how to log in there; None when nobody has said where one is."""
    loaded = invocation.load({"bus": BusSettings})
    if set(loaded.origins.values()) != {DEFAULT}:
        return loaded.section(BusSettings)
    state = find_state_dir(invocation.environ, invocation.state_dir)
    running = state.running_at_last()
    if running is None:
        return None
    folder = state.path / "nats"
    login = login_file(folder, Operator.opened(folder), role)
    return BusSettings(url=running.bus, credentials_file=login)


def server_version(bus: NatsBus) -> str:
    """Of the server that we are connected to."""
    version = bus.jetstream.connection.client.connected_server_version
    return f"{version.major}.{version.minor}.{version.patch}"
