"""The monitor process of a rank: kills a rank that stands still, and speaks for one that is gone.

`monitor_process.py SETTINGS` reads lines from stdin: `alive AGE` when the rank's thread has looked,
`iteration PREFIX RANK SIZE`, `pause`, `resume` and `bye`. The end of stdin without `bye` means that
the rank is gone. It imports nothing but the standard library while the rank lives.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
from typing import Any

_LONGEST_POLL_S = 1.0


class Monitor:
    """Watches one rank, which is its parent."""

    def __init__(self, settings: "dict[str, Any]") -> None:
        self._settings = settings
        self._rank_pid = int(settings["pid"])
        self._moved = time.monotonic()
        self._is_paused = False
        self._iteration: tuple[str, int, int] | None = None
        self._rest = b""

    def run(self) -> None:
        """IterationWatch until the rank says goodbye, or is gone."""
        while True:
            ready, _, _ = select.select([0], [], [], self._poll_s())
            if ready:
                octets = os.read(0, 65536)
                if not octets:
                    self._speak_for_the_rank()
                    return
                lines = (self._rest + octets).split(b"\n")
                self._rest = lines.pop()
                for line in lines:
                    if line == b"bye":
                        return
                    self._take(line.decode().split())
            if not self._is_paused and self._idle_s() > float(self._settings["hard_s"]):
                self._log(
                    f"rank {self._settings['rank']} has stood still for {self._idle_s():.0f} s"
                )
                self._kill()
                self._speak_for_the_rank()
                return

    def _take(self, words: "list[str]") -> None:
        match words:
            case ["alive", age]:
                self._moved = time.monotonic() - float(age)
            case ["pause"]:
                self._is_paused = True
            case ["resume"]:
                self._is_paused, self._moved = False, time.monotonic()
            case ["iteration", prefix, rank, size]:
                self._iteration = (prefix, int(rank), int(size))
                self._moved = time.monotonic()
            case _:
                pass

    def _idle_s(self) -> float:
        return time.monotonic() - self._moved

    def _poll_s(self) -> float:
        left = float(self._settings["hard_s"]) - self._idle_s()
        return max(0.01, min(_LONGEST_POLL_S, float(self._settings["interval_s"]), left))

    def _kill(self) -> None:
        """End the rank: SIGCONT and SIGTERM, then SIGKILL. An agent hears of it first."""
        if os.getppid() == self._rank_pid and self._settings["agent"] >= 0:
            with contextlib.suppress(OSError):  # it is gone, or does not read
                os.write(self._settings["agent"], self._settings["hung"].encode())
        for number in (signal.SIGCONT, signal.SIGTERM):
            if not self._signal(number):
                return
        deadline = time.monotonic() + float(self._settings["grace_s"])
        while time.monotonic() < deadline:
            ready, _, _ = select.select([0], [], [], max(0.0, deadline - time.monotonic()))
            if ready and not os.read(0, 65536):
                return
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> bool:
        if os.getppid() != self._rank_pid:
            return False  # it is gone, and its number may be another process's
        try:
            os.kill(self._rank_pid, number)
        except ProcessLookupError:
            return False
        return True

    def _speak_for_the_rank(self) -> None:
        """Record that the rank is lost, and arrive in its place where others wait for it."""
        store, iteration = self._settings["store"], self._iteration
        if store is None or iteration is None:
            return  # an agent restarts all ranks, or nobody can be reached
        prefix, rank, size = iteration
        self._log(f"rank {rank} is gone: the other ranks restart without it")
        sys.path[:] = self._settings["path"]  # the rank's
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # noqa: TID251 - no SDK here yet
        try:
            from trainer_sdk.nvrx.inprocess.absence import record_loss

            record_loss(store, prefix, rank, size, int(self._settings["rank"]))
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


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # it ends with its rank
    Monitor(json.loads(sys.argv[1])).run()
