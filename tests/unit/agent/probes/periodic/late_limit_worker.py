"""The process of probes, for a test: the limit of a run ends once its probe reports its start.

Without that, a machine that is slow to start a program would use up any limit before.
"""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from everstep_services.agent.probes.runner import child
from everstep_services.agent.probes.runner.child import CheckRunner
from everstep_services.agent.probes.runner.protocol import CheckBegan, Line

STARTED = "TEST_PROBE_STARTED"
"""Names the pipe that the probe opens and closes once what it starts is there."""


class LateLimit(CheckRunner):
    """The real one; only the time of its request is moved."""

    def lines(self) -> Iterator[Line]:
        threading.Thread(target=self._end_when_started, daemon=True).start()
        return super().lines()

    def _end_when_started(self) -> None:
        Path(os.environ[STARTED]).read_bytes()
        self._request = msgspec.structs.replace(self._request, until=time.monotonic())
        self._heard.put(CheckBegan(check=self._request.names[0]))  # it reads the limit again


if __name__ == "__main__":
    setattr(child, CheckRunner.__name__, LateLimit)
    child.main()
