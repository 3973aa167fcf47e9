"""Moves the time of day of a Python process by the seconds in a file, and no other clock.

Python imports it at its start, because `tests.cluster.wall_clock` puts this folder first.
"""

import ctypes
import datetime
import gc
import mmap
import os
import struct
import time

with open(os.environ["TEST_WALL_CLOCK"], "rb") as _file:
    _ahead = mmap.mmap(_file.fileno(), 8, access=mmap.ACCESS_READ)
_now, _time, _time_ns = datetime.datetime.now, time.time, time.time_ns
_clock_gettime = time.clock_gettime


def _ahead_s() -> int:
    (seconds,) = struct.unpack("q", _ahead)
    return int(seconds)


def _moved_now(_: type, tz: datetime.tzinfo | None = None) -> datetime.datetime:
    return _now(tz) + datetime.timedelta(seconds=_ahead_s())


def _moved_clock(number: int) -> float:
    return _clock_gettime(number) + (_ahead_s() if number == time.CLOCK_REALTIME else 0)


time.time = lambda: _time() + _ahead_s()
time.time_ns = lambda: _time_ns() + _ahead_s() * 10**9
time.clock_gettime = _moved_clock
# A subclass would not do: messages are declared with `datetime` itself.
gc.get_referents(datetime.datetime.__dict__)[0]["now"] = classmethod(_moved_now)
ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime.datetime))
