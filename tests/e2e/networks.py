"""Hosts with networks of their own: namespaces on one bridge, whose cables a test can pull."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HUB = "hub"
_NETWORK = 0x40000000
"""CLONE_NEWNET; Python itself has `os.setns` from 3.12 on."""
_HOSTS_MOST = 200
_BRIDGE_ADDRESS = "02:00:0a:d3:00:01"
"""A bridge without one takes the lowest of its ports': a node that knew the last one is cut off."""


class Network:
    """A bridge in a namespace of its own, which processes can enter; each node hangs on it.

    Nothing of it is seen outside. OSError if this user may not make namespaces.
    """

    address = "10.211.0.1"
    """The hub's."""

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self._nodes: list[str] = []

    def __enter__(self) -> "Network":
        self._home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._make(HUB)
            bridge = ("br0", "address", _BRIDGE_ADDRESS, "type", "bridge")
            ip("-n", self._name(HUB), "link", "add", *bridge)
            self._up(HUB, "br0", self.address)
            enter(self._path(HUB))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        _set(self._home)
        os.close(self._home)
        for name in (*self._nodes, HUB):
            if self._path(name).exists():
                ip("netns", "delete", self._name(name))

    def add(self, node: str) -> str:
        """A host on the bridge; its address."""
        self._nodes.append(node)
        port, address = self._port(node), f"10.211.0.{1 + len(self._nodes)}"
        assert len(self._nodes) < _HOSTS_MOST
        self._make(node)
        self._lay(node)
        ip("-n", self._name(HUB), "link", "set", port, "master", "br0", "up")
        self._up(node, "eth0", address)
        return address

    def _lay(self, node: str) -> None:
        """The cable from the hub's port to the host."""
        own = ("peer", "name", "eth0", "netns", self._name(node))
        ip("-n", self._name(HUB), "link", "add", self._port(node), "type", "veth", *own)

    @contextmanager
    def on(self, node: str) -> Iterator[None]:
        """What is started within runs on this host."""
        enter(self._path(node))
        try:
            yield
        finally:
            enter(self._path(HUB))

    def cut(self, node: str) -> None:
        """Pull its cable: nothing comes or goes, and no connection notices."""
        ip("-n", self._name(HUB), "link", "set", self._port(node), "down")

    def mend(self, node: str) -> None:
        ip("-n", self._name(HUB), "link", "set", self._port(node), "up")

    def ends(self, node: str) -> tuple[tuple[str, str], tuple[str, str]]:
        """Of its cable, its own and the hub's: the namespace and the device."""
        return (self._name(node), "eth0"), (self._name(HUB), self._port(node))

    def _make(self, name: str) -> None:
        ip("netns", "add", self._name(name))
        ip("-n", self._name(name), "link", "set", "lo", "up")

    def _up(self, name: str, device: str, address: str) -> None:
        ip("-n", self._name(name), "address", "add", f"{address}/24", "dev", device)
        ip("-n", self._name(name), "link", "set", device, "up")

    def _name(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _path(self, name: str) -> Path:
        return Path("/run/netns") / self._name(name)

    def _port(self, node: str) -> str:
        return f"to-{self._nodes.index(node)}"


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def enter(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _set(descriptor)
    finally:
        os.close(descriptor)


def _set(descriptor: int) -> None:
    """Move this thread, and whatever it starts from now on."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(descriptor, _NETWORK):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
