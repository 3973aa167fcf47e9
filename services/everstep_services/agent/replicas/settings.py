"""The [agent.checkpoints] section: states in the memory of this node, and of others for it."""

from pathlib import Path

from everstep.settings import Settings

_LEFT_IN_MEMORY_S = 3600.0
_LEFT_ON_DISK_S = 3 * 86400.0


class CheckpointSettings(Settings, frozen=True, kw_only=True):
    """How states are kept in memory and sent to other nodes."""

    replicate: bool = True
    """Hold states for other nodes of the job, and have them hold those of this one."""
    port: int = 0
    """The port for states of other agents, over TCP; 0 for any free port."""
    ca_file: Path | None = None
    """The authority of all agents' certificates. With it, agents speak only TLS."""
    cert_file: Path | None = None
    """This node's own certificate, from that authority; the name in it does not matter."""
    key_file: Path | None = None
    """The key of `cert_file`, without a password."""
    memory_dir: Path = Path("/dev/shm")  # noqa: S108  a folder of ours in it, 0700
    """Where states are kept: a file system in memory."""
    local_root: Path | None = None
    """A folder on a disk of this node, where states are kept instead of `memory_dir`: they outlive
    a reboot. Best on NVMe with ext4 or XFS; a network file system is refused."""
    own_most_bytes: int | None = None
    """The memory for the states of this node's own ranks, the same for each rank. Saves go on
    without
    states in memory if it is too little; by default as much as there is.
    """
    held_most_bytes: int | None = None
    """The memory for states of other nodes; by default as much as there is, except
    `room_least_bytes`.
    """
    room_least_bytes: int = 1 << 30
    """The space of `memory_dir`, or of the disk of `local_root`, that stays free."""
    left_for_s: float | None = None
    """How long states stay (by default 1 h in memory, 3 days on a disk) when the agent ends and the
    job did not end well, so that a requeue to the same nodes finds them; with 0 they are removed
    when the agent ends. A Ctrl-C removes them, too.
    """
    left_most_bytes: int | None = None
    """The memory for states that ended agents of all jobs have left; by default as much as there
    is,
    except `room_least_bytes`. The oldest are removed first.
    """
    streams: int = 4
    """How many states are sent, and how many fetched, in parallel."""
    least_mib_s: float = 1.0
    """A node that takes or sends states more slowly is given up for this step."""
    silent_s: float = 5.0
    """A node that neither takes nor sends anything for this long is given up for the step, too."""
    fetch_within_s: float = 600.0
    """How long ranks of a new round wait while their states are fetched from other nodes."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 0xFFFF:
            raise ValueError(f"port must be from 0 to 65535, got {self.port}")
        if not 1 <= self.streams <= 64:
            raise ValueError(f"streams must be from 1 to 64, got {self.streams}")
        self._above_zero("least_mib_s silent_s fetch_within_s", 1e9)
        names = ("ca_file", "cert_file", "key_file")
        missing = [name for name in names if getattr(self, name) is None]
        if 0 < len(missing) < len(names):
            raise ValueError(f"{', '.join(names)} belong together: set {missing[0]} as well")
        self._check_sizes()

    @property
    def states_dir(self) -> Path:
        """The folder of states."""
        return self.memory_dir if self.local_root is None else self.local_root.absolute()

    @property
    def states_setting(self) -> str:
        """The name of the setting with that folder."""
        return "memory_dir" if self.local_root is None else "local_root"

    @property
    def states_left_for_s(self) -> float:
        """How long the states stay."""
        if self.left_for_s is not None:
            return self.left_for_s
        return _LEFT_IN_MEMORY_S if self.local_root is None else _LEFT_ON_DISK_S

    def _check_sizes(self) -> None:
        if self.left_for_s is not None and not 0 <= self.left_for_s <= 366 * 86400:
            raise ValueError(f"left_for_s must be from 0 to a year, got {self.left_for_s:g}")
        self._not_negative("own_most_bytes held_most_bytes left_most_bytes room_least_bytes")
