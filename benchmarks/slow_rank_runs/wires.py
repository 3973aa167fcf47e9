"""Hosts with networks of their own, whose links can be slowed."""

import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from benchmarks.slow_rank_runs.relay import RelayedNetwork
from tests.e2e.networks import Network

DEVICE = "eth0"
"""Of each host."""
_DELAY_S = 0.01
_RATE = ("rate", "40mbit", "burst", "64kb", "latency", "200ms")


class Wiring:
    """A network from entering to leaving; a process that enters it is on its hub."""

    def __init__(self, folder: Path, *, is_relayed: bool) -> None:
        self._network: Network | RelayedNetwork
        self._network = RelayedNetwork(folder) if is_relayed else Network(folder.name)
        self.address = self._network.address

    def __enter__(self) -> "Wiring":
        try:
            self._network.__enter__()
        except OSError as error:
            raise SystemExit(f"no namespace can be made here ({error}): run as root") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._network.__exit__()

    def host(self, node: str) -> str:
        return self._network.add(node)

    def on(self, node: str) -> AbstractContextManager[None]:
        return self._network.on(node)

    @contextmanager
    def slowed(self, node: str) -> Iterator[None]:
        """Both ways of its link are."""
        if isinstance(self._network, RelayedNetwork):
            with self._network.delayed(node, _DELAY_S):
                yield
            return
        ends = self._network.ends(node)
        for end in ends:
            _tc(*end, "add", *("root", "tbf", *_RATE))
        try:
            yield
        finally:
            for end in ends:
                _tc(*end, "delete", "root")


def _tc(namespace: str, device: str, verb: str, *rest: str) -> None:
    command = ["tc", "-n", namespace, "qdisc", verb, "dev", device, *rest]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
