"""The monitor process of a rank: kills a rank that stands still, and speaks for one that is gone.

`monitor_process.py SETTINGS` reads lines from stdin: `alive AGE` when the rank's thread has looked,
`iteration PREFIX RANK SIZE INITIAL`, `left` when the rank has left its function to restart,
`pause`, `resume` and `bye`. The end of stdin without `bye` means that the rank is gone. It imports
nothing but the standard library while all ranks live.

The monitor of the first rank has a connection to each other rank, which that rank and its monitor
hold together: it speaks for both if it ends, or is silent for `unheard_s`, without `bye`.
"""

import contextlib
import json
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
from typing import Any

_LONGEST_POLL_S = 1.0
Iteration = tuple[str, int, int, int]
"""Prefix, rank, number of ranks, and the rank's first number."""


class Others:
    """The connections of the other ranks, at the monitor of the first one."""

    def __init__(self, selector: selectors.BaseSelector, settings: "dict[str, Any]") -> None:
        self._selector = selector
        self._beat_s = max(1, round(settings["beat_s"]))
        self._misses = max(1, round(settings["unheard_s"] / self._beat_s) - 1)
        self._heard: dict[int, bytes] = {}
        self._listener = socket.socket(fileno=settings["listener"])
        self._listener.settimeout(0)
        selector.register(self._listener, selectors.EVENT_READ)

    def take(self, ready: Any) -> Iteration | None:
        """Read from a connection; the iteration of a rank that is gone with its monitor."""
        if ready is self._listener:
            with contextlib.suppress(OSError):
                self._accept()
            return None
        try:
            octets = ready.recv(65536)
        except BlockingIOError:
            return None
        except OSError:  # its host does not answer
            octets = b""
        number = ready.fileno()
        if octets:
            # Only the last whole line counts, and the beginning of the next.
            self._heard[number] = b"\n".join((self._heard[number] + octets).split(b"\n")[-2:])
            return None
        heard = self._heard.pop(number)
        self._selector.unregister(ready)
        ready.close()
        words = heard.partition(b"\n")[0].decode(errors="replace").split()
        return _iteration(words[1:]) if words[:1] == ["iteration"] else None

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, self._beat_s),
            (socket.TCP_KEEPINTVL, self._beat_s),
            (socket.TCP_KEEPCNT, self._misses),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._heard[connection.fileno()] = b""
        self._selector.register(connection, selectors.EVENT_READ)


class Monitor:
    """Watches one rank, which is its parent."""

    def __init__(self, settings: "dict[str, Any]") -> None:
        self._settings = settings
        self._rank_pid = int(settings["pid"])
        self._moved = time.monotonic()
        self._is_paused = False
        self._iteration: Iteration | None = None
        self._rest = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self._others = Others(self._selector, settings) if settings["listener"] >= 0 else None

    def run(self) -> None:
        """Watch until the rank says goodbye, or is gone."""
        while True:
            for key, _ in self._selector.select(self._poll_s()):
                if key.fd != 0 and self._others is not None:
                    lost = self._others.take(key.fileobj)
                    if lost is not None:  # importing torch takes time, and this rank may hang
                        threading.Thread(target=self._speak_for, args=(lost,)).start()
                elif not self._listen():
                    return
            if not self._is_paused and self._idle_s() > float(self._settings["hard_s"]):
                self._log(
                    f"rank {self._settings['rank']} has stood still for {self._idle_s():.0f} s"
                )
                if self._kill():
                    self._speak_for_the_rank()
                    return

    def _listen(self) -> bool:
        """Read what the rank sends; False once it has ended."""
        lines = self._lines()
        if lines is None:
            self._speak_for_the_rank()
            return False
        for line in lines:
            if line == b"bye":
                return False
            self._take(line.decode().split())
        return True

    def _lines(self) -> "list[bytes] | None":
        """The next whole lines of the rank; None if it is gone."""
        octets = os.read(0, 65536)
        *lines, self._rest = (self._rest + octets).split(b"\n")
        return lines if octets else None

    def _take(self, words: "list[str]") -> None:
        match words:
            case ["alive", age]:
                self._moved = time.monotonic() - float(age)
            case ["pause"]:
                self._is_paused = True
            case ["resume"]:
                self._is_paused, self._moved = False, time.monotonic()
            case ["left"]:
                self._moved = time.monotonic()
            case ["iteration", *rest]:
                self._iteration = _iteration(rest)
                self._moved = time.monotonic()
            case _:
                pass

    def _idle_s(self) -> float:
        return time.monotonic() - self._moved

    def _poll_s(self) -> float:
        left = float(self._settings["hard_s"]) - self._idle_s()
        return max(0.01, min(_LONGEST_POLL_S, float(self._settings["interval_s"]), left))

    def _kill(self) -> bool:
        """End the rank: SIGCONT and SIGTERM, then SIGKILL. An agent hears of it first.

        False if a signal has freed the rank: it has left its function, and restarts.
        """
        self._tell_agent("hung")
        for number in (signal.SIGCONT, signal.SIGTERM):
            if not self._signal(number):
                return True
        deadline = time.monotonic() + float(self._settings["grace_s"])
        while time.monotonic() < deadline:
            ready, _, _ = select.select([0], [], [], max(0.0, deadline - time.monotonic()))
            lines = self._lines() if ready else []
            if lines is None:
                return True
            for line in lines:
                self._take(line.decode().split())
            if b"left" in lines:
                self._tell_agent("restarts")
                return False
        self._signal(signal.SIGKILL)
        return True

    def _tell_agent(self, line: str) -> None:
        if os.getppid() == self._rank_pid and self._settings["agent"] >= 0:
            with contextlib.suppress(OSError):  # it is gone, or does not read
                os.write(self._settings["agent"], self._settings[line].encode())

    def _signal(self, number: int) -> bool:
        if os.getppid() != self._rank_pid:
            return False  # it is gone, and its number may be another process's
        try:
            os.kill(self._rank_pid, number)
        except ProcessLookupError:
            return False
        return True

    def _speak_for_the_rank(self) -> None:
        self._speak_for(self._iteration)
        if self._settings["presence"] >= 0:
            with contextlib.suppress(OSError):
                os.write(self._settings["presence"], b"bye\n")  # nobody else needs to

    def _speak_for(self, iteration: Iteration | None) -> None:
        """Record that a rank is lost, and arrive in its place where others wait for it."""
        store = self._settings["store"]
        if store is None or iteration is None:
            return  # an agent restarts all ranks, or nobody can be reached
        prefix, rank, size, initial = iteration
        self._log(f"rank {rank} is gone: the other ranks restart without it")
        sys.path[:] = self._settings["path"]  # the rank's
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # noqa: TID251 - no SDK here yet
        try:
            from trainer_sdk.nvrx.inprocess.absence import record_loss

            record_loss(store, prefix, rank, size, initial)
        except Exception as error:  # noqa: BLE001 - the store has ended with the first rank
            self._log(f"the other ranks do not know it: {str(error).splitlines()[0]}")

    def _log(self, text: str) -> None:
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} monitor: {text}\n"
        path = self._settings["logfile"]
        if not path:
            sys.stderr.write(f"everstep: {text}\n")
            return
        with open(path, "a", encoding="utf-8") as file:
            file.write(line)


def _iteration(words: "list[str]") -> Iteration | None:
    try:
        prefix, rank, size, initial = words
        return prefix, int(rank), int(size), int(initial)
    except ValueError:
        return None  # not a line of ours, or not a whole one


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # it ends with its rank
    Monitor(json.loads(sys.argv[1])).run()
