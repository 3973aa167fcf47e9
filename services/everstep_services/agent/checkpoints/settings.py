"""The [agent.checkpoints] section: states in the memory of this node, and of others for it."""

from pathlib import Path

from everstep.settings import Settings


class CheckpointSettings(Settings, frozen=True, kw_only=True):
    """How states are kept in memory and sent to other nodes."""

    replicate: bool = True
    """Hold states for other nodes of the job, and have them hold those of this one."""
    port: int = 0
    """Where other agents send them to, over TCP; 0 for any port that is free."""
    ca_file: Path | None = None
    """The authority of all agents' certificates. With it agents speak TLS, and nothing else."""
    cert_file: Path | None = None
    """This node's own certificate, of that authority; whom it names does not matter."""
    key_file: Path | None = None
    """The key of `cert_file`, without a password."""
    memory_dir: Path = Path("/dev/shm")  # noqa: S108  a folder of ours in it, 0700
    """Where states are kept: a file system in memory."""
    own_most_bytes: int | None = None
    """The states of this node's own ranks may take so much memory, the same for each rank. Saves go
    on without them where it is too little; by default what there is."""
    held_most_bytes: int | None = None
    """What is held for other nodes may take so much memory; by default what there is, but for
    `room_least_bytes`."""
    room_least_bytes: int = 1 << 30
    """So much of `memory_dir` stays free."""
    streams: int = 4
    """So many states are sent, and so many fetched, at the same time."""
    least_mib_s: float = 1.0
    """A node that takes or sends less than this is given up for the step."""
    silent_s: float = 5.0
    """And so is one that neither takes nor sends anything for so long."""
    fetch_within_s: float = 600.0
    """How long ranks of a new round wait while their states are fetched from other nodes."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 0xFFFF:
            raise ValueError(f"port must be from 0 to 65535, got {self.port}")
        if not 1 <= self.streams <= 64:
            raise ValueError(f"streams must be from 1 to 64, got {self.streams}")
        for name in ("least_mib_s", "silent_s", "fetch_within_s"):
            if not 0 < getattr(self, name) < 1e9:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name):g}")
        names = ("ca_file", "cert_file", "key_file")
        missing = [name for name in names if getattr(self, name) is None]
        if 0 < len(missing) < len(names):
            raise ValueError(f"{', '.join(names)} belong together: set {missing[0]} as well")
        for name in ("own_most_bytes", "held_most_bytes", "room_least_bytes"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
