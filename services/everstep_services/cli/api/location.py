"""Where the API is: as the flags say, else the settings, else what `everstep up` wrote."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from everstep.settings import Flag, Settings, read_secret
from everstep.units import size
from everstep_services.cli.api.client import Api, file_remedy, is_sendable
from everstep_services.cli.cells import counted, span
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.job_argument import FIRST_JOB
from everstep_services.cli.machine.state import StateDir, find_state_dir
from everstep_services.cli.output import say


class ClientSettings(Settings, frozen=True, kw_only=True):
    """How commands reach the API."""

    url: str | None = None
    """The address of the API, for instance http://127.0.0.1:7070; by default the API of `everstep
    up`.
    """
    token_file: Path | None = None
    """The file that holds the API token; by default the token of `everstep up`."""
    timeout_s: float = 30.0
    """How long one answer may take."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url or "http://by-default")
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"url must be http://HOST… or https://HOST…, got {self.url!r}")
        self._above_zero("timeout_s")


@dataclass(frozen=True, slots=True)
class ApiPlace:
    """One API, and who named it."""

    url: str
    token_file: Path | None
    timeout_s: float
    origin: str
    new_token: str = ""
    """The command that makes another token without asking the API, where its database is here."""
    is_local: bool = False
    """Nobody named it: it is announced in the state directory."""
    is_token_named: bool = False
    """The user or a settings file named the token's file."""

    def open(self) -> Api:
        """A client for it."""
        token = None if self.token_file is None else read_secret(self.token_file)
        if token is not None and not is_sendable(token):
            text = f"{self.token_file} holds no token: it must be one line, such as evs_…"
            raise CliError(text, Exit.USAGE)
        return self.open_as(token)

    def open_as(self, token: str | None, remedy: str = "") -> Api:
        """A client for it that uses this token; `remedy` is what helps if it is refused."""
        remedy = remedy or file_remedy(self.new_token)
        return Api(self.url, token, timeout_s=self.timeout_s, remedy=remedy)


def find_api(invocation: Invocation, *, waits: bool = True) -> ApiPlace | None:
    """The API to talk to, or None when nothing names one; one that starts is waited for."""
    settings, origin = _client_settings(invocation)
    state = find_state_dir(invocation.environ, invocation.state_dir)
    url, token_file = settings.url, settings.token_file
    is_named = token_file is not None
    new_token = ""
    is_local = url is None
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
    return ApiPlace(
        url, token_file, settings.timeout_s, origin, new_token,
        is_local=is_local, is_token_named=is_named,
    )  # fmt: skip


def _client_settings(invocation: Invocation) -> tuple[ClientSettings, str]:
    """The settings, and where the URL is from."""
    flags = [
        Flag("--api", "client.url", invocation.api),
        Flag("--token-file", "client.token_file", invocation.token_file),
        Flag("--timeout", "client.timeout_s", invocation.timeout_s),
    ]
    loaded = invocation.load({"client": ClientSettings}, flags)
    return loaded.section(ClientSettings), loaded.origins["client.url"]


def open_api(invocation: Invocation) -> Api:
    """A client for the API of a service; exit code 4 when none is known."""
    place = find_api(invocation)
    if place is None:
        raise _no_api(find_state_dir(invocation.environ, invocation.state_dir))
    return place.open()


def open_record(invocation: Invocation) -> Api:
    """A client for the API, or, when none is known, for the record on disk of the last run.

    Commands that only read use it. A line on stderr tells that the answer is from the record, how
    old the record is, and what is not in it yet.
    """
    api, notes = find_record(invocation)
    for note in notes:
        say(f"everstep: {note}")
    return api


class NothingRecordedError(CliError):
    """There is no service, and no record on disk."""


def find_record(invocation: Invocation) -> tuple[Api, list[str]]:
    """The same, and what the reader has to know about the record; nothing of a service."""
    place = _usable_api(invocation)
    if place is not None:
        return place.open(), []
    state = find_state_dir(invocation.environ, invocation.state_dir)
    from everstep_services.cli.api.record import newest_record, record_api

    path = newest_record(state.path)
    if path is None:
        raise NothingRecordedError(
            f"no job has run on {state.path} yet: {FIRST_JOB}; --api URL names a service elsewhere",
            Exit.UNREACHABLE,
        )
    api, status = record_api(path, timeout_s=_client_settings(invocation)[0].timeout_s)
    notes = [
        f"no service runs on {path.parent}: this is the record on disk, last written "
        f"{span(round(status.age_s))} ago"
    ]
    missing = [
        *([f"{counted(status.unprojected, 'fact')} of its log"] if status.unprojected else []),
        *([f"{size(status.unsent_bytes)} of facts in spools"] if status.unsent_bytes else []),
    ]
    if missing:
        notes.append(
            f"the record lacks {' and '.join(missing)}: `everstep up` on that directory adds them"
        )
    return api, notes


def _usable_api(invocation: Invocation) -> ApiPlace | None:
    """The API, unless it is one that this user may not ask, and nobody named it."""
    try:
        place = find_api(invocation)
    except CliError as error:
        if error.code is not Exit.FORBIDDEN:
            raise
        return None
    if place is None or not place.is_local or place.is_token_named or place.token_file is None:
        return place
    return place if os.access(place.token_file, os.R_OK) else None


def _no_api(state: StateDir) -> CliError:
    return CliError(
        f"no API is known: start one with `everstep up` (nothing runs on {state.path}), "
        f"or name it with --api URL or url in [client]",
        Exit.UNREACHABLE,
    )
