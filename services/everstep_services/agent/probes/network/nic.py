"""Check `nic`: InfiniBand and RoCE ports that have left the network, or that flap."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.messages import CheckResult
from everstep_services.agent.probes.base import Look
from everstep_services.agent.probes.counter_growth import note
from everstep_services.agent.probes.network import pci

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
        found = [result for port in ports for result in _judge(look, port, noted, where)]
        found += _vanished(ports, noted)
        if not found:
            return [CheckResult(check="nic", state="unsupported", reason="no port has been active")]
        return found


def _is_forgotten(look: Look, name: str, before: Mapping[str, Any]) -> bool:
    is_ignored = name.partition("/")[0] in look.settings.nic_ignored
    return is_ignored or bool(look.at - before["active_at"] > _REMEMBERED_S)


class _Where:
    """Names the GPUs near an adapter."""

    def __init__(self, root: Path, ports: Sequence[Port]) -> None:
        gpus = pci.gpus(root)
        devices = {
            port.adapter: (root / "sys/class/infiniband" / port.adapter / "device").resolve()
            for port in ports
        }
        self._gpus = tuple(gpus)
        self._near = pci.nearest(gpus, devices)

    def served(self, port: Port) -> str:
        """`; nearest to GPU 3`."""
        return pci.served_by(port.adapter, self._near, self._gpus)


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


def _result(name: str, state: str, reason: str, failure_class: str = "") -> CheckResult:
    return CheckResult(
        check="nic", state=state, subject=name, reason=reason, failure_class=failure_class
    )
