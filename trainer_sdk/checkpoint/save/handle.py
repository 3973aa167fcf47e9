"""What a script is given for a save: what has become of it, and a way to wait for that."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, get_args

from trainer_sdk.checkpoint import arguments
from trainer_sdk.checkpoint.save.request import NotBegun, Save, SaveError

SaveState = Literal["skipped", "staged", "written", "committed", "failed"]
"""What has become of a save.

- `skipped`: it was not begun, and that is no failure; `reason` says why.
- `staged`: its values are those at the call; they are on their way to where they last.
- `written`: this rank's part lasts; other ranks' parts may be missing.
- `committed`: it can be restored. Without a global tier: this rank's state is whole in memory.
  A save of this step that was there before stays as it is; then `reason` tells of it.
- `failed`: it comes to nothing; `error` says why.
"""
SAVE_STATES: tuple[SaveState, ...] = get_args(SaveState)

Waiting = Callable[[], AbstractContextManager[object]]


class SaveHandle:
    """One save: true if it was begun. Its properties never wait; any thread may ask."""

    def __init__(
        self,
        save: Save | NotBegun,
        hurry: Callable[[], None],
        waiting: Waiting = nullcontext,
    ) -> None:
        self._save = save
        self._hurry = hurry
        self._waiting = waiting
        self._pid = os.getpid()

    @property
    def step(self) -> int | None:
        """The step that it saves; None for a single file."""
        return self._save.step

    @property
    def number(self) -> int:
        """Its number among the saves of this rank, as `maybe_finalize` returns it; 0: not begun."""
        return self._save.number if isinstance(self._save, Save) else 0

    @property
    def state(self) -> SaveState:
        """What has become of it by now."""
        if isinstance(self._save, NotBegun):
            return "skipped" if self._save.error is None else "failed"
        if isinstance(self._save.result, SaveError):
            return "failed"
        if self._save.result is not None:
            return "committed"
        return "written" if self._save.is_written else "staged"

    @property
    def durable(self) -> bool:
        """The checkpoint can be restored, as far as this rank can know: it is `committed`."""
        return self.state == "committed"

    @property
    def error(self) -> SaveError | None:
        """Why it has failed, if it has."""
        if isinstance(self._save, NotBegun):
            return self._save.error
        return self._save.result if isinstance(self._save.result, SaveError) else None

    @property
    def reason(self) -> str:
        """Why it was skipped or has failed, or what there is in its place; else empty."""
        if isinstance(self._save, NotBegun):
            return self._save.reason
        result = self._save.result
        if isinstance(result, SaveError):
            return result.failed.reason
        return result.given_up if result is not None else ""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is committed, or never will be; whether it is `durable`.

        It is written as fast as can be from now on. Without `timeout_s`, the bounds of `Timeouts`
        end each save. The agent does not take this wait for a stall.
        """
        timeout_s = None if timeout_s is None else arguments.seconds("timeout_s", timeout_s)
        save = self._save
        if isinstance(save, Save) and not save.over.is_set() and os.getpid() == self._pid:
            self._hurry()
            with self._waiting():
                save.over.wait(timeout_s)
        return self.durable

    def __bool__(self) -> bool:
        return isinstance(self._save, Save)

    def __repr__(self) -> str:
        about = f", {self.reason!r}" if self.reason else ""
        what = "file" if self.step is None else f"step {self.step}"
        return f"<SaveHandle {what}: {self.state}{about}>"
