"""What Everstep itself says of an incident: where its time went."""

import time
from collections.abc import Mapping
from pathlib import Path

from everstep_services.cli.api.client import Api
from everstep_services.cli.errors import CliError
from everstep_services.cli.machine.state import RunningServices, StateDir

PHASES = (
    "unfinished", "detect", "evidence", "decide", "stop", "rendezvous", "start",
    "first_step", "other",
)  # fmt: skip
_LOOK_EVERY_S = 0.05


class Ledgers:
    """The incidents of one job, read from REST."""

    def __init__(self, state: Path, job: str) -> None:
        self._state = state
        self._job = job

    @staticmethod
    def wait(state: Path, within_s: float) -> RunningServices:
        """Until the services on this state directory are ready."""
        deadline = time.monotonic() + within_s
        while (running := StateDir(state).running()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"everstep up is not ready within {within_s:g} s: {state}")
            time.sleep(_LOOK_EVERY_S)
        return running

    def read(self, count: int, within_s: float = 5.0) -> list[Mapping[str, float]]:
        """Milliseconds by phase, of the incidents that are over, the oldest first."""
        deadline = time.monotonic() + within_s
        while len(found := self._closed()) < count and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)
        return found

    def _closed(self) -> list[Mapping[str, float]]:
        running = StateDir(self._state).running()
        if running is None:
            return []
        token = Path(running.token_file).read_text().strip()
        try:
            with Api(running.api, token) as api:
                found = list(api.pages(f"jobs/{self._job}/incidents", {"order": "asc"}, most=None))
        except CliError:
            return []  # history has not heard of the job yet
        return [
            {phase: 1000 * float(one["ledger"].get(f"{phase}_s", 0.0)) for phase in PHASES}
            for one in found
            if one["outcome"]
        ]
