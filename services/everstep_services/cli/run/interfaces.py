"""Whether gloo and NCCL will find the network interfaces that the user wants them to use."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

GLOO, NCCL, NCCL_FAMILY = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY"
_LOOPBACK_6 = "::1"


@dataclass(frozen=True, slots=True)
class Interface:
    """One of this host's."""

    name: str
    ipv4: tuple[str, ...] = ()
    ipv6: tuple[str, ...] = ()
    runs: bool = True

    def __str__(self) -> str:
        """As people tell one from another."""
        addresses = ", ".join((*self.ipv4, *self.ipv6)) or "no address"
        return f"{self.name} ({addresses}{'' if self.runs else ', down'})"


@dataclass(frozen=True, slots=True)
class InterfaceFault:
    """A fault of a setting, and whether ranks surely cannot work with it."""

    text: str
    is_sure: bool


def judge(
    environ: Mapping[str, str],
    look: Callable[[], Sequence[Interface]],
    has_devices: Callable[[], bool],
) -> Iterator[InterfaceFault]:
    """The faults of both variables. Without any of them set, nothing is looked at."""
    if not environ.get(GLOO) and not environ.get(NCCL):
        return
    here = look()
    yield from _about_gloo(environ.get(GLOO, ""), here)
    yield from _about_nccl(environ.get(NCCL, ""), environ.get(NCCL_FAMILY, ""), here, has_devices)


def _about_gloo(value: str, here: Sequence[Interface]) -> Iterator[InterfaceFault]:
    """It takes whole names, and listens at each of them."""
    by_name = {interface.name: interface for interface in here}
    for name in filter(None, value.split(",")):
        interface = by_name.get(name)
        if interface is None:
            text = f"this host has no interface {name}, and gloo takes whole names only"
            yield InterfaceFault(_said(GLOO, value, text, here), is_sure=True)
        elif not interface.ipv4 and not interface.ipv6:
            text = f"the interface {name} has no address, so gloo cannot listen there"
            yield InterfaceFault(_said(GLOO, value, text, here), is_sure=True)
        elif not interface.runs:
            text = f"the interface {name} is down, so other nodes may not reach gloo there"
            yield InterfaceFault(_said(GLOO, value, text, here), is_sure=False)


def _about_nccl(
    value: str, family: str, here: Sequence[Interface], has_devices: Callable[[], bool]
) -> Iterator[InterfaceFault]:
    """It takes the beginnings of names; `=` makes them whole names, `^` all others."""
    if len(value) < 2:
        return  # NCCL itself passes over so short a value
    fit = [interface for interface in here if _fits(value, interface.name)]
    usable = [interface for interface in fit if _has_address(interface, family)]
    kind = {"AF_INET": "IPv4 ", "AF_INET6": "IPv6 "}.get(family, "")
    if any(interface.runs for interface in usable):
        return
    if usable:
        names = " and ".join(interface.name for interface in usable)
        text = f"NCCL does not use an interface that is down, and {names} is"
    elif fit:
        names = " and ".join(interface.name for interface in fit)
        text = f"no {kind}address that NCCL could use is on {names}"
    else:
        text = "NCCL finds no interface of that name on this host"
    # A release of it may not mind what is down; without a device nobody asks it.
    is_sure = not usable and has_devices()
    yield InterfaceFault(_said(NCCL, value, text, here), is_sure)


def _fits(value: str, name: str) -> bool:
    others, value = value.startswith("^"), value.removeprefix("^")
    whole, value = value.startswith("="), value.removeprefix("=")
    wanted = [part.partition(":")[0] for part in value.split(",") if part]
    fits = any(name == prefix if whole else name.startswith(prefix) for prefix in wanted)
    return fits is not others


def _has_address(interface: Interface, family: str) -> bool:
    ipv6 = [address for address in interface.ipv6 if address != _LOOPBACK_6]
    by_family = {"AF_INET": interface.ipv4, "AF_INET6": ipv6}
    return bool(by_family.get(family, [*interface.ipv4, *ipv6]))


def _said(variable: str, value: str, problem: str, here: Sequence[Interface]) -> str:
    there_are = ", ".join(str(interface) for interface in here) or "none"
    return f"{variable}={value}: {problem}: correct or unset it; this host has {there_are}"


def interfaces() -> list[Interface]:
    """All that this host has, by name."""
    import socket

    import psutil  # only where a variable is set

    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()

    def of(name: str, family: int) -> tuple[str, ...]:
        matches = (entry for entry in addresses.get(name, ()) if entry.family == family)
        return tuple(entry.address.partition("%")[0] for entry in matches)

    return [
        Interface(
            name,
            of(name, socket.AF_INET),
            of(name, socket.AF_INET6),
            # One with a label of its own, such as `eth0:1`, has no state of its own.
            runs=name not in states or states[name].isup,
        )
        for name in sorted({*addresses, *states})
    ]


def likely_devices() -> bool:
    """Whether anybody will ask NCCL."""
    from everstep_services.agent.ranks.device_memory import has_devices

    return has_devices()
