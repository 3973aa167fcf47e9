"""Check `nic`: InfiniBand and RoCE ports that have left the network, or that flap."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from everstep.messages import CheckResult
from everstep_services.agent.probes.base import Look, finding
from everstep_services.agent.probes.notes import note

_result = partial(finding, "nic")
_NVIDIA = "0x10de"
_DISPLAY = "0x03"
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def gpu_folders(root: Path) -> dict[str, PurePath]:
    """The real folder of each NVIDIA GPU, by its PCI address, in NVML's order."""
    return {
        folder.name: folder.resolve()
        for folder in sorted((root / "sys/bus/pci/devices").glob("*"))
        if _says(folder / "vendor", _NVIDIA) and _says(folder / "class", _DISPLAY)
    }


def _says(path: Path, beginning: str) -> bool:
    try:
        return path.read_text().startswith(beginning)
    except OSError:
        return False


def nearest_gpus(
    gpus: Mapping[str, PurePath], adapters: Mapping[str, PurePath]
) -> dict[str, tuple[str, ...]]:
    """For each adapter, the GPUs to which no other adapter is nearer.

    Nearer means more shared bridges. A shared root complex alone does not count, and adapters
    that are equally near share the GPU.
    """
    served: dict[str, list[str]] = {name: [] for name in adapters}
    for gpu, place in gpus.items():
        shared = {name: _shared(place, adapter) for name, adapter in adapters.items()}
        most = max(shared.values(), default=0)
        for name, bridges in shared.items():
            if bridges == most > 0:
                served[name].append(gpu)
    return {name: tuple(near) for name, near in served.items()}


def _shared(place: PurePath, other: PurePath) -> int:
    pairs = zip(_bridges(place), _bridges(other), strict=False)
    count = 0
    for mine, theirs in pairs:
        if mine != theirs:
            break
        count += 1
    return count


def _bridges(place: PurePath) -> Iterator[str]:
    return (part for part in place.parts if _ADDRESS.fullmatch(part))


def served_by(name: str, near: Mapping[str, tuple[str, ...]], gpus: Sequence[str]) -> str:
    """For people: the GPUs that an adapter serves; empty if none is near."""
    indexes = ", ".join(str(gpus.index(gpu)) for gpu in near.get(name, ()))
    return f"; nearest to GPU {indexes}, as a rule of the same local rank" if indexes else ""


_REMEMBERED_S = 7 * 86400.0
"""A port that was not active for this long has been taken out of use."""
_PATIENCE = 2
"""In this many looks, a port may be coming up, or its adapter restarting, before it has failed."""


@dataclass(frozen=True, slots=True)
class Port:
    """One port at one moment."""

    name: str
    """`mlx5_0/1`."""
    state: str
    """`ACTIVE`, `DOWN`, `INIT` …; empty when it could not be read."""
    physical: str
    rate_gbit: float | None
    downs: int | None
    """How often it has lost its link since its driver was loaded."""

    @property
    def adapter(self) -> str:
        """The adapter of the port."""
        return self.name.partition("/")[0]


class NicProbe:
    """Only a port that has been active can fail; an unreadable value does not fail."""

    name = "nic"
    about = "InfiniBand and RoCE ports: state, lost links, rate, and the GPUs near them"
    beside_training = True

    def examine(self, look: Look) -> Sequence[CheckResult]:
        """One result for each trouble, or one for each port without any."""
        ports = list(_ports(look))
        noted: dict[str, Any] = look.memory.setdefault("ports", {})
        for name in [name for name in noted if _is_forgotten(look, name, noted[name])]:
            del noted[name]
        if not ports:
            return [_none(noted)]
        where = _Where(look.root, ports)
        results = [result for port in ports for result in _judge(look, port, noted, where)]
        results += _vanished(ports, noted)
        if not results:
            return [CheckResult(check="nic", state="unsupported", reason="no port has been active")]
        return results


def _is_forgotten(look: Look, name: str, before: Mapping[str, Any]) -> bool:
    is_ignored = name.partition("/")[0] in look.settings.nic_ignored
    return is_ignored or bool(look.at - before["active_at"] > _REMEMBERED_S)


class _Where:
    """Names the GPUs near an adapter."""

    def __init__(self, root: Path, ports: Sequence[Port]) -> None:
        gpus = gpu_folders(root)
        devices = {
            port.adapter: (root / "sys/class/infiniband" / port.adapter / "device").resolve()
            for port in ports
        }
        self._gpus = tuple(gpus)
        self._near = nearest_gpus(gpus, devices)

    def served(self, port: Port) -> str:
        """`; nearest to GPU 3`."""
        return served_by(port.adapter, self._near, self._gpus)


def _ports(look: Look) -> Iterator[Port]:
    for folder in sorted(look.path("sys/class/infiniband").glob("*/ports/*")):
        adapter = folder.parent.parent.name
        if adapter not in look.settings.nic_ignored:
            yield Port(
                name=f"{adapter}/{folder.name}",
                state=_text(folder / "state").partition(": ")[2],
                physical=_text(folder / "phys_state").partition(": ")[2],
                rate_gbit=_number(_text(folder / "rate").partition(" ")[0]),
                downs=_downs(look, folder),
            )


def _downs(look: Look, port: Path) -> int | None:
    count = _number(_text(port / "counters/link_downed"))
    if count is None and (network := _text(port / "gid_attrs/ndevs/0")):
        # RoCE adapters count it where Ethernet does
        count = _number(_text(look.path("sys/class/net", network, "carrier_down_count")))
    return None if count is None else int(count)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(text: str) -> float | None:
    with suppress(ValueError):
        return float(text)
    return None


def _none(noted: Mapping[str, Any]) -> CheckResult:
    if not noted:
        return CheckResult(check="nic", state="unsupported", reason="no InfiniBand or RoCE port")
    reason = (
        f"all {len(noted)} ports that were active have disappeared at once: the driver is being "
        "loaded anew, or this container may not see them"
    )
    return CheckResult(check="nic", state="unknown", reason=reason)


def _judge(look: Look, port: Port, noted: dict[str, Any], where: _Where) -> Iterator[CheckResult]:
    if not port.state:
        if port.name in noted:
            yield _result(port.name, "unknown", "its state could not be read")
        return
    if port.state != "ACTIVE":
        if port.name in noted:
            yield _inactive(port, noted[port.name], where)
        return
    before = noted.setdefault(port.name, {"downs": [], "rate_gbit": port.rate_gbit})
    before.update(active_at=look.at, off=0)
    troubles = [*_flaps(look, port, before["downs"], where), *_slower(port, before, where)]
    yield from troubles or [_result(port.name, "ok", "")]


def _inactive(port: Port, before: dict[str, Any], where: _Where) -> CheckResult:
    before["off"] = before.get("off", 0) + 1
    reason = f"{port.state}, and its link {port.physical or 'unknown'}; it was ACTIVE before"
    is_coming_up = port.state in ("INIT", "ARMED") and before["off"] < _PATIENCE
    return _result(
        port.name,
        "warning" if is_coming_up else "failed",
        reason + where.served(port),
        "watch" if is_coming_up else "drain",
    )


def _flaps(
    look: Look, port: Port, samples: list[list[float]], where: _Where
) -> Iterator[CheckResult]:
    if port.downs is None:
        return
    settings = look.settings
    growth = note(samples, port.downs, at=look.at, window_s=settings.nic_window_s)
    if not growth.total:
        return
    has_failed = growth.total >= settings.nic_flaps_limit
    yield _result(
        port.name,
        "failed" if has_failed else "warning",
        f"lost its link {growth.total:.0f} times in {settings.nic_window_s:g} s "
        f"(limit {settings.nic_flaps_limit}){where.served(port)}",
        "drain" if has_failed else "watch",
    )


def _slower(port: Port, before: dict[str, Any], where: _Where) -> Iterator[CheckResult]:
    usual = before.get("rate_gbit")
    if usual is None or port.rate_gbit is None or port.rate_gbit >= usual:
        before["rate_gbit"] = port.rate_gbit or usual
        return
    reason = f"runs at {port.rate_gbit:g} Gbit/s instead of {usual:g}{where.served(port)}"
    yield _result(port.name, "warning", reason, "watch")


def _vanished(ports: Sequence[Port], noted: dict[str, Any]) -> Iterator[CheckResult]:
    """Ports that are no longer listed, while others are."""
    for name in sorted(noted.keys() - {port.name for port in ports}):
        before = noted[name]
        before["off"] = before.get("off", 0) + 1
        has_failed = before["off"] >= _PATIENCE
        yield _result(
            name,
            "failed" if has_failed else "warning",
            f"it was ACTIVE before, and is not there in {before['off']} looks; reboot the node",
            "reboot" if has_failed else "watch",
        )
