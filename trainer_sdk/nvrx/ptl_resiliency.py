"""NVRx's callbacks for Lightning: the supervision of ranks, over the client here."""

import json
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from trainer_sdk.checkpoint.rank_group import group_of_all
from trainer_sdk.environment import environ
from trainer_sdk.nvrx.fault_tolerance import (
    RankMonitorClient,
    WorkloadAction,
    WorkloadControlRequest,
)
from trainer_sdk.nvrx.ptl_straggler import Callback
from trainer_sdk.nvrx.ptl_straggler import StragglerDetectionCallback as StragglerDetectionCallback
from trainer_sdk.sdk_log import warn_once

FINISHED_VARIABLE = "FAULT_TOL_FINISHED_FLAG_FILE"
_FAULTS = ("random", "rank_killed", "rank_hung")
_LEAST_ITERATIONS = 2
ExceptionPolicy = Callable[[BaseException], WorkloadControlRequest]


@dataclass
class SimulatedFaultParams:
    """A fault that a rank makes on purpose, some time after the start."""

    fault_type: str
    base_delay: float
    rand_delay: float = 0.0
    rank_to_fail: int | None = None

    def __post_init__(self) -> None:
        if self.fault_type not in _FAULTS:
            raise ValueError(f"fault_type {self.fault_type!r}: it is one of {', '.join(_FAULTS)}")


def setup_simulated_fault(fault_desc: SimulatedFaultParams) -> None:
    """Make the fault later, in one rank; all ranks call it together."""
    group = group_of_all()
    draw = random.Random()  # noqa: S311 - which rank fails is not a secret
    named = fault_desc.rank_to_fail
    chosen = draw.randrange(group.size) if named is None else named
    kind = draw.choice(_FAULTS[1:]) if fault_desc.fault_type == "random" else fault_desc.fault_type
    delay_s = fault_desc.base_delay + draw.random() * fault_desc.rand_delay
    rank, kind, delay_s = group.follow((chosen, kind, delay_s), tuple[int, str, float])
    if rank == group.rank:
        number = signal.SIGKILL if kind == "rank_killed" else signal.SIGSTOP
        threading.Thread(target=_signal_later, args=(delay_s, number), daemon=True).start()


def _signal_later(delay_s: float, number: signal.Signals) -> None:
    time.sleep(delay_s)
    os.kill(os.getpid(), number)


class _Monitored(Callback):
    """The common part of both callbacks: client, saved limits, the flag of a finished training."""

    TIMEOUTS_FILENAME = "_ft_state.json"
    FT_DIR_NAME = "ft_state"

    def __init__(
        self,
        autoresume: bool,
        calculate_timeouts: bool,
        simulated_fault_params: "SimulatedFaultParams | Mapping[str, Any] | None" = None,
        exp_dir: "str | Path | None" = None,
        logger_name: str | None = "nemo_logger.FaultToleranceCallback",
    ) -> None:
        self.autoresume = autoresume
        self.calculate_timeouts = calculate_timeouts
        if isinstance(simulated_fault_params, Mapping):
            simulated_fault_params = SimulatedFaultParams(**simulated_fault_params)
        self.simulated_fault_params = simulated_fault_params
        self.exp_dir = None if exp_dir is None else Path(exp_dir)
        self._logger = logging.getLogger(logger_name or __name__)
        self.fault_tol_client: RankMonitorClient | None = None
        self.iterations = 0
        self.has_loaded = self.has_saved = False
        self.error: BaseException | None = None
        self._state_file = Path()
        self._is_first = True
        if autoresume and not environ.get(FINISHED_VARIABLE):
            raise RuntimeError(
                f"autoresume needs the variable {FINISHED_VARIABLE}: the file to touch"
            )

    @property
    def is_initialized(self) -> bool:
        """Whether monitoring has begun."""
        return self.fault_tol_client is not None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin, for a training."""
        del pl_module
        if stage != "fit" or self.is_initialized:
            return
        self._is_first = trainer.global_rank == 0
        folder = self.exp_dir or Path(trainer.default_root_dir)
        self._state_file = folder / self.FT_DIR_NAME / self.TIMEOUTS_FILENAME
        self.fault_tol_client = client = RankMonitorClient()
        client.init_workload_monitoring()
        if self.calculate_timeouts and self._state_file.is_file():
            client.load_state_dict(json.loads(self._state_file.read_text(encoding="utf-8")))
        limits = client.hb_timeouts, client.section_timeouts
        self._report(f"Fault tolerance client initialized. Timeouts: {limits}")
        if self.simulated_fault_params is not None:
            setup_simulated_fault(self.simulated_fault_params)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End; a finished training touches its flag file."""
        del pl_module, stage
        if self.fault_tol_client is None:
            return
        if self.error is None:
            self._update(is_final=True)
        if self.autoresume and self._is_finished(trainer):
            self._finish()
        self.fault_tol_client.shutdown_workload_monitoring()
        self.fault_tol_client = None

    def on_load_checkpoint(self, *_: Any, **__: Any) -> None:
        """Note that the training has resumed."""
        self.has_loaded = True

    def on_save_checkpoint(self, *_: Any, **__: Any) -> None:
        """Note that the training saves."""
        self.has_saved = True

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Note the error, unless it is a regular end."""
        del trainer, pl_module
        if not (isinstance(exception, SystemExit) and not exception.code):
            self.error = exception

    def _update(self, *, is_final: bool) -> None:
        raise NotImplementedError

    def _calculated(self, calculate: Callable[[], bool]) -> None:
        assert self.fault_tol_client is not None
        self._report("Updating FT timeouts...")
        if not calculate():
            return
        client = self.fault_tol_client
        limits = client.hb_timeouts, client.section_timeouts
        self._report(f"Updated FT timeouts. New values: {limits}")
        if self._is_first:
            self._state_file.parent.mkdir(parents=True, exist_ok=True)
            self._state_file.write_text(json.dumps(client.state_dict()), encoding="utf-8")

    def _is_finished(self, trainer: Any) -> bool:
        """Whether nothing is left to do: the end was reached, or there was no further iteration."""
        if self.error is not None:
            return False
        steps, epochs = trainer.max_steps, trainer.max_epochs
        reached = (steps is not None and 0 <= steps <= trainer.global_step) or (
            epochs is not None and 0 <= epochs <= trainer.current_epoch
        )
        return reached or self.iterations <= 1

    def _finish(self) -> None:
        if self._is_first:
            Path(environ[FINISHED_VARIABLE]).touch()  # NVRx's variable

    def _report(self, text: str) -> None:
        if self._is_first:
            self._logger.info("[%s@rank0] %s", type(self).__name__, text)


class FaultToleranceCallback(_Monitored):
    """Heartbeats after each batch."""

    def on_train_start(self, *_: Any, **__: Any) -> None:
        """Beat."""
        if self.fault_tol_client is not None:
            self.fault_tol_client.send_heartbeat()

    on_validation_batch_end = on_train_start

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """Beat, and count."""
        self.iterations += 1
        self.on_train_start()

    def _update(self, *, is_final: bool) -> None:
        is_typical = self.has_loaded and self.has_saved and self.iterations >= _LEAST_ITERATIONS
        if self.calculate_timeouts and is_typical and is_final:
            assert self.fault_tol_client is not None
            self._calculated(self.fault_tol_client.calculate_and_set_hb_timeouts)


class FaultToleranceSectionsCallback(_Monitored):
    """Sections `setup`, `step` and `checkpointing`; a validation step is `validation`."""

    TIMEOUTS_FILENAME = "_ft_state_.json"
    MIN_TR_ITERS_FOR_STEP_TIMEOUT_UPDATE = 16

    def __init__(
        self,
        autoresume: bool,
        calculate_timeouts: bool,
        simulated_fault_params: "SimulatedFaultParams | Mapping[str, Any] | None" = None,
        exp_dir: "str | Path | None" = None,
        logger_name: str | None = "nemo_logger.FaultToleranceCallback",
        exc_handling_policy: ExceptionPolicy | None = None,
    ) -> None:
        super().__init__(
            autoresume, calculate_timeouts, simulated_fault_params, exp_dir, logger_name
        )
        self.exc_handling_policy = exc_handling_policy
        self._is_setting_up = False
        self._depth = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin, in the section `setup`."""
        is_new = not self.is_initialized
        super().setup(trainer, pl_module, stage)
        if self.fault_tol_client is None or not is_new:
            return
        named = set((self.fault_tol_client.cfg or _NOTHING).rank_section_timeouts)
        if unknown := named - {"setup", "step", "checkpointing", "validation"}:
            warn_once(f"this callback has no sections {sorted(unknown)}: limits of them do not act")
        strategy = trainer.strategy
        for owner, name, section in (
            (strategy, "training_step", "step"),
            (strategy, "validation_step", "validation"),
            (strategy, "save_checkpoint", "checkpointing"),
            (strategy, "remove_checkpoint", "checkpointing"),
            (trainer.strategy.checkpoint_io, "maybe_finalize_save_checkpoint", "checkpointing"),
        ):
            if callable(getattr(owner, name, None)):
                setattr(owner, name, self._inside(getattr(owner, name), section))
        self.fault_tol_client.start_section("setup")
        self._is_setting_up = True

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """Leave the section `setup`."""
        if self._is_setting_up and self.fault_tol_client is not None:
            self._is_setting_up = False
            self.fault_tol_client.end_section("setup")

    on_validation_batch_start = on_train_batch_start

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """Count."""
        self.iterations += 1

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Ask for what the policy says about the error."""
        super().on_exception(trainer, pl_module, exception)
        if self.exc_handling_policy is None or self.fault_tol_client is None:
            return
        request = self.exc_handling_policy(exception)
        self.fault_tol_client.send_workload_control_request(request)
        if request.action is WorkloadAction.ShutdownWorkload and self.autoresume:
            self._finish()

    def _inside(self, call: Callable[..., Any], section: str) -> Callable[..., Any]:
        @wraps(call)
        def measured(*args: Any, **kwargs: Any) -> Any:
            client = self.fault_tol_client
            if client is None or (section == "checkpointing" and self._depth):
                return call(*args, **kwargs)
            self.on_train_batch_start()
            self._depth += 1
            client.start_section(section)
            try:
                return call(*args, **kwargs)
            finally:
                client.end_section(section)
                self._depth -= 1

        return measured

    def _update(self, *, is_final: bool) -> None:
        if not self.calculate_timeouts:
            return
        is_steady = self.iterations > self.MIN_TR_ITERS_FOR_STEP_TIMEOUT_UPDATE
        seen = {"setup": self.has_loaded, "step": is_steady, "checkpointing": self.has_saved}
        sections = [name for name, is_typical in seen.items() if is_typical]
        if sections:
            assert self.fault_tol_client is not None
            is_whole = is_final and all(seen.values())
            self._calculated(lambda: self._of_sections(sections, is_whole))

    def _of_sections(self, sections: Collection[str], is_whole: bool) -> bool:
        assert self.fault_tol_client is not None
        return self.fault_tol_client.calculate_and_set_section_timeouts(
            sections, calc_out_of_section=is_whole, skip_if_not_ready=True
        )


class _Nothing:
    rank_section_timeouts: Mapping[str, float | None] = {}


_NOTHING = _Nothing()
