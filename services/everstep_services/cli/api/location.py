"""Where the API is: as the flags say, else the settings, else what `everstep up` wrote."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from everstep.settings import Flag, Settings, read_secret
from everstep_services.cli.api.client import Api
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.machine.state import find_state_dir


class ClientSettings(Settings, frozen=True, kw_only=True):
    """How commands reach the API."""

    url: str | None = None
    """Where the API is, for instance http://127.0.0.1:7070; by default that of `everstep up`."""
    token_file: Path | None = None
    """The file that holds the API token; by default that of `everstep up`."""
    timeout_s: float = 30.0
    """How long one answer may take."""

    def __post_init__(self) -> None:
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s must be above 0, got {self.timeout_s:g}")


@dataclass(frozen=True, slots=True)
class ApiPlace:
    """One API, and who named it."""

    url: str
    token_file: Path | None
    timeout_s: float
    origin: str
    new_token: str = ""
    """The command that makes another token without asking the API, where its database is here."""

    def open(self) -> Api:
        """A client for it."""
        token = None if self.token_file is None else read_secret(self.token_file)
        return Api(self.url, token, timeout_s=self.timeout_s, new_token=self.new_token)


def find_api(invocation: Invocation, *, waits: bool = True) -> ApiPlace | None:
    """The API to talk to, or None when nothing names one; one that starts is waited for."""
    flags = [
        Flag("--api", "client.url", invocation.api),
        Flag("--token-file", "client.token_file", invocation.token_file),
        Flag("--timeout", "client.timeout_s", invocation.timeout_s),
    ]
    loaded = invocation.load({"client": ClientSettings}, flags)
    settings = loaded.section(ClientSettings)
    state = find_state_dir(invocation.environ, invocation.state_dir)
    url, token_file, origin = settings.url, settings.token_file, loaded.origins["client.url"]
    new_token = ""
    if url is None:
        running = state.running_at_last() if waits else state.running()
        if running is None:
            return None
        url, origin = running.api, f"everstep up on {state.path}"
        token_file = token_file or Path(running.token_file)
        database = shlex.quote(f"sqlite:///{state.path / 'history.db'}")
        new_token = (
            f"everstep token create NAME --scope admin --database {database} "
            f"> {shlex.quote(str(token_file))}"
        )
    return ApiPlace(url, token_file, settings.timeout_s, origin, new_token)


def open_api(invocation: Invocation) -> Api:
    """A client for the API; exit code 4 when none is known."""
    place = find_api(invocation)
    if place is None:
        state = find_state_dir(invocation.environ, invocation.state_dir)
        raise CliError(
            f"no API is known: start one with `everstep up` (nothing runs on {state.path}), "
            f"or name it with --api URL or url in [client]",
            Exit.UNREACHABLE,
        )
    return place.open()
