"""What ranks do together about a judged step: go back, pass over data, move, stop, exclude a node.

Each act is recorded in `numerics.json` before any rank acts on it.
"""

import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from trainer_sdk.checkpoint.checkpointer import Checkpointer
from trainer_sdk.checkpoint.events import Reporter
from trainer_sdk.checkpoint.job_context import read_job_context
from trainer_sdk.checkpoint.rank_group import group_of_all
from trainer_sdk.checkpoint.restore.quarantine import SuspectStates, quarantine_suspects
from trainer_sdk.checkpoint.storage import StorageError, lasting, storage_for
from trainer_sdk.checkpoint.storage.checkpoints import stored_checkpoints
from trainer_sdk.environment import environ
from trainer_sdk.numerics.data import Batches
from trainer_sdk.numerics.skips import ActRecord, Positions, Skips
from trainer_sdk.rank_session import Session

MOVE, STOP = 16, 17
"""Exit codes: start again on other nodes; end, and do not start again."""
_ENDED_WITHIN_S = 600.0
_LOOK_EVERY_S = 0.1
_ANY_COURSE: Final = (1 << 62, 0)


class RestartNeededError(Exception):
    """The training must start again from an older checkpoint, and nothing has ended this rank."""


@dataclass(frozen=True, slots=True)
class RollbackResult:
    """Where the training goes on."""

    to_step: int | None
    """After this step; None if it was refused."""
    refusal: str = ""


class Rollback:
    """The acts of a training. All ranks make it, and each call of it, together.

    With a `checkpointer` it goes back in place. Without, the script restores from `root` by its own
    means: suspect checkpoints there are quarantined, and another round is asked for.
    """

    def __init__(
        self,
        state: MutableMapping[str, Any],
        session: Session,
        *,
        checkpointer: Checkpointer | None = None,
        root: str = "",
    ) -> None:
        self._state = state
        self._session = session
        self._checkpointer = checkpointer
        self._group = group_of_all(environ.get("WORLD_SIZE", ""))
        self._storage = storage_for(lasting(root)) if root and checkpointer is None else None
        self.skips = (
            Skips(self._storage, self._group) if checkpointer is None else checkpointer.acts()
        )
        """The acts of the job so far, and the data that nobody trains on."""
        if checkpointer is None and self.skips.unfinished:
            self._finish_killed()

    @property
    def is_in_place(self) -> bool:
        """Whether `back_to` returns, and the training goes on in this process."""
        return self._checkpointer is not None

    def back_to(  # noqa: PLR0913 - what is recorded of an act, and what is reported
        self,
        moved_at: int,
        batches: Batches[Any],
        *,
        case: str,
        step: int,
        reason: str,
        samples: Positions | None = None,
        is_skip: bool = True,
        before_restart: Callable[[], None] = lambda: None,
    ) -> RollbackResult:
        """Go back to the newest checkpoint with a step below `moved_at`.

        With `is_skip`, nobody trains on `samples` again.

        In place, the caller goes on with the next batch. Otherwise it does not return, unless it is
        refused; `before_restart` is called before the ranks end.
        """
        action = "skip" if is_skip and samples is not None else "rollback"
        act = record(case, action, step, reason, before_step=moved_at, samples=samples)
        if self._checkpointer is None:
            return RollbackResult(None, self._restart(act, before_restart))
        restored = self._checkpointer.roll_back(self._state, act, self.skips)
        if isinstance(restored, str):
            return RollbackResult(None, restored)
        batches.rewind(restored.step, self.skips.spans)
        return RollbackResult(restored.step)

    def exclude(self, act: ActRecord, ranks: Sequence[int], before: Callable[[], None]) -> str:
        """Ask that the nodes of these ranks leave; returns why the act was refused, or nothing.

        Under an agent it does not return then: the round ends, and the next one restores. If the
        act has a `before_step`, that restore quarantines checkpoints from there on.
        """
        if why := self.skips.add(self._on_course(act)):
            return why
        before()
        if self._group.rank in ranks:
            self._ask("exclude", act.reason)
        if self._session.is_watched:
            self._await_end(act.reason)
        return ""

    def move(self, act: ActRecord, after_step: int, ranks: Sequence[int] = ()) -> str:
        """Save the state, and exit so that the ranks start again on other nodes.

        There they make the step after `after_step` again, and compare it with what the act keeps.

        The ranks with the result exit first: then theirs is the node that is left out, if one can
        be. Returns why the act was refused; otherwise it does not return.
        """
        if self._checkpointer is None:
            return "without a checkpointer the state cannot be saved"
        save = self._checkpointer.save(after_step, self._state, wait=True)
        if not all(self._group.gather(save.durable, bool)):
            return f"the state after step {after_step} could not be saved: {save.reason}"
        why = self.skips.add(msgspec.structs.replace(act, before_step=None))
        return why or self._exit(MOVE, ranks)

    def stop(self, act: ActRecord) -> NoReturn:
        """End the job, which is not started again; `before_step` is as for `exclude`."""
        self.skips.add(self._on_course(act))
        self._exit(STOP)

    def _on_course(self, act: ActRecord) -> ActRecord:
        """The act, about all checkpoints that were saved until now."""
        if self._checkpointer is not None:
            course = self._checkpointer.course
        else:
            about = read_job_context(environ)
            course = (about.round, 0) if about.is_counted else _ANY_COURSE
        return msgspec.structs.replace(act, course=course)

    def _ask(self, kind: str, reason: str) -> None:
        self._session._request(kind, reason, origin="numerics")  # noqa: SLF001 - one package

    def _exit(self, code: int, ranks: Sequence[int] = ()) -> NoReturn:
        self._group.gather(code, int)  # the first exit ends the others
        if ranks and self._group.rank not in ranks:
            self._wait_to_end()
        raise SystemExit(code)

    def _restart(self, act: ActRecord, before: Callable[[], None]) -> str:
        """Quarantine suspect checkpoints, and have the training start again."""
        if self._storage is None:
            return "there is neither a checkpointer nor a root of checkpoints"
        assert act.before_step is not None
        if not self._group.follow(self._has_earlier(act.before_step), bool):
            return f"there is no checkpoint of a step before {act.before_step}"
        if why := self.skips.add(self._on_course(act)):
            return f"it cannot be recorded: {why}"
        self._finish()
        before()
        return self._await_restart(act.reason)

    def _finish_killed(self) -> None:
        """Finish a roll-back in which the job was killed; again, if a suspect was restored."""
        first = min(act.before_step or 0 for act in self.skips.unfinished)
        reason = self.skips.unfinished[0].reason
        self._finish()
        if self._group.highest([self._session.steps_made])[0] >= first:
            self._await_restart(reason)

    def _finish(self) -> None:
        why = ""
        try:
            for act in self.skips.unfinished:
                self._quarantine(act)
        except (StorageError, OSError) as error:
            why = str(error)
        if why := self._group.follow(why, str):
            raise RestartNeededError(f"suspect checkpoints cannot be quarantined: {why}")
        self.skips.quarantined()

    def _has_earlier(self, step: int) -> bool:
        """Whether there is a checkpoint of an earlier step; what rank 0 returns counts."""
        return self._storage is not None and any(
            there.step < step and there.manifest is not None and there.quarantined is None
            for there in stored_checkpoints(self._storage)
        )

    def _quarantine(self, act: ActRecord) -> None:
        """Quarantine what a roll-back must not restore; all ranks call it."""
        images = Path(read_job_context(environ).images)
        suspects = SuspectStates(act.before_step or 0, act.course, act.reason)
        reporter = Reporter(self._group.rank, self._session._link)  # noqa: SLF001 - one package
        quarantine_suspects(suspects, images, self._storage, self._group.rank, reporter)

    def _await_restart(self, reason: str) -> NoReturn:
        if not self._group.rank:
            self._ask("restart", reason)
        self._await_end(reason)

    def _wait_to_end(self) -> None:
        """Wait for the end of the round, for some time."""
        deadline = time.monotonic() + (_ENDED_WITHIN_S if self._session.is_watched else 0.0)
        with self._session.section("roll back", "checkpoint"):
            while time.monotonic() < deadline:
                time.sleep(_LOOK_EVERY_S)

    def _await_end(self, reason: str) -> NoReturn:
        self._wait_to_end()
        raise RestartNeededError(
            f"the training must start again from an older checkpoint: {reason}; the suspect ones "
            "are quarantined"
        )


def record(
    case: str,
    action: str,
    step: int,
    reason: str,
    *,
    before_step: int | None = None,
    samples: Positions | None = None,
) -> ActRecord:
    """The record of an act that is decided now."""
    return ActRecord(
        case=case,
        action=action,
        step=step,
        reason=reason,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        before_step=before_step,
        samples=samples,
    )
