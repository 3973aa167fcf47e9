"""The agent that a rank of another launcher has started: finds the bus, and watches.

Started by `trainer_sdk.attachment`. On that rank's stderr it says a line before it begins, and
where it tells of the job, then its limits.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from everstep.errors import EverstepError
from everstep_services.agent.attached.job_folder import sole_agent
from trainer_sdk.attachment import LOCK_AT, LOG, SAY_AT
from trainer_sdk.launchers import LaunchedRank, job_of, launched_rank


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Watch the ranks whose pages are in the folder; their command line follows it."""
    folder, place = Path(arguments[0]), launched_rank(environ)
    assert place is not None
    job = job_of(environ, place)
    try:
        with sole_agent(folder, LOCK_AT):
            _watch(folder, job, place, arguments[1:], environ)
    except ModuleNotFoundError as error:
        _say(
            f"job {job} is not watched: {error.name} is missing: pip install 'everstep[agent,cli]'"
        )
    except EverstepError as error:
        _say(f"job {job} is not watched: {error}")
    except BaseException:
        _say(f"job {job} is not watched: its agent has failed; see {folder / LOG}")
        raise
    else:
        return 0
    return 2


def _watch(
    folder: Path, job: str, place: LaunchedRank, command: Sequence[str], environ: Mapping[str, str]
) -> None:
    import asyncio

    from everstep_services.agent.attached.main import run_attached
    from everstep_services.agent.attached.rank_stderr import RankStderr
    from everstep_services.cli.attached.plan import plan_attached

    plan, settings = plan_attached(folder, job, place, command, environ)
    _say(f"job {job} is watched; its agent logs to {folder / LOG}")
    voice = RankStderr(SAY_AT)
    if not plan.tells_of_job:
        voice.give_back()
    asyncio.run(run_attached(plan, settings, voice))


def _say(text: str) -> None:
    """On the stderr of the rank."""
    with suppress(OSError):  # it has none
        os.write(SAY_AT, f"everstep: {text}\n".encode())


if __name__ == "__main__":
    os.closerange(LOCK_AT + 1, os.sysconf("SC_OPEN_MAX"))  # what the script has left open
    sys.exit(main(sys.argv[1:], os.environ))
