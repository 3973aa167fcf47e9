"""The state of a wrapped function on one rank, and the errors that end its restarts."""

import dataclasses
import enum

from trainer_sdk.environment import environ


class RestartError(Exception):
    """The base of the wrapper's errors."""


class RestartAbort(BaseException):
    """Raised by a plugin to end the training on this rank without another restart."""


class HealthCheckError(RestartError):
    """A health check has failed: this rank takes part in no further restart."""


class InternalError(RestartError):
    """The wrapper itself has failed."""


class TimeoutError(RestartError):
    """A plugin, or the other ranks at a barrier, took longer than allowed."""


class Mode(enum.Enum):
    """What a rank does in an iteration."""

    INITIALIZED = enum.auto()
    ACTIVE = enum.auto()
    INACTIVE = enum.auto()
    TERMINATED = enum.auto()


@dataclasses.dataclass
class State:
    """Ranks and counters of an iteration; `active_rank` is what the function sees as `RANK`."""

    rank: int | None
    world_size: int
    active_rank: int | None = None
    active_world_size: int | None = None
    initial_rank: int | None = None
    initial_world_size: int | None = None
    iteration: int = 0
    mode: Mode = Mode.INITIALIZED
    fn_exception: Exception | None = None

    def __post_init__(self) -> None:
        if self.initial_rank is None:
            self.initial_rank = self.rank
        if self.initial_world_size is None:
            self.initial_world_size = self.world_size

    @classmethod
    def from_env(cls) -> "State":
        """The state before the first assignment of ranks."""
        return cls(int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1")))

    def set_distributed_vars(self) -> None:
        """Set `RANK` and `WORLD_SIZE` for the function."""
        environ["RANK"] = str(self.active_rank)
        environ["WORLD_SIZE"] = str(self.active_world_size)

    def advance(self) -> None:
        """Begin the next iteration."""
        self.iteration += 1
        self.fn_exception = None

    def freeze(self) -> "FrozenState":
        """A copy for plugins, which cannot be changed."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return FrozenState(**fields)

    def copy_from(self, other: "State", fields: "list[str] | None" = None) -> None:
        """Take over these fields of another state, or all of them."""
        for field in dataclasses.fields(self):
            if fields is None or field.name in fields:
                setattr(self, field.name, getattr(other, field.name))


@dataclasses.dataclass(frozen=True)
class FrozenState:
    """The state as plugins see it."""

    rank: int | None
    world_size: int
    active_rank: int | None = None
    active_world_size: int | None = None
    initial_rank: int | None = None
    initial_world_size: int | None = None
    iteration: int = 0
    mode: Mode = Mode.INITIALIZED
    fn_exception: Exception | None = None
