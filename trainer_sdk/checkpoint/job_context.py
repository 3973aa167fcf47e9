"""Job and round of this process, and where its images are."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from trainer_sdk import launchers, layout
from trainer_sdk.checkpoint import arguments

_ALONE = "local"


@dataclass(frozen=True, slots=True)
class JobContext:
    """Which job and round this process belongs to, and where its images are."""

    job: str
    round: int
    images: str
    """The folder of images on this node."""
    has_keeper: bool
    """Whether an agent keeps the images after the ranks have ended, until the job ends."""
    is_counted: bool = True
    """Whether an agent counts rounds over all launches; other launchers restart at each launch."""
    images_most_bytes: int = 0
    """The most memory that images may take; 0 for no limit."""
    restarts: int = 0
    """How often this launch of the job has been restarted."""


def read_job_context(environ: Mapping[str, str], job: str = "", root: str = "") -> JobContext:
    """Read the context from the environment; the script, the agent or the launcher names the job.

    A job without a name is identified by the place of its checkpoints: a name that a launcher
    generates differs at the next launch.
    """
    place = launchers.launched_rank(environ)
    name = arguments.job(job or launchers.given_job_of(environ)) or _ALONE
    counted = environ.get(layout.ROUND_VARIABLE)
    number = counted or (place.round if place is not None else 0)
    images = environ.get(layout.IMAGES_VARIABLE, "")
    restarts = place.restarts if place is not None else 0
    if not images:
        images = _own_folder(name if name != _ALONE else f"{name}-{_short(root or os.getcwd())}")
        return JobContext(
            name, int(number), images, has_keeper=False, is_counted=bool(counted), restarts=restarts
        )
    return JobContext(
        name,
        int(number),
        images,
        has_keeper=True,
        is_counted=bool(counted),
        images_most_bytes=int(environ.get(layout.IMAGES_MOST_VARIABLE) or 0),
        restarts=restarts,
    )


def _own_folder(job: str) -> str:
    root = "/dev/shm" if os.path.isdir("/dev/shm") else "/tmp"  # noqa: S108  ours, 0700
    return os.path.join(root, f"everstep-{os.getuid()}", f"images-{job}")


def _short(place: str) -> str:
    where = place.rstrip("/") if "://" in place else os.path.abspath(place)
    return hashlib.blake2b(where.encode(), digest_size=6).hexdigest()
