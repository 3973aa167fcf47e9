"""Compares parameters that should be equal on several ranks, by a hash of their bits.

Each rank sums up the bits of its own part of each parameter: a single pass over the memory. The
sums are copied to the host, gathered and compared while the training goes on.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer_sdk.numerics.judgement import ResultJudgement, odd_one_out

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

    from trainer_sdk.checkpoint.rank_group import RankGroup

HASH_EVERY = 100
"""Steps between two hashes. A hash takes less than a step, so it costs less than 1 % of them."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD_BYTES = 8
_COLUMNS = 8 * 127
"""Bits that differ in two places cancel out only in the same column: none at a distance that is a
power of 2, as faults of memory have it."""

Replicas = tuple[int, ...]
"""Global ranks that should have the same values, in ascending order."""


class HashLayout(msgspec.Struct, frozen=True):
    """The hashes that a rank sends, and which ranks should have the same ones."""

    replicas: tuple[Replicas, ...]
    slots: tuple[tuple[int, str], ...]
    """For each hash the index in `replicas`, and the name of the parameter group."""
    is_on_host: bool
    """Whether no hash must be copied from a device."""


class ReplicaHash:
    """Hashes the parameters of a rank, and compares the hashes of its replicas.

    All ranks make it together, and call all but `go_on` at the same steps.
    `group_of` has the group of each parameter, as an index into `groups`. `replicas` are
    the ranks that have the same plain parameters, where no wrapper knows them.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        groups: Sequence[str],
        group_of: Mapping[str, int],
        modules: Iterable[nn.Module],
        ranks: "RankGroup",
        replicas: "ProcessGroup | None" = None,
    ) -> None:
        replicas_of = _ReplicasOf(modules, replicas)
        self.is_unknown = False
        """Whether nothing tells which ranks have the same values of some of the parameters."""
        self._parameters: list[Tensor] = []
        self._slots: list[int] = []
        slots: dict[tuple[Replicas, int], int] = {}
        for name, parameter in parameters.items():
            same = replicas_of(parameter)
            self.is_unknown = self.is_unknown or not same
            if len(same) > 1 and parameter.layout == torch.strided:
                self._parameters.append(parameter)
                self._slots.append(slots.setdefault((same, group_of[name]), len(slots)))
        for device in {parameter.device for parameter in self._parameters}:
            _factors(device)  # its copy waits for the device, and a hash must not
        sets = tuple(dict.fromkeys(same for same, _ in slots))
        own = HashLayout(
            sets,
            tuple((sets.index(same), groups[at]) for same, at in slots),
            all(parameter.device.type == "cpu" for parameter in self._parameters),
        )
        layouts = ranks.gather(own, HashLayout)
        self._comparison = _Comparison(layouts)
        self._is_on_host = all(layout.is_on_host for layout in layouts)
        self._ranks = ranks
        self._copies: list[_HostCopy] = []
        self._gathered: list[Tensor] = []
        self._work: Work | None = None
        self.hashed_at = 0
        """The step of the last hashes."""
        self.equal_at = 0
        """The step of the last hashes that were equal."""
        self.is_pending = False
        """Whether a comparison has been started, and its end is not known here."""
        self.judgement: ResultJudgement | None = None
        """Which replica differs, until that is `taken`."""

    @property
    def has_replicas(self) -> bool:
        """Whether parameters of any rank can be compared; the same on all ranks."""
        return self._comparison.width > 0

    @torch.no_grad()
    def start(self, step: int) -> None:
        """Hash the parameters as they are after this step; it waits for no device.

        What has been found before, and was not taken, comes first.
        """
        self.settle()
        if self.judgement is not None:
            return
        self.hashed_at, self.is_pending = step, True
        by_device: defaultdict[torch.device, list[int]] = defaultdict(list)
        for index, parameter in enumerate(self._parameters):
            by_device[parameter.device].append(index)
        self._copies = [
            _HostCopy(
                [self._slots[index] for index in indices],
                torch.stack([bits_sum(local_part(self._parameters[index])) for index in indices]),
            )
            for indices in by_device.values()
        ] or [_HostCopy([], torch.zeros(0, dtype=torch.int64, device="cpu"))]
        if self._is_on_host:
            self._gather()

    def go_on(self) -> None:
        """Do the next part of the comparison, if it would not wait."""
        if self._work is not None:
            if self._work.is_completed():
                self.settle()
        elif all(copy.has_arrived() for copy in self._copies):
            self._gather()

    def settle(self) -> None:
        """Wait for the end of the comparison."""
        if not self.is_pending:
            return
        if self._work is None:
            self._gather()
        assert self._work is not None
        self._work.wait()
        hashes = [gathered.tolist() for gathered in self._gathered]
        self._copies, self._gathered, self._work, self.is_pending = [], [], None, False
        self.judgement = self._comparison.odd_one_out(hashes)
        if self.judgement is None:
            self.equal_at = self.hashed_at

    def taken(self) -> ResultJudgement | None:
        """Wait for the comparison; which replica differs, once; None if none does."""
        self.settle()
        judgement, self.judgement = self.judgement, None
        return judgement

    def compared_now(self, step: int) -> ResultJudgement | None:
        """Hash, and wait for the comparison; None if there are no replicas, or none differs."""
        if not self.has_replicas:
            return None
        self.taken()
        self.start(step)
        return self.taken()

    def gone_back(self, made: int) -> None:
        """The training goes on after an earlier step: what was found is of the past."""
        self.taken()
        self.equal_at = made + 1

    def _gather(self) -> None:
        """Begin to send the hashes to all ranks; it waits for those of this rank."""
        hashes = torch.zeros(self._comparison.width, dtype=torch.int64, device="cpu")
        for copy in self._copies:
            # A different odd factor for each, or values that have changed places would be equal.
            factors = torch.arange(len(copy.slots), device="cpu") * 2 + 1
            hashes.index_add_(
                0, torch.tensor(copy.slots, device="cpu").long(), copy.read() * factors
            )
        self._gathered, self._work = self._ranks.begin_gather(hashes)


class _HostCopy:
    """Sums on their way from a device to the host."""

    def __init__(self, slots: Sequence[int], sums: Tensor) -> None:
        self.slots = slots
        self._event: Any = None
        if sums.device.type == "cpu":
            self._sums = sums
            return
        self._sums = torch.empty(sums.shape, dtype=sums.dtype, device="cpu", pin_memory=True)
        self._sums.copy_(sums, non_blocking=True)
        self._event = torch.Event(sums.device)
        self._event.record(torch.accelerator.current_stream(sums.device))

    def has_arrived(self) -> bool:
        return self._event is None or self._event.query()

    def read(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._sums


class _Comparison:
    """Compares the hashes of all ranks; all ranks come to the same judgement."""

    def __init__(self, layouts: Sequence[HashLayout]) -> None:
        self.width = max((len(layout.slots) for layout in layouts), default=0)
        columns: defaultdict[Replicas, dict[int, dict[str, int]]] = defaultdict(dict)
        for rank, layout in enumerate(layouts):
            for column, (index, name) in enumerate(layout.slots):
                columns[layout.replicas[index]].setdefault(rank, {})[name] = column
        self._sets: list[tuple[tuple[str, ...], dict[int, list[int]]]] = []
        for replicas, column_of in sorted(columns.items()):
            names = tuple(next(iter(column_of.values())))
            # Ranks that disagree on who has which parameters cannot be compared.
            if all(tuple(column_of.get(rank, ())) == names for rank in replicas):
                chosen = {rank: list(column_of[rank].values()) for rank in replicas}
                self._sets.append((names, chosen))
        if not self._sets:
            self.width = 0

    def odd_one_out(self, hashes: Sequence[Sequence[int]]) -> ResultJudgement | None:
        judgements = (
            odd_one_out(
                {
                    rank: tuple(hashes[rank][at] for at in columns)
                    for rank, columns in ranks.items()
                },
                names,
            )
            for names, ranks in self._sets
        )
        return next(filter(None, judgements), None)


class _ReplicasOf:
    """Knows which ranks have the same part of a parameter."""

    def __init__(self, modules: Iterable[nn.Module], given: "ProcessGroup | None") -> None:
        self._given = _ranks_of(given) if given is not None else ()
        self._wrapped: dict[int, Replicas] = {}
        for module in modules:
            for inner in module.modules():
                if isinstance(inner, nn.parallel.DistributedDataParallel):
                    same = _ranks_of(inner.process_group)
                    ignored = set(inner.parameters_to_ignore)
                    for name, parameter in inner.module.named_parameters():
                        if name not in ignored:
                            self._wrapped[id(parameter)] = same

    def __call__(self, parameter: Tensor) -> Replicas:
        return self._wrapped.get(id(parameter)) or _mesh_replicas(parameter) or self._given


def _ranks_of(group: "ProcessGroup") -> Replicas:
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _mesh_replicas(parameter: Tensor) -> Replicas:
    """Return the ranks of a DTensor that differ only along dimensions it is replicated on."""
    if not _is_distributed(parameter):
        return ()
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    own = mesh.get_coordinate()
    if own is None:
        return ()
    place = tuple(
        slice(None) if placement.is_replicate() else at
        for placement, at in zip(placements, own, strict=True)
    )
    return tuple(sorted(mesh.mesh[place].flatten().tolist()))


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a distributed tensor; other tensors as they are."""
    part: Tensor = tensor.to_local() if _is_distributed(tensor) else tensor  # type: ignore[attr-defined]
    return part


def _is_distributed(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def bits_sum(tensor: Tensor) -> Tensor:
    """Return a hash of a tensor's bits and their places, whatever the order of addition.

    It does not depend on where the tensor lies in memory, and waits for no device.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    size = tensor.element_size()
    per_word = _WORD_BYTES // size
    if not tensor.is_contiguous() or tensor.storage_offset() % per_word:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    bits = tensor.view(-1).view(_INTEGERS[size])
    whole = bits.numel() // per_word * per_word
    words = bits[:whole].view(torch.int64)
    rows = words.numel() // _COLUMNS
    sums = words[rows * _COLUMNS :]
    if rows:
        sums = torch.cat((words[: rows * _COLUMNS].view(rows, _COLUMNS).sum(0), sums))
    if whole < bits.numel():
        sums = torch.cat((sums, bits[whole:].long()))
    low, high = _factors(tensor.device)
    # The highest bit times any odd factor is the highest bit: a pair of them would cancel out.
    count = sums.numel()
    hashed: Tensor = (sums * low[:count] + (sums >> 32) * high[:count]).sum()
    return hashed


@cache
def _factors(device: torch.device) -> Tensor:
    """Odd numbers for the columns, the words after the last row, and what is less than a word."""
    dice = torch.Generator().manual_seed(1)
    count = 2 * _COLUMNS + _WORD_BYTES
    factors = torch.randint(-(1 << 62), 1 << 62, (2, count), generator=dice, device="cpu") | 1
    return factors.to(device)
