"""The [history] and [api] sections: where the record is kept, and who may ask it how much."""

from pathlib import Path

from everstep.settings import Settings
from everstep_services.history.webhooks.settings import WebhooksSettings


class HistorySettings(Settings, frozen=True, kw_only=True):
    """The database, and how facts get into it."""

    database_url: str = "sqlite:///everstep-history.db"
    """`sqlite:///PATH` (an absolute path has four slashes) or `postgresql://USER@HOST/NAME`."""
    database_password_file: Path | None = None
    """The file with the password for PostgreSQL."""
    database_readers: int = 4
    """The number of database connections for reading; there is one more for writing."""
    read_within_s: float = 5.0
    """How long one query may keep the database busy."""
    write_within_s: float = 60.0
    """How long one batch may take to be written."""
    batch_facts: int = 2000
    """The most facts written in one transaction."""
    pace_s: float = 0.05
    """How long to let facts gather after a small batch: a transaction costs as much as some
    hundred facts."""
    fetch_within_s: float = 2.0
    """How long one request for facts waits for the first of them."""
    lease_ttl_s: int = 15
    """After a projector died, another takes over within this time."""
    retry_first_s: float = 0.2
    """The first wait after the database or the bus failed; it doubles."""
    retry_most_s: float = 10.0
    """The longest wait between two attempts."""
    keep_log_bytes: int = 256 << 20
    """The ends of failed ranks' logs, and evidence up to 128 KiB a piece, are copied into the
    database, up to this compressed size: then the oldest go. 0 copies none; they can be read as
    long as the bus has them."""
    keep_jobs_days: int = 365
    """A job whose last fact is older is removed: its facts, what is derived from them, its copies
    of evidence, and what the bus still has of its output and evidence. 0 keeps all for ever."""
    keep_labels: tuple[str, ...] = ("keep=true",)
    """Jobs with one of these labels, each as `name=value`, stay; so do jobs with a pinned
    checkpoint, and jobs with an incident whose cause a person has named."""
    poll_every_s: float = 0.5
    """How often a replica that does not write looks for what another has written."""
    clock_offset_limit_s: float = 5.0
    """A node whose clock differs by more from the clock of this service is shown to have a wrong
    clock. Nothing else follows from it."""

    def __post_init__(self) -> None:
        self._above_zero(
            "database_readers read_within_s write_within_s batch_facts fetch_within_s lease_ttl_s "
            "retry_first_s poll_every_s clock_offset_limit_s"
        )
        self._not_negative("keep_jobs_days keep_log_bytes")
        if self.batch_facts > 20_000:
            raise ValueError(f"batch_facts must be at most 20000, got {self.batch_facts}")
        if self.fetch_within_s * 3 > self.lease_ttl_s:
            raise ValueError(
                f"lease_ttl_s must be three times fetch_within_s, or the lease runs out while "
                f"waiting: {self.lease_ttl_s} is less than 3 × {self.fetch_within_s:g}"
            )


class ApiSettings(Settings, frozen=True, kw_only=True):
    """Where REST is served, and every limit that a client can run into."""

    host: str = "127.0.0.1"
    """The address to listen on. Beyond loopback, put TLS in front of it."""
    port: int = 7070
    """The port to listen on; 0 takes any free one."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which clients may call us (the Host header); none allows every name."""
    first_token_file: Path | None = None
    """If there is no token yet, one for an administrator is made and written to this file."""
    max_body_bytes: int = 1 << 20
    """The largest request body."""
    max_url_bytes: int = 8192
    """The longest path with its query."""
    max_header_bytes: int = 16384
    """The most bytes of all headers of a request together."""
    max_response_bytes: int = 8 << 20
    """About how large a page may get; it then ends early, with a cursor for the rest."""
    max_connections: int = 1000
    """The most open connections; never more than half of the file descriptors of the process. A
    further connection closes the connection that has been silent longest.
    """
    headers_within_s: float = 15.0
    """How long a client may take for the headers of a request."""
    body_within_s: float = 20.0
    """How long it may take for the body."""
    max_concurrent: int = 64
    """The most requests in progress; further ones are refused with 503."""
    answer_within_s: float = 28.0
    """How long a request may take, the wait for a database connection included."""
    max_listeners: int = 500
    """The most open live streams."""
    max_listeners_per_token: int = 50
    """The most open live streams of one token."""
    keep_alive_s: float = 15.0
    """How often a keep-alive is sent on a silent live stream, and its token is checked."""
    slow_client_s: float = 20.0
    """A live stream is closed if its client reads nothing for this time."""
    failed_logins_per_minute: int = 30
    """The most wrong tokens from one address in a minute; then 429. Right tokens always pass."""
    token_cache_s: float = 5.0
    """How long after its revocation a token may still work on another replica."""
    webhooks: WebhooksSettings = WebhooksSettings()
    """Notices of maintenance from outside."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 to 65535, got {self.port}")
        self._above_zero(
            "max_body_bytes max_url_bytes max_header_bytes max_response_bytes max_connections "
            "headers_within_s body_within_s max_concurrent answer_within_s max_listeners "
            "max_listeners_per_token keep_alive_s slow_client_s failed_logins_per_minute"
        )
