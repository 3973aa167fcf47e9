"""What a step of torchtitan's trainer computed, and which data it uses next.

torchtitan computes its metrics at each `log_freq`-th step, so only these are looked at. Data are
counted in batches that the loader has given; a batch that is passed over counts, too.
"""

import re
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.nn import Module

from trainer_sdk.integrations.framework_numerics import FrameworkNumerics
from trainer_sdk.integrations.framework_session import FrameworkSession
from trainer_sdk.integrations.skipped_data import skipped
from trainer_sdk.numerics.policy import NumericsPolicy

NUMERICS = "everstep_numerics"
"""The name of the statistics in a checkpoint."""
_NOT_FINITE = re.compile(r"Loss is not finite \(global_avg_loss=(.*?)\)")
"""The error by which torchtitan's trainer ends the training, before it reports its metrics."""
_DECIDED_WITHIN = 1
"""Steps after which the ranks have decided on a step."""


class TitanLoadPlanner(DefaultLoadPlanner):
    """Leaves out statistics that a checkpoint does not have: those of another number of ranks."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Note what is loaded."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        there = metadata.state_dict_metadata if metadata is not None else {}
        self.state_dict = {
            name: value
            for name, value in self.state_dict.items()
            if name in there or self.mappings[name][0] != NUMERICS
        }


class TitanNumerics(FrameworkNumerics):
    """The numerics of one trainer; its checkpoint manager makes the calls."""

    def __init__(
        self,
        run: FrameworkSession,
        policy: NumericsPolicy,
        manager: Any,
        loader: Any,
        model_parts: Sequence[Module],
    ) -> None:
        super().__init__(run, policy)
        self._wait_for_saves = manager.maybe_wait_for_saving
        self.open(manager.folder)
        self._loader = loader
        self._state = {f"model_{number}": part for number, part in enumerate(model_parts)}
        self._metrics: tuple[Any, Any] | None = None
        self._not_finite_since: int | None = None
        self._begin = 0

    def settle(self) -> None:
        """Wait until all checkpoints so far are written."""
        self._wait_for_saves()

    def begin(self, trainer: Any, *, is_loaded: bool) -> None:
        """Note the position, pass over skipped data, and follow the metrics."""
        if self._has_position and (is_loaded or self.spans):
            iter(self._loader)  # before, the loader does not know where it goes on
            self.pass_over()
            self._loader.load_state_dict(self._loader.state_dict())
        processor = getattr(trainer, "metrics_processor", None)
        if processor is None:
            return
        plain = processor.log

        def log(step: int, loss: float, *given: Any, **named: Any) -> None:
            norm = given[1] if len(given) > 1 else named.get("grad_norm")
            self._metrics, self._not_finite_since = (loss, norm), None
            plain(step, loss, *given, **named)

        processor.log = log
        if self._policy.unexpected != "observe":
            self._follow_steps(trainer)

    def _follow_steps(self, trainer: Any) -> None:
        """Have a loss that is not finite be decided here, in place of the end of the training."""
        plain = trainer.train_step

        def train_step(*given: Any, **named: Any) -> None:
            try:
                plain(*given, **named)
            except RuntimeError as error:
                loss = _NOT_FINITE.match(str(error))
                since = self._not_finite_since or trainer.step
                if loss is None or trainer.step > since + _DECIDED_WITHIN:
                    raise  # what was decided is to go on, and torchtitan does not
                self._metrics, self._not_finite_since = (float(loss[1]), None), since

        trainer.train_step = train_step

    def step(self, step: int, *, is_last: bool) -> None:
        """Look at a finished step, before it is saved."""
        (loss, norm), self._metrics = self._metrics or (None, None), None
        data = (self._begin, self._position) if self._has_position else None
        self.look(step, self._state, loss=loss, grad_norm=norm, data=data)
        if is_last:
            self.finish()

    def pass_over(self) -> None:
        """Have the loader go on behind the data that nobody trains on."""
        if not self._has_position:
            return
        while skipped(self._position, self._position + 1, self.spans):
            next(self._loader._iterator)  # noqa: SLF001 - the trainer has an iterator of it
        self._begin = self._position

    @property
    def _has_position(self) -> bool:
        return hasattr(self._loader, "_iterator")

    @property
    def _position(self) -> int:
        """How many batches the loader has given on this rank, over all rounds."""
        iterator = self._loader._iterator  # noqa: SLF001 - torchdata has no public name
        return 0 if iterator is None else int(iterator._num_yielded)  # noqa: SLF001
