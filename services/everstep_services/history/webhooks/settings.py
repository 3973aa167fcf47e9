"""Who may send webhooks, and what they may cause."""

from pathlib import Path

from everstep.settings import Settings


class WebhooksSettings(Settings, frozen=True, kw_only=True):
    """Notices of maintenance from outside. Off until there is a folder with keys."""

    keys_dir: Path | None = None
    """The folder with one key for each sender, which signs its messages: `NAME.key` for the token
    with this name. None takes no webhooks."""
    enforce: tuple[str, ...] = ()
    """Senders whose notices drain and exclude nodes. For notices of all others, Everstep only
    records what it would do.
    """
    aliases: tuple[str, ...] = ()
    """Other names of nodes, each as `name=node`: those of virtual machines, for instance."""
    lead_s: float = 300.0
    """A node is drained this long before the start that a cloud announces, so that it can save."""
    save_within_s: float = 120.0
    """How long the ranks have to save before the node leaves."""
    replay_window_s: float = 300.0
    """How old the signature of a message may be, by the clock of this host."""
    per_minute: int = 60
    """The most messages of a sender in a minute."""
    waiting_most: int = 1000
    """The most nodes for which notices of a sender may wait."""

    def __post_init__(self) -> None:
        self._above_zero("replay_window_s per_minute waiting_most")
        for name in ("lead_s", "save_within_s"):
            if not 0 <= getattr(self, name) <= 86400:
                raise ValueError(f"{name} must be 0 to 86400, got {getattr(self, name):g}")
        for alias in self.aliases:
            name, _, node = alias.partition("=")
            if not name or not node:
                raise ValueError(f"aliases must be name=node, got {alias!r}")
