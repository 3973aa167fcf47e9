"""The CPUs of each rank, from fake trees of /sys, with the meaning of torchrun's modes."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from everstep_services.agent.ranks.cpu_affinity import (
    BindingMode,
    CpuTopologyError,
    bindings,
    here,
    numbers,
    ranges,
)


class Machine:
    """Nodes of eight CPUs: four cores of two threads (n, n + 4), in two caches; two nodes a socket.

    A GPU is on the node that its number names.
    """

    def __init__(self, root: Path, nodes: int = 4, gpus: Sequence[int] = ()) -> None:
        self.root = root
        self.cpus = frozenset(range(8 * nodes))
        for node in range(nodes):
            first = 8 * node
            self.write(f"node/node{node}/cpulist", f"{first}-{first + 7}")
            for cpu in range(first, first + 8):
                core = first + (cpu - first) % 4
                half = first + 2 * ((cpu - first) % 4 // 2)
                path = f"cpu/cpu{cpu}"
                self.write(f"{path}/topology/physical_package_id", str(node // 2))
                self.write(f"{path}/topology/thread_siblings_list", f"{core},{core + 4}")
                shared = f"{half}-{half + 1},{half + 4}-{half + 5}"
                for index, level, kind, cpus in (
                    (0, 1, "Data", f"{core},{core + 4}"),
                    (1, 1, "Instruction", f"{core},{core + 4}"),
                    (3, 3, "Unified", shared),
                ):
                    cache = f"{path}/cache/index{index}"
                    self.write(f"{cache}/level", str(level))
                    self.write(f"{cache}/type", kind)
                    self.write(f"{cache}/shared_cpu_list", cpus)
        for number, node in enumerate(gpus):
            device = f"sys/bus/pci/devices/0000:{number:02x}:00.0"
            for name, text in (
                ("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", str(node)),
            ):  # fmt: skip
                self._write(f"{device}/{name}", text)
        self._write("sys/bus/pci/devices/0000:ff:00.0/vendor", "0x8086")

    def write(self, path: str, text: str) -> None:
        self._write(f"sys/devices/system/{path}", text)

    def _write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def cpus_of(
        self, mode: BindingMode, ranks: int, allowed: frozenset[int] | None = None, **environ: str
    ) -> list[str]:
        usable = self.cpus if allowed is None else allowed
        return [b.cpu_list for b in bindings(mode, ranks, usable, environ, self.root)]


def test_a_rank_gets_the_node_of_its_gpu(tmp_path: Path) -> None:
    machine = Machine(tmp_path, gpus=(3, 3, 0, 0))
    assert machine.cpus_of("node", 4) == ["24-31", "24-31", "0-7", "0-7"]
    assert bindings("node", 4, machine.cpus, {}, tmp_path)[0].memory_nodes == (3,)


def test_socket_means_all_nodes_of_the_gpus_socket(tmp_path: Path) -> None:
    machine = Machine(tmp_path, gpus=(3, 0))
    assert machine.cpus_of("socket", 2) == ["16-31", "0-15"]
    assert bindings("socket", 2, machine.cpus, {}, tmp_path)[0].memory_nodes == (2, 3)


def test_exclusive_divides_cores_and_gives_the_first_ranks_one_more(tmp_path: Path) -> None:
    machine = Machine(tmp_path, nodes=1, gpus=(0, 0, 0))
    assert machine.cpus_of("exclusive", 3) == ["0-1,4-5", "2,6", "3,7"]


def test_a_core_complex_shares_its_last_cache(tmp_path: Path) -> None:
    machine = Machine(tmp_path, nodes=1, gpus=(0, 0, 0))
    assert machine.cpus_of("core-complex", 3) == ["0-1,4-5", "2-3,6-7", "0-1,4-5"]


def test_the_largest_complexes_are_taken_first(tmp_path: Path) -> None:
    machine = Machine(tmp_path, nodes=1, gpus=(0, 0))
    allowed = frozenset({0, 2, 3, 6, 7})
    assert machine.cpus_of("core-complex", 2, allowed) == ["2-3,6-7", "0"]


def test_visible_devices_choose_gpus(tmp_path: Path) -> None:
    machine = Machine(tmp_path, gpus=(0, 1, 2, 3))
    assert machine.cpus_of("node", 2, CUDA_VISIBLE_DEVICES="3,1") == ["24-31", "8-15"]


def test_without_gpus_the_nodes_are_spread_over_the_ranks(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    assert machine.cpus_of("node", 8)[::2] == ["0-7", "8-15", "16-23", "24-31"]
    assert machine.cpus_of("node", 2) == ["0-7", "16-23"]
    halves = machine.cpus_of("exclusive", 8)
    assert halves[:2] == ["0-1,4-5", "2-3,6-7"]
    gpus = Machine(tmp_path / "gpus", gpus=(3,))
    assert gpus.cpus_of("node", 1, CUDA_VISIBLE_DEVICES="") == ["0-7"], "a run on CPUs"


def test_a_single_node_may_call_itself_minus_one(tmp_path: Path) -> None:
    assert Machine(tmp_path, nodes=1, gpus=(-1,)).cpus_of("node", 1) == ["0-7"]


def test_a_container_keeps_to_its_cpuset_and_offline_cpus_do_not_exist(tmp_path: Path) -> None:
    machine = Machine(tmp_path, nodes=2, gpus=(0, 1))
    allowed = frozenset({1, 2, 9})
    assert machine.cpus_of("node", 2, allowed) == ["1-2", "9"]
    machine.write("node/node0/cpulist", "2-7")
    assert machine.cpus_of("node", 2, allowed) == ["2", "9"]


def no_nodes(machine: Machine) -> None:
    for path in machine.root.glob("sys/devices/system/node/*/cpulist"):
        path.unlink()
        path.parent.rmdir()


def garbage(machine: Machine) -> None:
    machine.write("node/node0/cpulist", "abc")


@pytest.mark.parametrize(
    ("mode", "ranks", "allowed", "environ", "spoil", "reason"),
    [
        ("node", 1, range(8), {}, no_nodes, "lists no NUMA node"),
        ("node", 1, range(8), {}, garbage, "is not a list of CPUs"),
        ("node", 2, range(8), {}, None, "NUMA node 1, the place of local rank 1, has no CPU"),
        ("node", 1, (99,), {}, None, "no NUMA node has a usable CPU"),
        ("node", 3, range(16), {}, None, "3 ranks and 2 GPUs"),
        ("node", 1, range(8), {"CUDA_VISIBLE_DEVICES": "GPU-5e9c"}, None, "by their numbers"),
        ("node", 1, range(8), {"CUDA_VISIBLE_DEVICES": "7"}, None, "by their numbers"),
        ("exclusive", 2, (0, 4), {"CUDA_VISIBLE_DEVICES": "0,0"}, None, "1 usable cores for 2"),
    ],
)
def test_a_machine_that_does_not_allow_it_says_why_in_one_line(
    tmp_path: Path,
    mode: BindingMode,
    ranks: int,
    allowed: Sequence[int],
    environ: Mapping[str, str],
    spoil: object,
    reason: str,
) -> None:
    machine = Machine(tmp_path, nodes=2, gpus=(0, 1))
    if callable(spoil):
        spoil(machine)
    with pytest.raises(CpuTopologyError, match=reason) as error:
        bindings(mode, ranks, allowed, environ, tmp_path)
    assert "\n" not in str(error.value)
    assert "bound" in str(error.value)


def test_lists_of_numbers_are_read_and_written_as_the_kernel_does() -> None:
    assert numbers("0-2,5,7-8\n") == {0, 1, 2, 5, 7, 8}
    assert ranges({8, 0, 1, 2, 5, 7}) == "0-2,5,7-8"
    assert (numbers(""), ranges(())) == (frozenset(), "")


def test_this_machine_has_a_binding_or_a_reason() -> None:
    chosen, trouble = here("node", 1, {"CUDA_VISIBLE_DEVICES": ""})
    assert bool(chosen) != bool(trouble)
    assert all(binding.cpus <= os.sched_getaffinity(0) for binding in chosen)


BIND = """
import os
from trainer_sdk.bootstrap.rank_setup import bind_to_cpus
bind_to_cpus(os.environ)
print(sorted(os.sched_getaffinity(0)))
"""


def bound(**environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", BIND], env={**os.environ, **environ},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip


def test_a_rank_binds_itself_to_what_it_is_given() -> None:
    cpu = max(os.sched_getaffinity(0))
    done = bound(EVERSTEP_CPUS=str(cpu), EVERSTEP_MEMORY_NODES="0")
    assert (done.stdout, done.stderr) == (f"[{cpu}]\n", "")


def test_a_rank_that_cannot_be_bound_says_so_and_goes_on() -> None:
    done = bound(EVERSTEP_CPUS="4000", EVERSTEP_MEMORY_NODES="0")
    assert done.stdout == f"{sorted(os.sched_getaffinity(0))}\n"
    assert done.stderr.startswith("everstep: this rank is not bound to the CPUs 4000: ")


def test_a_strict_rank_takes_memory_of_its_node_only_or_says_why_not() -> None:
    cpu = max(os.sched_getaffinity(0))
    done = bound(EVERSTEP_CPUS=str(cpu), EVERSTEP_MEMORY_NODES="1000", EVERSTEP_MEMORY_STRICT="1")
    assert done.stdout == f"[{cpu}]\n"
    assert done.stderr.startswith("everstep: this rank takes memory of any NUMA node: ")
