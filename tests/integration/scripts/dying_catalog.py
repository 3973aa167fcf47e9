"""The catalog as a process, killed just before its n-th durable act, if `KILL_AT` says n.

Such an act is a document that is written, or a fact that is put on record.
"""

import itertools
import os
import runpy
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from everstep.bus.client import NatsBus
from everstep.bus.documents import Bucket

Act = Callable[..., Awaitable[Any]]


def dying(act: Act, acts: "itertools.count[int]", last: int) -> Act:
    async def counted(*arguments: Any, **named: Any) -> Any:
        if next(acts) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return await act(*arguments, **named)

    return counted


if "KILL_AT" in os.environ:
    counter, point = itertools.count(1), int(os.environ["KILL_AT"])
    for owner, name in ((Bucket, "put"), (NatsBus, "record")):
        setattr(owner, name, dying(getattr(owner, name), counter, point))
sys.argv = ["catalog"]
runpy.run_module("everstep_services.catalog", run_name="__main__")
