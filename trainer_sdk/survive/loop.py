"""The loop of a training that survives: each round calls `train` with the state of all ranks.

A round that fails leaves the state of this process in its memory. The warden ends the round, and
orders the next; until then this process waits. Processes of lost ranks are new, and get the state
from their replicas.
"""

import gc
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch.distributed as dist

from trainer_sdk import layout
from trainer_sdk.bootstrap.torch_exit import wait_at_exit
from trainer_sdk.checkpoint.rank_group import RankGroup, group_of_all
from trainer_sdk.environment import environ
from trainer_sdk.rank_session import Session
from trainer_sdk.sdk_log import warn, warn_once
from trainer_sdk.survive.boundary import Boundary, RoundOver
from trainer_sdk.survive.carry import needs_rebuild, rebuild
from trainer_sdk.survive.default_group import form_group, is_broken_group, leave_group
from trainer_sdk.survive.group_abort import abort_groups
from trainer_sdk.survive.heal import Healed, heal
from trainer_sdk.survive.next_round import begin_round
from trainer_sdk.survive.parked_save import save_parked
from trainer_sdk.survive.warden_link import WardenLink
from trainer_sdk.wire import SaveTogether

if TYPE_CHECKING:
    from trainer_sdk.checkpoint.checkpointer import Checkpointer

Result = TypeVar("Result")
State = dict[str, Any]
_PARK_COMES_S = 10.0
"""How long a rank whose group is broken waits for the end of the round, before it fails itself."""
_NAMED = 100


@dataclass(frozen=True, slots=True)
class SurvivalChoices:
    """The arguments of `Session.survive`."""

    build: Callable[[], State]
    checkpointer: "Callable[[], Checkpointer] | None"
    place: str
    seed: int
    park_within_s: float
    backend: str | None


def survive(
    run: Session, choices: SurvivalChoices
) -> Callable[[Callable[..., Result]], Callable[[], Result]]:
    """As `Session.survive`."""

    def decorate(train: Callable[..., Result]) -> Callable[[], Result]:
        @wraps(train)
        def surviving() -> Result:
            training = SurvivingTraining(run, choices, _opened_link(choices.park_within_s))
            try:
                return training.run(train)
            finally:
                training.close()

        return surviving

    return decorate


def _opened_link(park_within_s: float) -> WardenLink | None:
    """The connection to the warden; without one, a line tells what is missing."""
    path = environ.get(layout.SURVIVE_VARIABLE, "")
    why = "only `everstep run` keeps its process where another rank fails"
    if path and dist.is_initialized():
        why = "the script has made the process group, and `survive` must make it: leave that out"
    elif path:
        try:
            return WardenLink(path, park_within_s, partial(abort_groups, is_last=False))
        except OSError as error:
            why = f"the warden cannot be reached: {error}"
    if environ.get("LOCAL_RANK", "0") == "0":
        warn_once(f"this training does not survive the failure of a rank: {why}")
    return None


class SurvivingTraining:
    """One training in this process, through all of its rounds."""

    def __init__(self, run: Session, choices: SurvivalChoices, link: WardenLink | None) -> None:
        self._run = run
        self._choices = choices
        self._link = link
        ends_soon = (lambda: False) if link is None else (lambda: link.ends_soon)
        self._boundary = Boundary(choices.seed, self._is_over, ends_soon)
        if link is not None:
            link.step_s = lambda: self._boundary.step_s
        self._state: State | None = None
        self._saves: Checkpointer | None = None
        self._places: frozenset[str] = frozenset()
        self._hook = sys.excepthook
        run.step = self._step  # type: ignore[method-assign]
        run.start_at = self._start_at  # type: ignore[method-assign]
        run._tear = self._boundary.tear  # type: ignore[method-assign]  # noqa: SLF001 - the same package
        self._show(int(link is not None))

    def close(self) -> None:
        """Let the rest of the script end as that of any other rank."""
        self._show(0)
        del self._run.step, self._run.start_at, self._run._tear  # noqa: SLF001 - the same package
        self._boundary.close()
        if self._link is not None:
            self._link.close()

    def run(self, train: Callable[..., Result]) -> Result:
        """Train to the end, in as many rounds as it takes."""
        while True:
            try:
                return self._round(train)
            except BaseException as error:
                if not self._ends_round(error):
                    raise
                traceback.clear_frames(error.__traceback__)
            self._wait_for_next_round()

    def _show(self, survives: int) -> None:
        """Show the agent whether this process goes on after the end of its round."""
        self._run._link.words[layout.SURVIVES] = survives  # noqa: SLF001 - the same package

    def _step(self, number: int | None = None) -> int:
        """`run.step()` while the training survives."""
        step = Session.step(self._run, number)
        self._boundary.finished(step)
        return step

    def _start_at(self, step: int, *, total: int | None = None) -> None:
        """`run.start_at()`: also a `Checkpointer` calls it once it has loaded a state."""
        Session.start_at(self._run, step, total=total)
        self._boundary.moved(step)

    def _is_over(self) -> bool:
        return self._link is not None and self._link.is_over

    def _round(self, train: Callable[..., Result]) -> Result:
        owns_group = form_group(
            environ, self._choices.backend, self._is_over if self._link else None
        )
        self._boundary.rank = int(environ.get("RANK", "0"))
        self._boundary.round = int(environ.get(layout.ROUND_VARIABLE, "0"))
        state = self._built()
        group = group_of_all()
        make_saves = self._choices.checkpointer
        self._saves = None if make_saves is None else make_saves()
        healed = self._heal(state)
        if healed.origin == "fresh" and (self._boundary.is_torn or self._boundary.step is not None):
            state = self._built(is_fresh=True)
        self._boundary.begin(state, healed.step or 0, healed.made_in)
        self._places = healed.places
        if self._link is not None:
            self._show(2 if healed.is_replicated else 1)
        self._run.start_at(healed.step or 0)
        self._report(healed, group)
        arguments = () if self._saves is None else (self._saves,)
        result = train(state, healed.step or 0, *arguments)
        self._finish(group, owns_group=owns_group)
        return result

    def _built(self, *, is_fresh: bool = False) -> State:
        """The state of this round; after the first round that of the last one."""
        if self._state is None or is_fresh:
            self._state = self._build_anew()
        elif needs_rebuild(self._state):
            former, self._state = self._state, None
            self._boundary.forget(has_state=True)
            self._state, unfit = rebuild(self._build_anew, former)
            if unfit:
                warn(f"this rank cannot keep its state: {unfit}", self._boundary.rank)
                self._boundary.forget(has_state=False)
        return self._state

    def _build_anew(self) -> State:
        self._boundary.seed_build()
        state = self._choices.build()
        if not isinstance(state, dict):
            raise TypeError(f"build must return a dict, and has returned {type(state)}")
        return state

    def _heal(self, state: State) -> Healed:
        """Agree with all ranks on a step, and have its state."""
        boundary = self._boundary
        return heal(
            state,
            step=boundary.step,
            is_torn=boundary.is_torn,
            made_in=boundary.made_in,
            round=boundary.round,
            place=self._choices.place,
            images=self._saves,
            begin_change=boundary.tear,
        )

    def _report(self, healed: Healed, group: RankGroup) -> None:
        """Tell the agent from where this rank has its state; rank 0 tells of all ranks."""
        if healed.is_first or (group.rank and healed.origin == "own"):
            return
        fields: dict[str, object] = {
            "origin": healed.origin,
            "step": healed.step,
            "donor": healed.donor,
            "size_bytes": healed.size_bytes,
            "took_s": healed.took_s,
        }
        if not group.rank:
            fields |= {
                "kept": healed.kept,
                "taken": healed.taken,
                "replaced": len(healed.replaced),
                "replaced_ranks": healed.replaced[:_NAMED],
                "reason": healed.reason,
            }
        link = self._run._link  # noqa: SLF001 - the same package
        link.send("healed", msgspec.json.encode(fields).decode()[1:-1])

    def _finish(self, group: RankGroup, *, owns_group: bool) -> None:
        """Wait for the others, who may fail in their last step, and need this rank again."""
        if self._link is not None:
            with self._run.section("others finish", "checkpoint"):
                group.highest([0])
            self._show(0)
            self._link.close()
        if owns_group:
            wait_at_exit()
            dist.destroy_process_group()

    def _ends_round(self, error: BaseException) -> bool:
        """Whether the round has ended, and not this training."""
        link = self._link
        if link is None or isinstance(error, (SystemExit, KeyboardInterrupt, GeneratorExit)):
            return False
        if isinstance(error, RoundOver) or link.is_over:
            return True
        return is_broken_group(error) and link.await_park(_PARK_COMES_S)

    def _wait_for_next_round(self) -> None:
        """Leave the groups of this round, and wait for the next."""
        assert self._link is not None, "without it no round ends"
        self._leave_round()
        self._abandon_saves()
        while isinstance(order := self._link.next_order(), SaveTogether):
            try:
                self._save_parked(order)
            except Exception as error:  # noqa: BLE001 - a round may still follow
                warn(f"no state is saved after the end of the round: {error}", order.rank)
            self._leave_round()
        begin_round(self._run, order)

    def _leave_round(self) -> None:
        assert self._link is not None, "without it no round ends"
        self._link.leave()
        leave_group()
        self._boundary.put_back()
        self._link.park(self._boundary.step, is_torn=self._boundary.is_torn)
        sys.excepthook = self._hook  # each group that torch makes puts one more around it
        gc.collect()  # DDP's reducer: its hooks stay on the parameters as long as it lives

    def _save_parked(self, order: SaveTogether) -> None:
        state, make_saves = self._state, self._choices.checkpointer
        if state is None or make_saves is None:
            return
        save_parked(
            order,
            state,
            self._places,
            make_saves,
            self._choices.backend,
            partial(self._agree_parked, state),
        )

    def _agree_parked(self, state: State) -> Healed:
        healed = self._heal(state)
        if healed.origin == "rank":
            self._boundary.begin(state, healed.step or 0, healed.made_in)
        return healed

    def _abandon_saves(self) -> None:
        saves, self._saves = self._saves, None
        if saves is not None:
            try:
                saves._close(abort=True, is_failing=True)  # noqa: SLF001 - the same package
            except Exception as error:  # noqa: BLE001 - a `finalize` function of the training
                warn(f"a save of the last round has failed: {type(error).__name__}: {error}")
