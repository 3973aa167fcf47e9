"""The [catalog] section: what is kept, how often files are read again, when copies are repaired."""

from everstep.settings import Settings
from trainer_sdk.checkpoint.storage.leftovers import ABANDONED_S


class CatalogSettings(Settings, frozen=True, kw_only=True):
    """What the catalog does by itself. A job's own values are switches, as `catalog.keep_last`."""

    keep_last: int = 0
    """So many of a job's newest checkpoints stay, and older ones are deleted where the catalog can
    reach the files. 0 deletes nothing."""
    keep_every_steps: int = 0
    """Of the older ones, each whose step is a multiple of this stays, too; 0 for none."""
    abandoned_after_s: float = ABANDONED_S
    """What a save has left that came to nothing goes with retention, once nothing has changed in it
    for so long: longer than any save may take."""
    roots: tuple[str, ...] = ()
    """Folders and URLs to look for checkpoints in, beside those that facts have named: what the
    index is made again from after everything else was lost."""
    scan_every_s: float = 3600.0
    """How often the index is compared with the files."""
    verify: bool = True
    """Each checkpoint in a folder is read back once, the newest first."""
    verify_objects: bool = False
    """Those in object stores are, too: it costs what reading costs there."""
    verify_again_s: float = 0.0
    """A good one is read again after so long; 0 for never."""
    verify_bytes_per_s: int = 64 << 20
    """No faster than this, beside everything else that uses the storage."""
    degraded_after_s: float = 60.0
    """Too few copies in memory are said, and repaired, once that has lasted for so long."""
    repair_every_s: float = 120.0
    """The same copy is not asked for again before that."""
    tend_every_s: float = 5.0
    """How often it looks for something to verify, to delete or to repair."""

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
