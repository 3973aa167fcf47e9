"""What the kernel tells of ranks and host, over a window; and that it may tell nothing."""

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest

from everstep_services.agent.timings.connections import (
    TcpConnection,
    connections,
    inodes_of,
    of_process,
    parse_connections,
)
from everstep_services.agent.timings.host import (
    HostReading,
    ProcessReading,
    System,
    Workers,
    device_uses,
    link_errors,
    read_host,
    read_process,
    steal_between,
    use_between,
)
from tests.fakes.nvml import Card, FakeNvml
from tests.waiting import until

BUSY = """
import sys
sys.stdin.read(1)
for number in range(3_000_000):
    number += 1
print(1, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def busy() -> Iterator["subprocess.Popen[str]"]:
    """Computes on each order, and reports the end."""
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def test_what_a_live_process_uses_is_seen(busy: "subprocess.Popen[str]") -> None:
    system = System()
    before = read_process(busy.pid, {}, {}, system)
    assert busy.stdin is not None
    assert busy.stdout is not None
    busy.stdin.write("x")
    busy.stdin.flush()
    busy.stdout.readline()
    use = use_between(before, read_process(busy.pid, {}, {}, system))
    assert use.cpu_s is not None
    assert use.cpu_s > 0
    assert use.main_cpu_s == use.cpu_s, "it has one thread"
    assert use.involuntary_switches is not None
    assert use.major_faults is not None
    assert (use.workers, use.workers_cpu_s, use.retransmits) == (0, None, None)


def test_children_are_found_with_their_processor_time(busy: "subprocess.Popen[str]") -> None:
    workers, pids = Workers(), frozenset({os.getpid(), 2**22 + 1})
    found = workers.cpu_s(pids, System())
    assert found[os.getpid()][busy.pid] >= 0
    assert found[2**22 + 1] == {}
    busy.kill()
    busy.wait()
    assert busy.pid not in workers.cpu_s(pids, System())[os.getpid()]


@pytest.mark.parametrize("is_listed", [True, False])
def test_children_are_those_that_the_kernel_names(tmp_path: Path, is_listed: bool) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    for pid, parent in ((7, 1), (8, 7), (9, 1)):
        fields = f"S {parent} 0 0 0 0 0 0 0 0 0 {ticks} {ticks}"
        write(tmp_path / str(pid) / "stat", f"{pid} (a ) b) {fields} 0")
    (tmp_path / "7/task/7").mkdir(parents=True)
    if is_listed:
        write(tmp_path / "7/task/7/children", "8 9 ")
    assert Workers().cpu_s(frozenset({7}), System(proc=tmp_path)) == {7: {8: 2.0}}


def test_a_process_that_is_gone_tells_nothing() -> None:
    reading = read_process(2**22 + 1, {}, {}, System())
    assert (reading.cpu_s, reading.runnable_s, reading.switches) == (None, None, None)
    use = use_between(reading, reading)
    assert use.cpu_s is None


def test_without_anything_to_read_nothing_is_told(tmp_path: Path) -> None:
    system = System(tmp_path, tmp_path, tmp_path / "none")
    assert read_process(1, {}, {}, system) == ProcessReading()
    assert read_host(system) == HostReading()
    assert Workers().cpu_s(frozenset({1}), system) == {1: {}}
    assert inodes_of(1, tmp_path) == frozenset()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("version", [1, 2])
def test_pressure_and_quota_are_those_of_the_cgroup(tmp_path: Path, version: int) -> None:
    system = System(tmp_path / "proc", tmp_path / "cgroup", tmp_path / "net")
    line = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 total=9\n"
    if version == 2:
        write(tmp_path / "proc/7/cgroup", "0::/job/rank\n")
        write(tmp_path / "cgroup/job/rank/cpu.stat", "usage_usec 5\nthrottled_usec 2500000\n")
        write(tmp_path / "cgroup/job/rank/cpu.pressure", line.format(1_500_000))
    else:
        write(tmp_path / "proc/7/cgroup", "2:memory:/\n1:cpu,cpuacct:/job\n")
        write(tmp_path / "cgroup/cpu/job/cpu.stat", "nr_throttled 1\nthrottled_time 2500000000\n")
        write(tmp_path / "proc/pressure/cpu", line.format(1_500_000))
    reading = read_process(7, {}, {}, system)
    assert reading.throttled_s == 2.5
    assert reading.pressure_s == {"cpu": 1.5}
    use = use_between(ProcessReading(throttled_s=1.0, pressure_s={"cpu": 0.25}), reading)
    assert (use.throttled_s, use.cpu_pressure_s, use.io_pressure_s) == (1.5, 1.25, None)


def test_steal_and_errors_of_links_are_differences(tmp_path: Path) -> None:
    system = System(tmp_path, tmp_path, tmp_path / "net")
    ticks = os.sysconf("SC_CLK_TCK")
    write(tmp_path / "stat", f"cpu  1 2 3 4 5 6 7 {3 * ticks} 0 0\ncpu0 1\n")
    write(tmp_path / "net/eth0/statistics/rx_dropped", "17\n")
    write(tmp_path / "net/eth0/statistics/tx_errors", "4\n")
    write(tmp_path / "net/lo/statistics/rx_dropped", "9\n")
    after = read_host(system)
    before = HostReading(1.0, {"eth0 rx_dropped": 12, "eth0 tx_errors": 4})
    assert steal_between(before, after) == 2.0
    assert link_errors(before, after) == (("eth0 rx_dropped", 5),)
    assert link_errors(HostReading(), after) == (), "a new device has no past"


def test_workers_that_come_and_go_count_what_they_used_since() -> None:
    before = ProcessReading(workers_cpu_s={1: 5.0, 2: 1.0})
    after = ProcessReading(workers_cpu_s={1: 7.0, 3: 0.5})
    use = use_between(before, after)
    assert (use.workers, use.workers_cpu_s) == (2, 2.5)


def test_connections_are_told_by_what_happened_since() -> None:
    before = ProcessReading(connections={1: TcpConnection(1, 0, 0.1, 5, 1000)})
    after = ProcessReading(
        connections={
            1: TcpConnection(1, 10, 0.001, 7, 3000),
            2: TcpConnection(2, 5, 0.003, 1, 1000),
            3: TcpConnection(3, 0, 0.009, 0, 4000),
        }
    )
    use = use_between(before, after)
    assert (use.retransmits, use.round_trip_s, use.unsent_bytes) == (3, 0.003, 15)


def test_only_connections_that_sent_tell_how_long_round_trips_are() -> None:
    """In a ring a rank sends on one of them; what others knew when they were made is old."""
    idle, control, busy = (TcpConnection(n, 0, n / 100, 0, 5000) for n in (1, 2, 3))
    before = ProcessReading(connections={1: idle, 2: control, 3: busy})
    assert use_between(before, before).round_trip_s is None
    after = {1: idle, 2: replace(control, sent_bytes=5900), 3: replace(busy, sent_bytes=25_000)}
    assert use_between(before, ProcessReading(connections=after)).round_trip_s == 0.03


def answer(inode: int, unsent: int, round_trip_us: int, retransmits: int, sent: int = 0) -> bytes:
    info = bytearray(128)
    struct.pack_into("=I", info, 68, round_trip_us)
    struct.pack_into("=I", info, 100, retransmits)
    struct.pack_into("=Q", info, 120, sent)
    body = struct.pack("=4B48sIIIII", 2, 1, 0, 0, b"", 0, 0, unsent, 0, inode)
    body += struct.pack("=HHI", 8, 1, 0) + struct.pack("=HH", 4 + len(info), 2) + info
    return struct.pack("=IHHII", 16 + len(body), 20, 2, 1, 0) + body


def test_answers_of_the_kernel_are_parsed() -> None:
    done = struct.pack("=IHHIIi", 20, 3, 2, 1, 0, 0)
    found, is_last = parse_connections(answer(5, 7, 1500, 3, 1 << 40) + answer(6, 0, 20, 0) + done)
    assert found == [TcpConnection(5, 7, 0.0015, 3, 1 << 40), TcpConnection(6, 0, 2e-05, 0, 0)]
    assert is_last
    assert parse_connections(answer(5, 7, 1500, 3))[1] is False
    assert parse_connections(b"") == ([], False)
    refused = struct.pack("=IHHIIi", 20, 2, 0, 1, 0, -2)
    assert parse_connections(refused) == ([], True)


def test_connections_of_a_real_process_are_found_where_the_kernel_tells() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        other, _ = server.accept()
        with other:
            client.sendall(b"x" * 1000)
            other.recv(1000, socket.MSG_WAITALL)
            inode = os.fstat(client.fileno()).st_ino

            def told() -> bool:
                known = connections()
                return not known or known[inode].sent_bytes >= 1000

            until(told, "what was acknowledged is counted")
            found = connections()
    if not found:
        pytest.skip("this kernel does not tell of TCP connections")
    own = of_process(found, {inode})
    assert [one.inode for one in own] == [inode]
    assert 0 < own[0].round_trip_s < 1
    assert inode not in inodes_of(1)


def test_a_process_knows_its_sockets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert os.fstat(server.fileno()).st_ino in inodes_of(os.getpid())


def test_without_a_driver_there_are_no_devices() -> None:
    assert device_uses({1}, has_driver=False) == {}
    assert device_uses({1}, lambda: FakeNvml(init_error=9), has_driver=True) == {}


def test_a_rank_has_the_device_that_it_computes_on() -> None:
    held_down = pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonGpuIdle
    cards = [
        Card("idle", processes=((8, 5),)),
        Card("hot", processes=((7, 5),), event_reasons=held_down, temperature=83),
    ]
    found = device_uses({7}, lambda: FakeNvml(cards=cards), has_driver=True)
    assert set(found) == {7}
    assert found[7].throttled_by == ("sw_power_cap",), "that it idles is not a reason"
    assert found[7].clock_mhz is None, "a driver that does not tell"


@pytest.mark.gpu
def test_a_real_device_tells_its_clock() -> None:
    torch = pytest.importorskip("torch")
    held = torch.ones(1, device="cuda")
    use = device_uses({os.getpid()})[os.getpid()]
    assert held.item() == 1
    assert use.clock_mhz is not None
    assert use.clock_most_mhz is not None
    assert 0 < use.clock_mhz <= use.clock_most_mhz
    assert use.power_watts is not None
