"""Cables that can be long: a process takes each packet from one end, and gives it to the other.

What `tc netem` does where the kernel has it. Both ends are TAP devices, so that packets have the
size of the link and sums of their own. Arguments: the file that says how many seconds a packet
takes (empty for none), and of each end the namespace and the device.
"""

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.e2e.networks import Network, enter, ip
from tests.waiting import until

_SET_DEVICE = 0x400454CA
"""TUNSETIFF."""
_TAP_ONLY_FRAMES = 0x0002 | 0x1000
_MOST_BYTES = 65_536
_MOST_WAITING = 4096
"""Packets: what comes beyond is lost, as it is anywhere."""
_LOOKS_EVERY_S = 0.05


class RelayedNetwork(Network):
    """A network each of whose cables is such a process."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder.name)
        self._folder = folder
        self._relays: list[subprocess.Popen[bytes]] = []

    def __exit__(self, *failure: object) -> None:
        for relay in self._relays:
            relay.kill()
            relay.wait()
        super().__exit__(*failure)

    @contextmanager
    def delayed(self, node: str, seconds: float) -> Iterator[None]:
        """How much longer each packet from and to it takes."""
        self._delay(node).write_text(str(seconds))
        try:
            yield
        finally:
            self._delay(node).write_text("")

    def _delay(self, node: str) -> Path:
        return self._folder / f"delay-{node}"

    def _lay(self, node: str) -> None:
        file, ends = self._delay(node), self.ends(node)
        for namespace, device in ends:
            ip("-n", namespace, "tuntap", "add", "dev", device, "mode", "tap")
        command = [
            sys.executable,
            "-m",
            __name__,
            str(file),
            *(word for end in ends for word in end),
        ]
        self._relays.append(subprocess.Popen(command))
        until(file.exists, "the relay has both ends")


class Way:
    """From one end to the other: packets in the order in which they are due."""

    def __init__(self, source: int, target: int) -> None:
        self.source = source
        self._target = target
        self._waiting: deque[tuple[float, bytes]] = deque()

    def take(self, due: float) -> None:
        """All that came."""
        with suppress(BlockingIOError):
            while True:
                packet = os.read(self.source, _MOST_BYTES)
                if len(self._waiting) < _MOST_WAITING:
                    self._waiting.append((due, packet))

    def give(self, now: float) -> None:
        """All that is due."""
        while self._waiting and self._waiting[0][0] <= now:
            with suppress(OSError):  # the other end is down, or full: it is lost
                os.write(self._target, self._waiting.popleft()[1])

    def due_s(self, now: float) -> float:
        return max(0.0, self._waiting[0][0] - now) if self._waiting else _LOOKS_EVERY_S


def relay(file: Path, first: int, second: int) -> None:
    """Until it is killed."""
    ways = (Way(first, second), Way(second, first))
    file.touch()
    delay_s, looked = 0.0, 0.0
    while True:
        now = time.monotonic()
        if now - looked >= _LOOKS_EVERY_S:
            delay_s, looked = float(file.read_text() or 0), now
        ready, _, _ = select.select([first, second], [], [], min(one.due_s(now) for one in ways))
        now = time.monotonic()
        for way in ways:
            if way.source in ready:
                way.take(now + delay_s)
            way.give(time.monotonic())


def _tap(namespace: str, device: str) -> int:
    enter(Path("/run/netns") / namespace)
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _SET_DEVICE, struct.pack("16sH", device.encode(), _TAP_ONLY_FRAMES))
    return descriptor


def main(file: str, *ends: str) -> None:
    first, second = _tap(ends[0], ends[1]), _tap(ends[2], ends[3])
    relay(Path(file), first, second)


if __name__ == "__main__":
    main(*sys.argv[1:])
