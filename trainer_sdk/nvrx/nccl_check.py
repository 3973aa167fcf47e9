"""What in-process restart needs of NCCL: variables, releases, and the order of time-outs."""

from collections.abc import Mapping

_OFF = frozenset({"0", "n", "no", "f", "false"})
"""As torch reads a variable that is true by default."""
_LEAST = (2, 26, 2)
_BROKEN = (2, 28, 3), (2, 28, 8)
_HEARTBEAT_S = 480.0


def troubles(
    environ: Mapping[str, str], release: tuple[int, ...] | None, hard_timeout_s: float
) -> list[str]:
    """Why restarts in the process may fail with NCCL, each with the remedy after a semicolon."""
    return [*_of_variables(environ, hard_timeout_s), *of_release(release)]


def of_release(release: tuple[int, ...] | None) -> list[str]:
    """What is known of this release of NCCL; nothing if None."""
    if release is None:
        return []
    name = ".".join(map(str, release))
    if _BROKEN[0] <= release[:3] <= _BROKEN[1]:
        return [f"NCCL {name} may crash when a communicator is aborted; install 2.28.9 or later"]
    if release < _LEAST:
        return [f"NCCL {name} is older than 2.26.2, which can abort; install a later release"]
    return []


def of_group(timeout_s: float, hard_timeout_s: float) -> str:
    """Why a group of NCCL would end the process first; empty if it would not."""
    if timeout_s > hard_timeout_s:
        return ""
    return (
        f"NCCL's watchdog ends the process after {timeout_s:g} s, the group's timeout, before "
        f"hard_timeout ({hard_timeout_s:g} s); give init_process_group a longer timeout"
    )


def _of_variables(environ: Mapping[str, str], hard_timeout_s: float) -> list[str]:
    texts = []
    if environ.get("TORCH_NCCL_RETHROW_CUDA_ERRORS", "1").lower() not in _OFF:
        texts.append(
            "NCCL's watchdog ends the process at the first CUDA error; set "
            "TORCH_NCCL_RETHROW_CUDA_ERRORS=0"
        )
    if environ.get("NCCL_NVLS_ENABLE") != "0":
        texts.append(
            "aborted communicators keep their NVLink SHARP memory, where the GPUs have it; set "
            "NCCL_NVLS_ENABLE=0"
        )
    if environ.get("NCCL_COLLNET_ENABLE") == "1":
        texts.append(
            "SHARP does not take back the resources of aborted communicators; unset "
            "NCCL_COLLNET_ENABLE"
        )
    heartbeat_s = _seconds(environ.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"))
    is_monitored = environ.get("TORCH_NCCL_ENABLE_MONITORING", "1").lower() not in _OFF
    if is_monitored and heartbeat_s <= hard_timeout_s:
        texts.append(
            f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={heartbeat_s:g} ends the process before "
            f"hard_timeout ({hard_timeout_s:g} s); raise it"
        )
    return texts


def _seconds(text: str | None) -> float:
    return float(text) if text and text.isdecimal() else _HEARTBEAT_S
