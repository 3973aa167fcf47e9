"""Which interfaces gloo and NCCL find, and what is refused or only said where they find none."""

import pytest

from everstep_services.cli.run.interfaces import Interface, InterfaceFault, interfaces, judge

LO = Interface("lo", ("127.0.0.1",), ("::1",))
ETH = Interface("eth0", ("10.0.0.7",), ("fe80::7",))
IPV6 = Interface("eth1", (), ("fd00::7",))
BARE = Interface("ib0")
DOWN = Interface("ib1", ("10.1.0.7",), runs=False)
HERE = (ETH, IPV6, BARE, DOWN, LO)


def found(*here: Interface, devices: bool = True, **environ: str) -> list[InterfaceFault]:
    return list(judge(environ, lambda: here or HERE, lambda: devices))


def test_nothing_is_looked_at_where_no_variable_is_set() -> None:
    def never() -> list[Interface]:
        raise AssertionError

    empty = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": ""}
    assert list(judge({}, never, bool)) == list(judge(empty, never, bool)) == []


@pytest.mark.parametrize("value", ["eth0", "lo", "lo,eth0", "eth0,", "eth1"])
def test_what_gloo_finds(value: str) -> None:
    assert found(GLOO_SOCKET_IFNAME=value) == []


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("eth9", "this host has no interface eth9, and gloo takes whole names only"),
        ("lo,eth9", "this host has no interface eth9"),
        ("eth", "this host has no interface eth,"),
        ("=eth0", "this host has no interface =eth0"),
        ("^lo", "this host has no interface ^lo"),
        ("10.0.0.7", "this host has no interface 10.0.0.7"),
        ("ib0", "the interface ib0 has no address"),
    ],
)
def test_what_gloo_does_not_find_is_refused(value: str, said: str) -> None:
    (one,) = found(devices=False, GLOO_SOCKET_IFNAME=value)
    assert one.is_sure
    assert one.text.startswith(f"GLOO_SOCKET_IFNAME={value}: {said}")
    assert "\n" not in one.text


def test_a_refusal_says_what_there_is() -> None:
    (one,) = found(GLOO_SOCKET_IFNAME="eth9")
    assert one.text.endswith(
        "correct or unset it; this host has eth0 (10.0.0.7, fe80::7), eth1 (fd00::7), "
        "ib0 (no address), ib1 (10.1.0.7, down), lo (127.0.0.1, ::1)"
    )


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_an_interface_that_is_down_is_only_said(variable: str) -> None:
    """On one node gloo works there, as do older releases of NCCL."""
    (one,) = judge({variable: "ib1"}, lambda: HERE, lambda: True)
    assert not one.is_sure
    assert "ib1" in one.text
    assert "down" in one.text


@pytest.mark.parametrize(
    "value",
    [
        *["eth", "eth0", "=eth0", "=eth9,lo", "ib9,eth", "ib,eth", "e", "eth0:1"],
        *["^lo", "^ib,lo", "^=ib0", "^docker", "^eth0"],
    ],
)
def test_what_nccl_finds(value: str) -> None:
    assert found(NCCL_SOCKET_IFNAME=value) == []


@pytest.mark.parametrize("value", ["eth9", "=eth", "=ETH0", "wl,en", "^eth,ib,lo", "^e,i,l", "^"])
def test_what_nccl_does_not_find_is_refused_where_it_is_used(value: str) -> None:
    expected = [] if len(value) == 1 else ["NCCL finds no interface of that name on this host"]
    for devices in (True, False):
        said = found(devices=devices, NCCL_SOCKET_IFNAME=value)
        assert [one.is_sure for one in said] == [devices] * len(expected)
        for one, text in zip(said, expected, strict=True):
            assert one.text.startswith(f"NCCL_SOCKET_IFNAME={value}: {text}")


def test_nccl_wants_an_address_of_its_family() -> None:
    (bare,) = found(NCCL_SOCKET_IFNAME="ib0")
    assert bare.is_sure
    assert "no address that NCCL could use is on ib0" in bare.text
    (wrong,) = found(NCCL_SOCKET_IFNAME="eth1", NCCL_SOCKET_FAMILY="AF_INET")
    assert "no IPv4 address that NCCL could use is on eth1" in wrong.text
    (loopback,) = found(NCCL_SOCKET_IFNAME="lo", NCCL_SOCKET_FAMILY="AF_INET6")
    assert "no IPv6 address that NCCL could use is on lo" in loopback.text
    assert found(NCCL_SOCKET_IFNAME="eth1", NCCL_SOCKET_FAMILY="AF_INET6") == []


def test_the_interfaces_of_this_host() -> None:
    (lo,) = [one for one in interfaces() if one.name == "lo"]
    assert "127.0.0.1" in lo.ipv4
    assert lo.runs
