"""Which CPUs each rank of a node may use: those near its GPU, or its part of the NUMA nodes.

The modes have the meaning of torchrun's `--numa-binding`. The topology is read from /sys, without
torch and without CUDA, before any rank starts.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, assert_never

from everstep.errors import EverstepError

BindingMode = Literal["node", "socket", "exclusive", "core-complex"]
Cpus = frozenset[int]
_NVIDIA = "0x10de"
_DISPLAY = "0x03"
"""The class of PCI devices that GPUs belong to."""


class CpuTopologyError(EverstepError):
    """The CPUs of this machine do not allow this binding; ranks run without one."""


@dataclass(frozen=True, slots=True)
class CpuBinding:
    """The CPUs of one rank, and the NUMA nodes from which it takes memory first."""

    cpus: Cpus
    memory_nodes: tuple[int, ...]
    is_strict: bool = False
    """The rank takes memory from these nodes only."""

    @property
    def cpu_list(self) -> str:
        """The CPUs as the kernel writes them: `0-3,8`."""
        return ranges(self.cpus)


def bindings(
    mode: BindingMode,
    ranks: int,
    allowed: Collection[int],
    environ: Mapping[str, str],
    root: Path = Path("/"),
) -> tuple[CpuBinding, ...]:
    """The binding of each local rank. Raises `CpuTopologyError` in one line."""
    topology = _Topology(root, frozenset(allowed))
    homes = _homes(topology, ranks, environ)
    return tuple(_binding(mode, topology, homes, rank) for rank in range(ranks))


def ranges(cpus: Collection[int]) -> str:
    """Numbers as the kernel writes them."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], cpu]
        else:
            parts.append([cpu])
    return ",".join("-".join(map(str, part)) for part in parts)


def numbers(text: str) -> Cpus:
    """The numbers in a list as the kernel writes it."""
    members: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        members.update(range(int(first), int(last or first) + 1))
    return frozenset(members)


class _Topology:
    """The NUMA nodes, sockets, cores and caches of this machine, as far as we may use them."""

    def __init__(self, root: Path, allowed: Cpus) -> None:
        self._root = root
        self._cpu = root / "sys/devices/system/cpu"
        folder = root / "sys/devices/system/node"
        paths = sorted(folder.glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
        if not paths:
            raise CpuTopologyError(
                f"--numa-binding: {folder} lists no NUMA node; ranks are not bound"
            )
        self.nodes = {int(path.name[4:]): self._list(path / "cpulist") & allowed for path in paths}
        """The usable CPUs of each node; offline CPUs and those of other cpusets are not in it."""
        if not any(self.nodes.values()):
            raise CpuTopologyError(
                "--numa-binding: no NUMA node has a usable CPU; ranks are not bound"
            )

    @property
    def usable(self) -> list[int]:
        """The nodes with usable CPUs."""
        return [node for node, cpus in self.nodes.items() if cpus]

    def gpu_nodes(self) -> list[int]:
        """The NUMA node of each GPU, in the order of PCI addresses."""
        nodes = []
        for device in sorted((self._root / "sys/bus/pci/devices").glob("*")):
            if self._text(device / "vendor") == _NVIDIA and self._text(device / "class").startswith(
                _DISPLAY
            ):
                text = self._text(device / "numa_node")
                # -1 where the machine has a single node
                nodes.append(max(int(text), 0) if text.lstrip("-").isdecimal() else 0)
        return nodes

    def socket(self, node: int) -> int:
        cpu = min(self.nodes[node])
        text = self._text(self._cpu / f"cpu{cpu}/topology/physical_package_id")
        if not text.lstrip("-").isdecimal():
            raise CpuTopologyError(f"--numa-binding=socket: CPU {cpu} names no socket; not bound")
        return int(text)

    def core(self, cpu: int) -> int:
        """The first CPU of the physical core."""
        siblings = self._list(self._cpu / f"cpu{cpu}/topology/thread_siblings_list")
        return min(siblings, default=cpu)

    def complex(self, cpu: int) -> int:
        """The first CPU among those that share the last cache level."""
        levels: dict[int, Cpus] = {}
        for index in (self._cpu / f"cpu{cpu}/cache").glob("index[0-9]*"):
            level = self._text(index / "level")
            if level.isdecimal() and self._text(index / "type") in {"Unified", "Data"}:
                levels[int(level)] = self._list(index / "shared_cpu_list")
        if not levels:
            raise CpuTopologyError(
                f"--numa-binding=core-complex: CPU {cpu} shows no cache; not bound"
            )
        return min(levels[max(levels)], default=cpu)

    def _list(self, path: Path) -> Cpus:
        try:
            return numbers(self._text(path))
        except ValueError:
            raise CpuTopologyError(
                f"--numa-binding: {path} is not a list of CPUs; not bound"
            ) from None

    def _text(self, path: Path) -> str:
        try:
            return path.read_text(encoding="ascii", errors="replace").strip()
        except OSError:
            return ""


def _homes(topology: _Topology, ranks: int, environ: Mapping[str, str]) -> list[int]:
    """The NUMA node of each GPU that ranks use; without GPUs, nodes spread over the ranks."""
    gpus = topology.gpu_nodes()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if gpus and visible:
        try:
            gpus = [gpus[int(part)] for part in visible.split(",")]
        except (ValueError, IndexError):
            raise CpuTopologyError(
                f"--numa-binding: CUDA_VISIBLE_DEVICES={visible} does not name GPUs by their "
                f"numbers; ranks are not bound"
            ) from None
    if gpus and visible != "":
        if len(gpus) < ranks:
            raise CpuTopologyError(
                f"--numa-binding: {ranks} ranks and {len(gpus)} GPUs; ranks are not bound"
            )
        return gpus
    usable = topology.usable
    return [usable[rank * len(usable) // ranks] for rank in range(ranks)]


def _binding(mode: BindingMode, topology: _Topology, homes: Sequence[int], rank: int) -> CpuBinding:
    node = homes[rank]
    if not topology.nodes.get(node):
        raise CpuTopologyError(
            f"--numa-binding={mode}: NUMA node {node}, the place of local rank {rank}, has no CPU "
            f"that this process may use; ranks are not bound"
        )
    nearby = [number for number, home in enumerate(homes) if home == node]
    index = nearby.index(rank)
    match mode:
        case "node":
            return CpuBinding(topology.nodes[node], (node,))
        case "socket":
            socket = topology.socket(node)
            nodes = tuple(other for other in topology.usable if topology.socket(other) == socket)
            cpus = frozenset[int]().union(*(topology.nodes[other] for other in nodes))
            return CpuBinding(cpus, nodes)
        case "exclusive":
            return CpuBinding(_own_cores(topology, node, index, len(nearby)), (node,))
        case "core-complex":
            complexes = _grouped(topology.nodes[node], topology.complex)
            ordered = sorted(complexes.items(), key=lambda item: (-len(item[1]), item[0]))
            return CpuBinding(ordered[index % len(ordered)][1], (node,))
        case _:
            assert_never(mode)


def _own_cores(topology: _Topology, node: int, index: int, sharers: int) -> Cpus:
    """An equal part of the node's cores; the first sharers get the remaining ones."""
    cores = [cpus for _, cpus in sorted(_grouped(topology.nodes[node], topology.core).items())]
    each, more = divmod(len(cores), sharers)
    if not each:
        raise CpuTopologyError(
            f"--numa-binding=exclusive: NUMA node {node} has {len(cores)} usable cores for "
            f"{sharers} ranks; ranks are not bound, try --numa-binding=node"
        )
    first = index * each + min(index, more)
    return frozenset[int]().union(*cores[first : first + each + (index < more)])


def _grouped(cpus: Cpus, key: Callable[[int], int]) -> dict[int, Cpus]:
    groups: defaultdict[int, set[int]] = defaultdict(set)
    for cpu in cpus:
        groups[key(cpu)].add(cpu)
    return {group: frozenset(members) for group, members in groups.items()}


def here(
    mode: BindingMode, ranks: int, environ: Mapping[str, str]
) -> tuple[tuple[CpuBinding, ...], str]:
    """The bindings on this machine, and one line if there are none."""
    try:
        return bindings(mode, ranks, os.sched_getaffinity(0), environ), ""
    except CpuTopologyError as error:
        return (), str(error)
