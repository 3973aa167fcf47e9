"""The [logins] section: where the signing keys are, and how long a login is valid."""

from pathlib import Path

from everstep.settings import Settings

_LEAST_S = 4


class LoginSettings(Settings, frozen=True, kw_only=True):
    """How logins to the bus are renewed."""

    keys_dir: Path | None = None
    """The folder with `agents.seed` and `services.seed`, as `everstep bus setup` makes it. With
    them, a process can make logins for every job, and nothing else."""
    valid_s: int = 7 * 86400
    """How long a renewed login is valid. It is renewed again after about half of this time, so this
    service may be away for the other half."""

    def __post_init__(self) -> None:
        self._at_least(_LEAST_S, "valid_s")
