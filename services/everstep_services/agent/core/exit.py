"""How a rank ended: the name of that, and whether it may be the cause."""

import hashlib
import re
from dataclasses import dataclass, replace
from typing import Literal

from everstep.incident_causes import SECONDARY
from everstep.messages import ErrorRecord

MemoryKill = Literal["", "rank", "host"]
"""Whom the kernel killed for memory when SIGKILL ended a rank: it, or a process on its host."""

_CONSEQUENCES = re.compile(
    r"connection (closed|reset|refused|was closed)|broken pipe|remote process exited"
    r"|gloo/transport(?!.*preamble)|connectfullmesh|connection is closed|peer .*(closed|died)"
    r"|ncclremoteerror|ncclsystemerror|ncclinternalerror|watchdog"
    r"|timed out (after|waiting)|timeout.*(collective|store|barrier)|wait timeout"
    r"|failed to (recv|send|connect)|socket (timeout|error)|recvvalue failed|sendbytes failed",
    re.IGNORECASE,
)
_DISTRIBUTED = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError")
_OF_CODE = frozenset(
    {
        *["SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError"],
        *["NameError", "UnboundLocalError", "AttributeError", "TypeError"],
    }
)
WARDEN_ENDED = "the warden of this node has ended: "
"""The reason why nobody saw the ends of ranks begins so if their warden ended with them."""
_USAGE = 2
_NOT_FOUND = re.compile(r": (No module named|Error while finding module specification)")
"""Python's messages for `-m` with a name that does not exist."""
_CODES = {"move": 16, "stop": 17}
_ASKED = {
    "move": "it asks to compute its result again on another node",
    "stop": "its result is wrong, and it asks to stop the job",
}
_ACCIDENTS = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?|/[^\s'\"]+/|\s+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RankExit:
    """How one process ended."""

    code: int | None = None
    signal: str | None = None
    core_dumped: bool = False
    error: ErrorRecord | None = None
    memory: MemoryKill = ""
    lasted_s: float = 0.0
    why_unseen: str = ""
    """Why nobody saw the end."""

    @property
    def is_good(self) -> bool:
        return self.code == 0

    @property
    def is_out_of_memory(self) -> bool:
        """The kernel killed the process for its memory."""
        return self.memory == "rank" and self.signal == "SIGKILL"

    @property
    def how(self) -> str:
        """The kind of end, named as in `rank_exited`."""
        if self.is_out_of_memory:
            return "out_of_memory"
        if self.signal is not None:
            return "signal"
        if self.code is None:
            return "unknown"
        return "done" if self.code == 0 else "error"

    @property
    def is_secondary(self) -> bool:
        """The error text says that the rank ended because another one was gone."""
        if self.error is None:
            return self.signal == "SIGABRT"  # C++ aborts on an uncaught error
        if self.error.name.rpartition(".")[2] in _DISTRIBUTED:
            return True
        return bool(_CONSEQUENCES.search(self.error.text))

    @property
    def is_of_code(self) -> bool:
        """The kind of the error says that the program is wrong: it would fail again.

        An OSError comes from a file system, and a ValueError may come from data.
        """
        if self.error is None:
            return False
        if self.error.name == "SystemExit":  # argparse and its like exit with this code
            return self.code == _USAGE or bool(_NOT_FOUND.search(self.error.text))
        return self.error.name in _OF_CODE

    @property
    def asks(self) -> str:
        """What the script asks for by its exit code, as in `ErrorRecord`."""
        return (
            ""
            if self.error is None or self.code != _CODES.get(self.error.asks)
            else self.error.asks
        )

    @property
    def text(self) -> str:
        """The end of the process, for a person."""
        core = ", core dumped" if self.core_dumped else ""
        if self.is_out_of_memory:
            return "was killed by the kernel: out of memory"
        if self.signal is not None:
            hint = "; the kernel killed for memory on this host meanwhile"
            return f"was ended by {self.signal}{core}{hint if self.memory == 'host' else ''}"
        if self.code is None:
            # read on other nodes, too
            why = (
                f": {self.why_unseen}".replace(" this node ", " its node ")
                if self.why_unseen
                else ""
            )
            return f"ended without a known exit code or signal{why}"
        if self.asks:
            return f"exited with {self.code}: {_ASKED[self.asks]}"
        if self.error is not None:
            first = self.error.text.partition("\n")[0][:300]
            place = f" at {self.error.place}" if self.error.place else ""
            return f"exited with {self.code}: {self.error.name}: {first}{place}"
        return f"exited with {self.code}"

    @property
    def fingerprint(self) -> str:
        """Equal for equal failures: addresses, numbers and folders do not count."""
        if self.error is not None:
            text = _ACCIDENTS.sub(" ", self.error.text.partition("\n")[0])
            failure = f"{self.error.name}|{text}|{self.error.place}"
        else:
            failure = f"{self.how}|{self.signal}|{self.code}"
        return (SECONDARY if self.is_secondary else "") + hashlib.sha256(
            failure.encode()
        ).hexdigest()[:16]

    def forgiven(self) -> "RankExit":
        """The same as a good end: the rank had done its work before it was killed."""
        return replace(self, code=0, signal=None, error=None)


def exit_sentence(rank: int, ending: RankExit, world_size: int) -> str:
    """The end of a rank, for a person, with the doubt that another rank failed before it."""
    is_doubtful = ending.is_secondary and world_size > 1
    doubt = ", perhaps because of another rank," if is_doubtful else ""
    return f"rank {rank}{doubt} {ending.text}"
