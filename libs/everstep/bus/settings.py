"""The [bus] section: where the bus is, who we are there, and how patient we are."""

from pathlib import Path

from msgspec.structs import replace

from everstep.bus.errors import BusConfigError
from everstep.settings import Settings

_GIB = 1 << 30
_SCHEMES = frozenset({"nats", "tls", "ws", "wss"})


RETENTION = (
    "facts_days", "facts_bytes", "evidence_days", "evidence_bytes", "logs_days", "logs_bytes",
)  # fmt: skip
"""The settings that say how much the bus may keep. History is the record; the bus only bridges its
absence.
"""


class BusSettings(Settings, frozen=True, kw_only=True):
    """How to reach the bus."""

    url: str = "nats://127.0.0.1:4222"
    """One URL or several with commas: `nats://`, or `tls://` for TLS."""
    user: str | None = None
    """The user to log in as; its password comes from `password_file`."""
    password_file: Path | None = None
    """The file with the password. It is read at each connect, so a rotated password needs no
    restart.
    """
    credentials_file: Path | None = None
    """A NATS `.creds` file (JWT and seed), as `everstep bus login` makes it. It is renewed in
    place before it expires; a new one put there is taken up without a restart."""
    renewed_credentials_file: Path | None = None
    """Where a renewed login is kept, if `credentials_file` cannot be written; it is read, too."""
    nkey_seed_file: Path | None = None
    """An nkey seed, instead of a user and password."""
    inbox_prefix: str | None = None
    """The subjects on which replies arrive; by default `_INBOX.<user>`, which only that user may
    read.
    """
    ca_file: Path | None = None
    """The authority that signed the server's certificate, where the system does not know it."""
    cert_file: Path | None = None
    """The client's own certificate, for servers that verify clients."""
    key_file: Path | None = None
    """The key of `cert_file`."""
    connect_within_s: float = 10.0
    """How long the first connection may take before the process gives up."""
    reconnect_wait_s: float = 1.0
    """The least time between two attempts at the same server."""
    reconnect_jitter_s: float = 1.0
    """The longest random delay before each attempt to reconnect, so that a fleet spreads out:
    choose 0.005 s for each node.
    """
    ping_interval_s: float = 15.0
    """A connection that misses three pings is dead: it is given up after three of these times.
    In a cluster they are at most 2 s, because another server can take over."""
    service_ping_interval_s: float = 2.0
    """The same for services: they are few, and people and nodes wait for them. They are
    connected to another server within some 8 s after theirs hangs."""
    request_within_s: float = 5.0
    """How long the server may take for one answer of its own."""
    verify_every_s: float = 30.0
    """How often a followed document is read back, in case an announcement was lost."""
    spool_dir: Path | None = None
    """Below it, each process keeps a folder of its own where facts wait for the bus."""
    spool_max_bytes: int = 256 * 1024 * 1024
    """The most bytes that may wait there."""
    replicas: int = 1
    """Copies of each stream that Everstep makes: 3 in production."""
    facts_days: int = 30
    """How long facts stay on the bus, in case history does not run. This and the next five settings
    apply when a stream is made, and when `everstep bus init` corrects it.
    """
    facts_bytes: int = 8 * _GIB
    """The most bytes of facts on the bus; the oldest are dropped first."""
    evidence_days: int = 30
    """How long evidence stays on the bus; history copies small pieces."""
    evidence_bytes: int = 8 * _GIB
    """The most bytes of evidence on the bus; more is refused until some of it has expired."""
    logs_days: int = 7
    """How long the output of ranks stays in the log store, if agents send it."""
    logs_bytes: int = _GIB
    """The most bytes of output in the log store; the oldest are dropped first."""

    def __post_init__(self) -> None:
        _check_schemes(self.url)
        ways = [self.user, self.credentials_file, self.nkey_seed_file]
        if sum(way is not None for way in ways) > 1:
            raise ValueError("set only one of user, credentials_file and nkey_seed_file")
        if self.renewed_credentials_file is not None and self.credentials_file is None:
            raise ValueError("renewed_credentials_file needs a credentials_file")
        if (self.user is None) != (self.password_file is None):
            raise ValueError("user and password_file belong together")
        if self.replicas not in {1, 3, 5}:
            raise ValueError(f"replicas must be 1, 3 or 5, got {self.replicas}")
        self._above_zero(
            f"{' '.join(RETENTION)} connect_within_s ping_interval_s service_ping_interval_s "
            "request_within_s verify_every_s"
        )

    @property
    def of_service(self) -> "BusSettings":
        """These settings for the connection of a service, which pings more often."""
        shortest_s = min(self.ping_interval_s, self.service_ping_interval_s)
        return replace(self, ping_interval_s=shortest_s)

    def spool_for(self, name: str) -> Path:
        """The folder of the process `name`; `BusConfigError` when no setting names it."""
        if self.spool_dir is None:
            raise BusConfigError(
                f"{name} has nowhere to keep its facts while the bus is away: set spool_dir in "
                f"[bus] to a folder that it may write to"
            )
        return self.spool_dir / name


def _check_schemes(urls: str) -> None:
    schemes = {url.strip().partition("://")[0] for url in urls.split(",") if "://" in url}
    for scheme in sorted(schemes - _SCHEMES):
        text = f"{scheme}:// is not an address of a bus: write nats://HOST:4222 (or tls://)"
        raise ValueError(f"url: {text}")
