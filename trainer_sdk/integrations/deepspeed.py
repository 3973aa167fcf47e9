"""Everstep in a training with a DeepSpeed engine.

everstep = DeepSpeedRun(engine, "/ckpt")
client_state = everstep.resume()
for batch in batches:
    …
    engine.step()
    if everstep.step(client_state, save_every=500):
        break
"""

import os
from collections.abc import Mapping
from typing import Any, Protocol

from trainer_sdk.checkpoint import arguments
from trainer_sdk.integrations import seals
from trainer_sdk.integrations.framework_session import FrameworkSession, check_version
from trainer_sdk.integrations.resume import meet, newest_for_all
from trainer_sdk.integrations.sealer import Sealer

CLIENT_KEY = "everstep"
"""In DeepSpeed's client state: the values that this module saves."""
_CHECKPOINT, _PREFIX = "checkpoint", "global_step"


class Engine(Protocol):
    """The part of DeepSpeed's engine that is used."""

    global_steps: int
    global_rank: int

    def save_checkpoint(
        self, save_dir: str, tag: str | None = None, client_state: Mapping[str, Any] = ...
    ) -> Any:
        """Save; all ranks call it."""

    def load_checkpoint(self, load_dir: str, tag: str | None = None) -> tuple[Any, Any]:
        """Load; returns the path and the client state."""


class DeepSpeedRun:
    """Steps, sections and verified checkpoints of a training with a DeepSpeed engine.

    Checkpoints are `FOLDER/global_stepN`, as DeepSpeed names them, and each gets a seal.
    """

    def __init__(
        self,
        engine: Engine,
        folder: "str | os.PathLike[str]",
        *,
        total_steps: int | None = None,
    ) -> None:
        check_version("deepspeed", "0.19", "0.20")
        self._engine = engine
        self._folder = os.path.abspath(arguments.path("folder", folder))
        self._total = total_steps
        self._run = FrameworkSession("DeepSpeed")
        self._sealer = Sealer()
        self._saved_at = -1

    @property
    def should_stop(self) -> bool:
        """Whether the training must save and end; true on all ranks after the same step."""
        return self._run.should_stop

    def resume(self) -> dict[str, Any]:
        """Load the newest verified checkpoint; returns its client state, empty without one."""
        path = newest_for_all(self._folder, _PREFIX)
        client_state: dict[str, Any] = {}
        if path is not None:
            loaded, saved = self._engine.load_checkpoint(self._folder, tag=os.path.basename(path))
            if loaded is None:
                raise FileNotFoundError(f"DeepSpeed has not loaded {path}, although it is verified")
            client_state = self._client_state(path, saved or {})
        self._saved_at = self._engine.global_steps
        self._run.start_at(self._engine.global_steps, self._total)
        return client_state

    def _client_state(self, path: str, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The script's part of what DeepSpeed returns, which also has keys of its own."""
        own = saved.get(CLIENT_KEY)
        if own is None:
            return dict(saved)
        if own["step"] != self._engine.global_steps:
            raise ValueError(
                f"{path} was saved after step {own['step']}, and DeepSpeed has loaded step "
                f"{self._engine.global_steps}: the checkpoint is of another engine"
            )
        return {key: saved[key] for key in own["keys"]}

    def step(self, client_state: Mapping[str, Any] | None = None, *, save_every: int = 0) -> bool:
        """Call this after `engine.step()`; saves when a save is due. True: end the training."""
        step = self._engine.global_steps
        self._run.end_all()
        self._run.step(step)
        self._sealer.all_saved()
        must_stop = self._run.should_stop
        is_due = bool(save_every) and step % save_every == 0
        if must_stop or is_due or self._run.should_save:
            self.save(client_state)
        return must_stop

    def save(self, client_state: Mapping[str, Any] | None = None) -> None:
        """Save the present step, unless it is saved; all ranks call it."""
        step = self._engine.global_steps
        if step == self._saved_at:
            return
        self._saved_at = step
        path = os.path.join(self._folder, f"{_PREFIX}{step}")
        given = dict(client_state or {})
        whole = {**given, CLIENT_KEY: {"step": step, "keys": list(given)}}
        if self._engine.global_rank == 0:
            seals.unseal(path)
        self._run.begin(_CHECKPOINT)
        try:
            self._engine.save_checkpoint(
                self._folder, tag=os.path.basename(path), client_state=whole
            )
        finally:
            self._run.end(_CHECKPOINT)
        if self._engine.global_rank == 0:
            self._sealer.saved(path, step)

    def close(self) -> None:
        """Seal the last checkpoint; all ranks call it at the end of the training."""
        self._run.end_all()
        meet()
        self._sealer.all_saved()
        self._sealer.close()
