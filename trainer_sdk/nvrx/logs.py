"""NVRx's log utilities: lines go to stderr, which the agent keeps for each rank."""

import logging
import os
import sys
import time
from collections.abc import Callable

from trainer_sdk.environment import environ
from trainer_sdk.sdk_log import warn_once

_FORMAT = "%(asctime)s [%(levelname)s] [{place}] %(name)s: %(message)s"
_LOOK_EVERY_S = 1.0


class LogConfig:
    """What NVRx's logger takes from the environment."""

    name = "nvrx"

    @classmethod
    def get_node_id(cls) -> str:
        """The node."""
        return _variable("EVERSTEP_NODE") or os.uname().nodename

    @classmethod
    def get_workload_rank(cls) -> int | None:
        """The rank."""
        return _number("RANK")

    @classmethod
    def get_workload_local_rank(cls) -> int | None:
        """The rank on its node."""
        return _number("LOCAL_RANK")

    @classmethod
    def get_infra_rank(cls) -> int | None:
        """The place of the node."""
        return _number("SLURM_PROCID")

    @classmethod
    def get_infra_local_rank(cls) -> int | None:
        """The place of the task on its node."""
        return _number("SLURM_LOCALID")

    @classmethod
    def get_log_level(cls) -> int:
        """DEBUG with NVRX_LOG_DEBUG, else INFO."""
        return logging.DEBUG if _truth("NVRX_LOG_DEBUG") else logging.INFO

    @classmethod
    def get_log_to_stdout_cfg(cls) -> bool:
        """Whether NVRX_LOG_TO_STDOUT asks for stdout."""
        return _truth("NVRX_LOG_TO_STDOUT")

    @classmethod
    def get_node_local_tmp_dir(cls, node_local_tmp_dir: str | None = None) -> str | None:
        """The folder that was asked for; nothing is written there."""
        return node_local_tmp_dir or _variable("NVRX_NODE_LOCAL_TMPDIR") or None


class LogManager:
    """Has the logger `nvrx`."""

    def __init__(
        self,
        node_local_tmp_dir: str | None = None,
        node_local_tmp_prefix: str | None = None,
        log_file: str | None = None,
    ) -> None:
        self._logger = setup_logger(
            node_local_tmp_dir, node_local_tmp_prefix=node_local_tmp_prefix, log_file=log_file
        )

    @property
    def node_local_tmp_logging_enabled(self) -> bool:
        """False: the agent collects the lines of a node."""
        return False

    @property
    def workload_rank(self) -> int | None:
        """The rank."""
        return LogConfig.get_workload_rank()

    @property
    def workload_local_rank(self) -> int | None:
        """The rank on its node."""
        return LogConfig.get_workload_local_rank()

    @property
    def infra_rank(self) -> int | None:
        """The place of the node."""
        return LogConfig.get_infra_rank()

    @property
    def infra_local_rank(self) -> int | None:
        """The place of the task on its node."""
        return LogConfig.get_infra_local_rank()

    @property
    def logger(self) -> logging.Logger:
        """The logger `nvrx`."""
        return self._logger


def setup_logger(
    node_local_tmp_dir: str | None = None,
    force_reset: bool = False,
    node_local_tmp_prefix: str | None = None,
    log_file: str | None = None,
) -> logging.Logger:
    """The logger `nvrx`, with a handler; a second call changes nothing without `force_reset`."""
    del node_local_tmp_prefix
    logger = logging.getLogger(LogConfig.name)
    if LogConfig.get_node_local_tmp_dir(node_local_tmp_dir):
        warn_once(
            "NVRX_NODE_LOCAL_TMPDIR and node_local_tmp_dir are not used: the agent keeps every "
            "line of every rank (`everstep logs`)"
        )
    if logger.handlers and not force_reset:
        return logger
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()
    handler = _handler(log_file)
    rank = LogConfig.get_workload_rank()
    place = LogConfig.get_node_id() + ("" if rank is None else f":{rank}")
    handler.setFormatter(logging.Formatter(_FORMAT.format(place=place.replace("%", "%%"))))
    logger.addHandler(handler)
    logger.setLevel(LogConfig.get_log_level())
    logger.propagate = False
    return logger


def job_user_from_env() -> str | None:
    """The user of the job."""
    return _variable("SLURM_JOB_USER") or _variable("USER") or None


def job_id_from_env() -> str | None:
    """The job of the scheduler, by its array where there is one."""
    return _variable("SLURM_ARRAY_JOB_ID") or _variable("SLURM_JOB_ID") or None


def read_pids_from_file(pidfile: str) -> list[int]:
    """The process ids in a file, one a line."""
    try:
        with open(pidfile, encoding="ascii", errors="replace") as file:
            return [int(line) for line in map(str.strip, file) if line.isdecimal()]
    except OSError:
        return []


def wait_for_pids(pids: list[int], pause: Callable[[float], None] = time.sleep) -> None:
    """Wait until none of these processes is there."""
    left = list(pids)
    while left := [pid for pid in left if os.path.exists(f"/proc/{pid}")]:
        pause(_LOOK_EVERY_S)


def wait_daemon(pidfile: str) -> None:
    """Wait until none of the processes in a file is there; Everstep itself leaves no daemon."""
    wait_for_pids(read_pids_from_file(pidfile))


def _handler(log_file: str | None) -> logging.Handler:
    if log_file:
        return logging.FileHandler(log_file, mode="a", encoding="utf-8")
    return logging.StreamHandler(sys.stdout if LogConfig.get_log_to_stdout_cfg() else sys.stderr)


def _variable(name: str) -> str:
    return environ.get(name, "")


def _number(name: str) -> int | None:
    text = _variable(name)
    return int(text) if text.isdecimal() else None


def _truth(name: str) -> bool:
    return _variable(name).lower() in {"1", "true", "yes", "on"}
