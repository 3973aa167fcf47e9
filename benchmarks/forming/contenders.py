"""Who forms rounds here: Everstep, and any interpreter that has another rendezvous."""

import asyncio
import json
import os
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.forming.crowd import form

US = "everstep"
_PEER = Path(__file__).with_name("peer.py")
_WITHIN_S = 120.0


class TooSlowError(Exception):
    """No round within the time that we wait for one."""


class Contender(Protocol):
    """Forms one round, with everything new."""

    @property
    def name(self) -> str: ...

    def form(self, nodes: int) -> float:
        """Seconds until the last agent knew its place."""
        ...


class Everstep:
    """Orders over NATS, from a service of its own."""

    name = US

    def form(self, nodes: int) -> float:
        return asyncio.run(form(nodes)).formed_s


@dataclass
class Peer:
    """Another rendezvous: `torch`, or `nvrx`."""

    python: Path
    who: str
    name: str = ""

    def __post_init__(self) -> None:
        """It says its version itself, and whether it runs at all."""
        self.name = self.name or self._formed(1)[0]

    def form(self, nodes: int) -> float:
        return self._formed(nodes)[1]

    def _formed(self, nodes: int) -> tuple[str, float]:
        command = [str(self.python), str(_PEER), self.who, str(nodes)]
        with tempfile.TemporaryDirectory() as folder:
            environ = {**os.environ, "TMPDIR": folder}
            program = subprocess.Popen(
                command,
                cwd=folder,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            try:
                out, errors = program.communicate(timeout=_WITHIN_S)
            except subprocess.TimeoutExpired:
                raise TooSlowError(f"not within {_WITHIN_S:g} s") from None
            finally:
                _end(program)
        if program.returncode:
            raise SystemExit(f"{self.python} {self.who}: {errors}")
        said = json.loads(out.splitlines()[-1])
        return str(said["name"]), float(said["took_s"])


def _end(program: subprocess.Popen[str]) -> None:
    try:
        os.killpg(program.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    program.wait()
