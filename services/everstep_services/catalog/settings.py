"""The [catalog] section: retention, verification, and the repair of copies."""

from everstep.settings import Settings
from trainer_sdk.checkpoint.storage.leftovers import ABANDONED_S


class CatalogSettings(Settings, frozen=True, kw_only=True):
    """What the catalog does by itself. Switches such as `catalog.keep_last` set it for one job."""

    keep_last: int = 0
    """How many of a job's newest checkpoints stay; older ones are deleted where the catalog can
    reach the files. 0 deletes nothing."""
    keep_every_steps: int = 0
    """Older checkpoints whose step is a multiple of this stay, too; 0 for none."""
    abandoned_after_s: float = ABANDONED_S
    """Retention also removes what failed saves have left, once it has not changed for this time.
    Set it above the duration of any save."""
    roots: tuple[str, ...] = ()
    """Folders and URLs to search for checkpoints, besides those that facts have named. From them
    the index is rebuilt when nothing else is left."""
    scan_every_s: float = 3600.0
    """How often the catalog compares the index with the files."""
    verify: bool = True
    """Read each checkpoint in a folder back once, the newest first."""
    verify_objects: bool = False
    """Read those in object stores back, too, at the price of reading there."""
    verify_again_s: float = 0.0
    """Read a good checkpoint again after this time; 0 for never."""
    verify_bytes_per_s: int = 64 << 20
    """The highest rate of reading back, so that other users of the storage are not slowed down."""
    degraded_after_s: float = 60.0
    """Too few copies in memory are recorded and repaired once that has lasted for this time."""
    repair_every_s: float = 120.0
    """The shortest time between two requests for the same copy."""
    tend_every_s: float = 5.0
    """How often the catalog looks for checkpoints to verify, to delete or to repair."""

    def __post_init__(self) -> None:
        if self.keep_last < 0 or self.keep_every_steps < 0:
            raise ValueError(
                f"keep_last and keep_every_steps must not be negative, got {self.keep_last} and "
                f"{self.keep_every_steps}"
            )
        if self.verify_bytes_per_s < 1 << 20:
            raise ValueError(
                f"verify_bytes_per_s must be at least {1 << 20}, got {self.verify_bytes_per_s}"
            )
        for name in ("abandoned_after_s", "scan_every_s", "repair_every_s", "tend_every_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name):g}")
        if self.verify_again_s < 0 or self.degraded_after_s < 0:
            raise ValueError("verify_again_s and degraded_after_s must not be negative")
