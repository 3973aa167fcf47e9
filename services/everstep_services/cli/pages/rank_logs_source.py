"""Where `everstep logs` looks: the files of this node first, and then the record."""

from pathlib import Path

from everstep_services.agent.settings import AgentSettings
from everstep_services.cli.api.location import find_api
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.machine.state import find_state_dir
from everstep_services.cli.pages.rank_logs import (
    Wanted,
    kept_lines,
    live_lines,
    past_lines,
    print_lines,
    rank_files,
)


def show(invocation: Invocation, wanted: Wanted, log_dir: Path | None, *, is_live: bool) -> None:
    """Print it. Raises what says where else to look, when it is not to be had here."""
    folder = _folder(invocation, log_dir)
    if is_live:
        if not (folder / wanted.job).is_dir():
            raise _not_here(folder, wanted)
        print_lines(invocation, wanted.job, live_lines(folder, wanted), is_live=True)
        return
    files = rank_files(folder, wanted)
    if files:
        print_lines(invocation, wanted.job, past_lines(files, wanted.last))
        return
    place = find_api(invocation)
    if place is None:
        raise _not_here(folder, wanted)
    with place.open() as api:
        print_lines(invocation, wanted.job, kept_lines(api, wanted))


def _folder(invocation: Invocation, chosen: Path | None) -> Path:
    if chosen is not None:
        return chosen.expanduser()
    settings = invocation.load({"agent": AgentSettings}).section(AgentSettings)
    state = find_state_dir(invocation.environ, invocation.state_dir)
    return settings.log_dir or state.path / "logs"


def _not_here(folder: Path, wanted: Wanted) -> CliError:
    which = "" if wanted.round is None else f" of round {wanted.round}"
    return CliError(
        f"{folder} has no such logs{which} of {wanted.job}: run this on a node of it, name the "
        f"folder with --log-dir, or the API with --api for what is kept of failed ranks",
        Exit.NOT_FOUND,
    )
