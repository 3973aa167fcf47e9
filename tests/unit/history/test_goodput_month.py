"""Goodput of a simulated month, whose every second is known (A11.4)."""

import random
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from everstep.messages import Fact, Ledger
from everstep_services.history.goodput.ledger import seconds, segments
from everstep_services.history.goodput.trace import GoodputTrace
from tests.unit.history.goodput_trace import BEGAN, ZERO_S, at
from tests.variants import variant

MONTH_S = 30 * 86400.0
REPORT_EVERY_S = 60.0


@dataclass
class Month:
    """A training that fails, restarts, saves and is requeued for a month."""

    random: random.Random
    now_s: float = 0.0
    round: int = 0
    facts: list[Fact] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    detect_s: float = 0.0
    """Of the incident that is open."""
    trained_until_s: float = 0.0
    wholes: dict[str, Fact] = field(default_factory=dict)
    """One of each kind, which the others are made from."""

    def tell(self, kind: str, **values: Any) -> None:
        moment = BEGAN + timedelta(seconds=self.now_s)
        if kind not in self.wholes:
            self.wholes[kind] = at(0, kind)
        fact_id = values.pop("id", f"{len(self.facts):08x}")
        self.facts.append(replace(self.wholes[kind], at=moment, id=fact_id, **values))

    def spend(self, time_class: str, least_s: float, most_s: float) -> float:
        lasted_s = self.random.uniform(least_s, most_s)
        self.spent[time_class] += lasted_s
        self.now_s += lasted_s
        return lasted_s

    def play(self) -> None:
        while self.now_s < MONTH_S:
            self._allocation(f"a{self.round}")
            self.now_s += self.random.uniform(10, 7200)  # queued: time that nobody allocated

    def _allocation(self, name: str) -> None:
        self.tell("allocation_started", allocation=name)
        ends_s = self.now_s + self.random.uniform(3600, 7 * 86400)
        incident, lost_s = None, 0.0
        while True:
            self.spend("rendezvous", 0.2, 60)
            self.round += 1
            self.tell("round_formed", round=self.round, allocation=name, incident=incident)
            self._begin(incident, lost_s)
            good = self.now_s + self.random.uniform(30, 20_000) >= ends_s
            trained_s = self._train()
            if good:
                self.tell("round_ended", round=self.round, cause="preempted", incident=None)
                self.spend("idle", 0.1, 30)
                self.tell("allocation_ended", allocation=name, state="requeued")
                return
            incident = f"i{self.round}"
            self.spend("stall", 0.1, 600)
            self.tell("round_ended", round=self.round, cause="rank_exited", incident=incident)
            self.detect_s = self.now_s - self.trained_until_s
            lost_s = self.random.uniform(0, trained_s)
            self.spent["productive"] -= lost_s
            self.spent["lost_steps"] += lost_s

    def _begin(self, incident: str | None, lost_s: float) -> None:
        self.spend("start_up", 0.5, 30)
        self.tell("round_started", round=self.round)
        self.spend("start_up", 0.5, 30)
        took_s = self.spend("restore", 0.1, 120)
        self.tell("checkpoint_restored", round=self.round, step=1, took_s=took_s)
        self.spend("start_up", 0.1, 300)
        self.tell(
            "progress_made", round=self.round, is_first=True, steps=1, steps_s=1.0, lost_steps=0
        )
        if incident is not None:
            self.tell(
                "incident_closed", incident=incident, outcome="recovered", lost_s=lost_s,
                lost_steps=0, ledger=Ledger(detect_s=self.detect_s), next_round=self.round,
            )  # fmt: skip

    def _train(self) -> float:
        """Some minutes or hours of steps.

        Returns how much of it was productive after a rank was slow: of steps that are lost with
        the tax on them, that is lost, too.
        """
        began = self.spent["productive"]
        for number in range(self.random.randrange(1, 40)):
            self.spend("productive", 1, REPORT_EVERY_S)
            if self.random.random() < 0.3:
                stall_s = self.spend("checkpoint_stall", 0.01, 5)
                lag_s = stall_s + self.spend("productive", 0.1, 3)
                self.tell("checkpoint_committed", round=self.round, step=number, tier="global",
                          stall_s=stall_s, lag_s=lag_s)  # fmt: skip
            if self.random.random() < 0.05:
                stalled_s = self.spend("stall", 1, 300)
                self.tell("rank_recovered", round=self.round, stalled_s=stalled_s)
            if self.random.random() < 0.05:
                finding = f"s{self.round}-{number}"
                self.tell("straggler_found", round=self.round, rank=1, id=finding)
                slow_s = self.spend("productive", 5, 50)
                lost_s = slow_s * self.random.uniform(0, 0.5)
                self.spent["productive"] -= lost_s
                self.spent["straggler_tax"] += lost_s
                self.tell("straggler_cleared", round=self.round, rank=1, finding=finding,
                          lost_s=lost_s)  # fmt: skip
                began = self.spent["productive"]
            self.tell("progress_made", round=self.round, is_first=False, steps=9, steps_s=9.0,
                      lost_steps=0)  # fmt: skip
        self.trained_until_s = self.now_s
        return self.spent["productive"] - began


@pytest.mark.parametrize("seed", [0, variant(1), variant(2)])
def test_a_month_sums_to_what_really_happened(seed: int) -> None:
    """A11.4."""
    month = Month(random.Random(seed))
    month.play()
    trace = GoodputTrace()
    trace.take(month.facts)
    parts = segments(trace, ZERO_S + month.now_s)
    shown = {name: lasted_s for name, lasted_s in seconds(parts).items() if lasted_s}
    assert set(shown) == set(month.spent)
    for name, lasted_s in shown.items():
        assert lasted_s == pytest.approx(month.spent[name], abs=0.01), name
    days = [seconds(parts, ZERO_S + 86400 * day, ZERO_S + 86400 * (day + 1)) for day in range(40)]
    for name in shown:
        assert sum(day[name] for day in days) == pytest.approx(shown[name], abs=0.01)
