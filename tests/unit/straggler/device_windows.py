"""A simulated training on accelerators, with a known truth: NCCL tells how long operations lasted.

The thread that asks for them runs ahead: it has asked for a whole step when the step begins.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from everstep.messages import CollectiveEntries
from tests.unit.straggler.windows import SECTIONS, Array, Simulation

ASKED_EVERY_S = 0.0003
_TRANSFER_S = 0.0005


@dataclass(frozen=True)
class Asked:
    """An operation that a rank has asked for."""

    at: float
    group: str
    sequence: int
    op: str
    section: str
    lasted: float
    is_transfer: bool = False


@dataclass
class DeviceSimulation(Simulation):
    """Data, tensor × data parallel; with `microbatches`, stages that pass these on."""

    microbatches: int = 0
    ahead: int = 0
    """How many steps the thread is ahead of its own."""
    is_timed: bool = True
    begins: list[Array] = field(default_factory=list)
    asked: list[list[Asked]] = field(default_factory=list)
    before: dict[int, float] = field(default_factory=dict)
    """When each rank has asked the last time."""

    def _forget(self) -> None:
        super()._forget()
        self.asked = [[] for _ in range(self.plan.world)]

    def _step(self) -> None:
        self.begins = [*self.begins, self.now.copy()][-1 - self.ahead :]
        self.calls = np.zeros(self.plan.world)
        if not self.microbatches:
            super()._step()
            return
        begun = self.now.copy()
        self._work("data")
        for section, order in (("forward", 1), ("backward", -1)):
            for number in range(self.microbatches):
                self._pass(section, order, delayed=number == 0)
        self._together("dp", "backward", "all_reduce 4096", waits=True)
        self._work("optimizer")
        for rank in range(self.plan.world):
            self.walls[rank][""].append(float(self.now[rank] - begun[rank]))

    def _pass(self, section: str, order: int, *, delayed: bool) -> None:
        """One microbatch through all stages."""
        plan = self.plan
        stages = np.arange(plan.world).reshape(plan.stages, -1)[::order]
        before = self.now.copy()
        self._work(section, 1 / self.microbatches, delayed=delayed)
        took = self.now - before
        self.now = before
        for stage, ranks in enumerate(stages):
            if stage:
                for sender, receiver in zip(stages[stage - 1], ranks, strict=True):
                    self._transfer(int(sender), int(receiver), section)
            self.now[ranks] += took[ranks]

    def _transfer(self, sender: int, receiver: int, section: str) -> None:
        over = max(self.now[sender], self.now[receiver]) + _TRANSFER_S * self.random.uniform(1, 1.1)
        for rank, kind in ((sender, "send"), (receiver, "recv")):
            number = self.sequence.get(f"p2p{rank}", 0)
            self.sequence[f"p2p{rank}"] = number + 1
            self._ask(rank, f"pp{rank % self.per_stage}", number, f"{kind} 4096", section, over,
                      is_transfer=True)  # fmt: skip
            self.now[rank] = over

    @property
    def per_stage(self) -> int:
        return self.plan.world // self.plan.stages

    def _ask(
        self, rank: int, group: str, sequence: int, op: str, section: str, over: float,
        *, is_transfer: bool = False,
    ) -> None:  # fmt: skip
        self.calls[rank] += 1
        began = float(self.now[rank])
        at = min(float(self.begins[0][rank]) + ASKED_EVERY_S * self.calls[rank], began)
        at = self.before[rank] = max(at, self.before.get(rank, 0.0))
        self.asked[rank].append(
            Asked(at, group, sequence, op, section, over - began, is_transfer)
        )  # fmt: skip

    def _together(self, kind: str, section: str, op: str, *, waits: bool) -> Array:
        began, ends = self.now.copy(), super()._together(kind, section, op, waits=False)
        for rank in range(self.plan.world):
            _, group, sequence, *_ = self.entries[rank][-1]
            self._ask(rank, group, sequence, op, section, float(ends[rank]))
        # A group's stream is one after the other, and computes on meanwhile.
        self.now = np.maximum(began, ends) if waits else began
        return ends

    def _runs(
        self, node: int, rank: int, kept: Sequence[tuple[float, str, int, str, str]], from_s: float
    ) -> Iterator[CollectiveEntries]:
        every = _latest(self.asked[rank])
        for group, is_transfer in dict.fromkeys((one.group, one.is_transfer) for one in every):
            mine = [one for one in every if (one.group, one.is_transfer) == (group, is_transfer)]
            ops = list(dict.fromkeys(one.op for one in mine))
            yield CollectiveEntries(
                group=group, first_sequence=mine[0].sequence, ops=tuple(ops),
                entered_us=tuple(
                    round((one.at + self._ahead(node, one.at) - from_s) * 1e6) for one in mine
                ),
                op=tuple(ops.index(one.op) for one in mine),
                section=tuple(SECTIONS.index(one.section) for one in mine)
                if self.plan.has_sections else (),
                lasted_us=tuple(round(one.lasted * 1e6) for one in mine) if self.is_timed else (),
                members=self._members(rank, group),
                are_transfers=is_transfer,
            )  # fmt: skip

    def _members(self, rank: int, group: str) -> tuple[int, ...]:
        if group.startswith("pp"):
            return tuple(range(rank % self.per_stage, self.plan.world, self.per_stage))
        kind = "dp" if int(group) >= 1000 else "tp"
        return tuple(self.groups(kind)[int(group) % 1000 - (kind == "tp")])


def _latest(asked: Sequence[Asked]) -> list[Asked]:
    """As agents choose: 64 of each kind, all from one instant on."""
    left, found = {False: 64, True: 64}, []
    for one in reversed(asked):
        if not left[one.is_transfer]:
            break
        left[one.is_transfer] -= 1
        found.append(one)
    return found[::-1]
