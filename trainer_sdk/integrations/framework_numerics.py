"""Results that cannot be right, in a framework that owns its loop; knows no framework.

Such a loop makes no step again, so a step is only looked at, after it was made. A training goes
back by another round: suspect checkpoints are quarantined, and skipped data passed over after it.
"""

import functools
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import asdict
from typing import Any, cast

import msgspec

from trainer_sdk.checkpoint.rank_group import NoGroupError, RankGroup
from trainer_sdk.checkpoint.storage import lasting, storage_for
from trainer_sdk.integrations import seals
from trainer_sdk.integrations.framework_session import FrameworkSession, Method
from trainer_sdk.integrations.skipped_data import Span, merged
from trainer_sdk.numerics.data import Batches
from trainer_sdk.numerics.numerics import Numerics
from trainer_sdk.numerics.policy import NumericsPolicy
from trainer_sdk.numerics.rollback import RestartNeededError, Rollback
from trainer_sdk.numerics.skips import ActRecord, Skips
from trainer_sdk.rank_session import Session
from trainer_sdk.sdk_log import warn_once

Names = tuple[str, str]
_MOST_STEPS = 4096
"""How many steps back the data of a step are remembered."""


def _until_an_error(method: Method) -> Method:
    """The method; after an error all ranks look at nothing: no report must end a training."""

    @functools.wraps(method)
    def call(self: "FrameworkNumerics", *given: Any, **named: Any) -> None:
        if self._is_off:
            return
        try:
            method(self, *given, **named)
        except RestartNeededError:
            raise
        except Exception as error:  # noqa: BLE001
            self._turn_off(error)

    return cast("Method", call)


class FrameworkNumerics:
    """Looks at each step of a framework, and acts as the policy says; all ranks make its calls.

    The class of a framework finds out what a step has computed, and from which data.
    """

    def __init__(self, run: FrameworkSession, policy: NumericsPolicy) -> None:
        self._run = run
        self._policy = policy
        self._data = _UsedData()
        self._rollback: _RestartRollback | None = None
        self._numerics: Numerics | None = None
        self._restored = ""
        self._is_off = False

    @property
    def spans(self) -> tuple[Span, ...]:
        """The numbers of the data that nobody trains on, in order."""
        return merged(self._rollback.skips.spans) if self._rollback is not None else ()

    def settle(self) -> None:
        """Wait until all checkpoints so far have their seals."""

    def open(self, root: str, sealed: Names | None = None) -> None:
        """Read what earlier rounds have decided; all ranks call it, before they load a state."""
        if self._rollback is not None:
            return
        try:
            self._rollback = _RestartRollback(self._run.session, root, sealed, self.settle)
        except NoGroupError as error:
            self._turn_off(error)

    @_until_an_error
    def look(
        self,
        step: int,
        state: MutableMapping[str, Any],
        *,
        loss: Any,
        grad_norm: Any = None,
        lr: Any = None,
        data: Span | None = None,
    ) -> None:
        """Look at a finished step, before the session counts it, and before it is saved.

        `state` has the model, and the scaler of gradients if there is one; `data` the numbers of
        the step's data, if a restart would use the same. The call does not return if the training
        must end or start again.
        """
        self._data.use(step, data)
        if self._numerics is None:
            choices: dict[str, Any] = asdict(self._policy) | {"rollback": self._rollback}
            self._numerics = Numerics(self._run.session, state, self._data, **choices)
            if self._restored:
                self._numerics.load_state_dict(msgspec.json.decode(self._restored))
        rate = lr if isinstance(lr, float) else None
        self._numerics.accepts(loss=loss, grad_norm=grad_norm, lr=rate)

    @_until_an_error
    def finish(self) -> None:
        """Decide on the last steps; all ranks call it after the last one."""
        if self._numerics is not None and not self._run.should_stop:
            self._numerics.finish()

    def state_dict(self) -> dict[str, str]:
        """The statistics of this rank, by its name, from which the next process goes on."""
        if self._numerics is not None:
            self._restored = msgspec.json.encode(self._numerics.state_dict()).decode()
        return {} if self._rollback is None else {self._rollback.rank_name: self._restored}

    def state_of_all(self) -> dict[str, str]:
        """The statistics of all ranks; all of them call it."""
        return {} if self._rollback is None else self._rollback.joined(self.state_dict())

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Go on from the statistics that this rank had, if there are as many ranks as then."""
        if self._rollback is not None:
            self._restored = state.get(self._rollback.rank_name, "")

    def _turn_off(self, error: Exception) -> None:
        self._is_off = True
        numerics, self._numerics = self._numerics, None
        if numerics is not None:
            numerics.leave()  # otherwise the others would wait for this rank
        warn_once(
            "the results of steps are not looked at from here on, and the training goes on: "
            f"{type(error).__name__}: {error}"
        )


def suspect_from(folder: str) -> int | None:
    """The step from which on checkpoints are suspect, and not yet marked; None if none is."""
    unfinished = Skips(storage_for(lasting(os.path.abspath(folder))), RankGroup(None)).unfinished
    return min((act.before_step or 0 for act in unfinished), default=None)


class _UsedData(Batches[Any]):
    """The data of each step, as the framework counts them; it gives none itself."""

    def __init__(self) -> None:
        self._first = deque[tuple[int, int]](maxlen=_MOST_STEPS)
        self._present: Span | None = None

    def use(self, step: int, data: Span | None) -> None:
        """Note the data of a step."""
        self._present = data
        if data is not None:
            self._first.append((step, data[0]))

    @property
    def can_skip(self) -> bool:
        """Whether positions are known."""
        return self._present is not None

    @property
    def position(self) -> Span | None:
        """The data of the present step."""
        return self._present

    def span(self, since: int, step: int) -> Span | None:
        """The data from a step on to the present one; steps before this process used as much."""
        present = self._present
        if present is None:
            return None
        steps = [*self._first, (step, present[0])]
        first, begin = next(each for each in steps if each[0] >= min(since, step))
        before = max(first - since, 0) * (present[1] - present[0])
        return max(begin - before, 0), present[1]

    def taken(self, step: int) -> None:
        """Nothing: no batch is kept."""

    def again(self) -> None:
        """Nothing: no step is made again."""

    def rewind(self, step: int, spans: Iterable[Span]) -> None:
        """Nothing: no training goes back in place."""


class _RestartRollback(Rollback):
    """A roll-back by another round; also states in memory are quarantined.

    `sealed` has the prefix and the suffix of a framework's own checkpoints; without, those in the
    root are of Everstep's writer.
    """

    def __init__(
        self, session: Session, root: str, sealed: Names | None, settle: Callable[[], None]
    ) -> None:
        self._folder = root
        self._sealed = sealed
        self._settle = settle
        super().__init__({}, session, root=self._folder)

    @property
    def rank_name(self) -> str:
        """The name of this rank, which another number of ranks does not have."""
        return f"rank-{self._group.rank}-of-{self._group.size}"

    def joined(self, own: dict[str, str]) -> dict[str, str]:
        """What all ranks give."""
        parts = self._group.gather(own, dict[str, str])
        return {name: value for part in parts for name, value in part.items()}

    def _has_earlier(self, step: int) -> bool:
        self._settle()
        if self._sealed is None:
            return super()._has_earlier(step)
        return not self._group.rank and seals.has_good(self._folder, *self._sealed, below=step)

    def _quarantine(self, act: ActRecord) -> None:
        super()._quarantine(act)
        if self._sealed is not None and not self._group.rank:
            first = act.before_step or 0
            seals.quarantine(self._folder, *self._sealed, from_step=first, reason=act.reason)
