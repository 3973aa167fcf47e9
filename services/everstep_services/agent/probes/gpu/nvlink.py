"""The NVLinks of each GPU: links that have gone away, and links with repeated errors."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.messages import CheckResult
from everstep_services.agent.probes.base import CheckState, FailureClass, Look, finding
from everstep_services.agent.probes.gpu.nvml import (
    GpuGoneError,
    Load,
    Nvml,
    NvmlAwayError,
    load,
    opened,
)
from everstep_services.agent.probes.notes import note

_COUNTERS = (
    "NVML_NVLINK_ERROR_DL_REPLAY",
    "NVML_NVLINK_ERROR_DL_RECOVERY",
    "NVML_NVLINK_ERROR_DL_CRC_FLIT",
    "NVML_NVLINK_ERROR_DL_CRC_DATA",
)
"""The error counters of links up to NVLink 4."""
_FIELDS = (
    "NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS",
    "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS",
    "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS",
)
"""The error counters of NVLink 5, which lacks the others."""


@dataclass(frozen=True, slots=True)
class NvlinkCounters:
    """The links of one GPU at one moment."""

    index: int
    uuid: str
    kind: str
    """The name of the card: GPUs of one kind should have equally many links."""
    active: tuple[int, ...]
    inactive: tuple[int, ...]
    errors: Mapping[int, int]
    """Replays, recoveries and CRC errors of each active link that counts them."""
    unreadable: tuple[str, ...]


class NvlinkProbe:
    """Checks the links. A card without links, or without a bridge, does not fail."""

    name = "nvlink"
    about = "NVLinks by NVML: links that went away, errors that keep coming"
    beside_training = True

    def __init__(self, load: Load = load) -> None:
        self._load = load

    def examine(self, look: Look) -> Sequence[CheckResult]:
        """One result for each trouble, or one for each GPU without any."""
        try:
            with opened(self._load) as nvml:
                gpus = list(_read(nvml))
        except NvmlAwayError as away:
            return [away.result("nvlink")]
        # A link that was up once should be up for as long as the node is.
        boot = look.path("proc/sys/kernel/random/boot_id")
        boot_id = boot.read_text().strip() if boot.is_file() else ""
        if look.memory.get("boot") != boot_id:
            look.memory.clear()
            look.memory["boot"] = boot_id
        results = [result for links in gpus for result in _judge(look, links, gpus)]
        if not results:
            return [CheckResult(check="nvlink", state="unsupported", reason="no NVLink here")]
        return results


def _read(nvml: Nvml) -> Iterator[NvlinkCounters]:
    """The links of all GPUs that answer and have links; the check `gpu` reports the other GPUs."""
    for index in range(nvml.ask("nvmlDeviceGetCount") or 0):
        try:
            gpu = nvml.ask("nvmlDeviceGetHandleByIndex", index)
            if gpu is not None and (links := _links(nvml, index, gpu)):
                yield links
        except GpuGoneError:
            continue


def _links(nvml: Nvml, index: int, gpu: Any) -> NvlinkCounters | None:
    states = {
        link: _is_active(nvml, gpu, link) for link in range(nvml.number("NVML_NVLINK_MAX_LINKS"))
    }
    active = tuple(link for link, is_active in states.items() if is_active)
    inactive = tuple(link for link, is_active in states.items() if is_active is False)
    unreadable = nvml.take_unreadable()
    if not active and not inactive and not unreadable:
        return None
    counted = {link: _errors(nvml, gpu, link) for link in active}
    return NvlinkCounters(
        index=index,
        uuid=nvml.ask("nvmlDeviceGetUUID", gpu) or f"GPU index {index}",
        kind=nvml.ask("nvmlDeviceGetName", gpu) or "",
        active=active,
        inactive=inactive,
        errors={link: count for link, count in counted.items() if count is not None},
        unreadable=unreadable,
    )


def _is_active(nvml: Nvml, gpu: Any, link: int) -> bool | None:
    """Whether the link is up; None if the card does not have it."""
    state = nvml.ask("nvmlDeviceGetNvLinkState", gpu, link)
    if state is None:
        return None
    if state == nvml.number("NVML_FEATURE_ENABLED"):
        return True
    # A link that sleeps to save power is up, though it does not count as enabled.
    sleeping = nvml.field(gpu, "NVML_FI_DEV_NVLINK_GET_STATE", link)
    return sleeping == nvml.number("NVML_NVLINK_STATE_SLEEP")


def _errors(nvml: Nvml, gpu: Any, link: int) -> int | None:
    counts = [
        nvml.ask("nvmlDeviceGetNvLinkErrorCounter", gpu, link, nvml.number(name))
        for name in _COUNTERS
    ]
    if all(count is None for count in counts):
        counts = [nvml.field(gpu, name, link) for name in _FIELDS]
    readable = [count for count in counts if count is not None]
    return sum(readable) if readable else None


def _judge(
    look: Look, links: NvlinkCounters, gpus: Sequence[NvlinkCounters]
) -> Iterator[CheckResult]:
    notes = look.memory.setdefault(links.uuid, {"active": [], "errors": {}})
    lost = sorted(set(notes["active"]) & set(links.inactive))
    notes["active"] = sorted({*notes["active"], *links.active})
    if links.unreadable:
        reason = f"its links could not be read: {'; '.join(dict.fromkeys(links.unreadable))}"
        yield _result(links, "unknown", reason)
        return
    if not notes["active"]:
        yield _result(links, "unsupported", "its links are not connected")
        return
    troubles = [*_lost(links, lost), *_noisy(look, links, notes["errors"])]
    if not troubles:
        troubles = list(_fewer(links, gpus))
    yield from troubles or [_result(links, "ok", f"{len(links.active)} links are up")]


def _lost(links: NvlinkCounters, lost: Sequence[int]) -> Iterator[CheckResult]:
    if lost:
        yield _result(
            links,
            "failed",
            f"{_named(lost)} went down since this node was booted; reset the GPU",
            "reset",
        )


def _noisy(look: Look, links: NvlinkCounters, samples: dict[str, Any]) -> Iterator[CheckResult]:
    settings = look.settings
    limit, persistent = settings.nvlink_errors_limit, settings.persistent_looks
    for link, errors in links.errors.items():
        growth = note(
            samples.setdefault(str(link), []), errors, at=look.at, window_s=settings.nvlink_window_s
        )
        if not (looks := growth.looks_past(limit)):
            continue
        has_failed = looks >= persistent
        yield _result(
            links,
            "failed" if has_failed else "warning",
            f"link {link} had more than {limit} errors in {looks} looks of the last "
            f"{settings.nvlink_window_s:g} s (limit {persistent} looks), "
            f"{growth.total:.0f} in all",
            "drain" if has_failed else "watch",
        )


def _fewer(links: NvlinkCounters, gpus: Sequence[NvlinkCounters]) -> Iterator[CheckResult]:
    """A difference that the first look can see: another GPU of the same kind has more links."""
    most = max(len(other.active) for other in gpus if other.kind == links.kind)
    if len(links.active) < most:
        yield _result(
            links,
            "warning",
            f"{len(links.active)} links are up, and {most} on another {links.kind}; "
            f"down: {_named(links.inactive)}",
            "watch",
        )


def _named(links: Sequence[int]) -> str:
    return f"{'link' if len(links) == 1 else 'links'} {', '.join(map(str, links))}"


def _result(
    links: NvlinkCounters, state: CheckState, reason: str, failure_class: FailureClass = ""
) -> CheckResult:
    return finding("nvlink", links.uuid, state, f"GPU {links.index}: {reason}", failure_class)
