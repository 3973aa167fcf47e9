"""Trainings drawn from a seed: how they are parallel, what is wrong with them, and what is true."""

import random
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Parallel = Literal["ddp", "fsdp", "hsdp", "pipeline"]
Plan = Literal[
    "healthy", "validated", "periodic", "spike", "replicas", "poison", "rollback", "counted"
]  # fmt: skip

_WARM = 52
"""After so many steps the statistics know what to expect."""
_FOR_EVER_S = 86_400.0
_PLANS: dict[Plan, int] = {
    "healthy": 6, "validated": 8, "periodic": 3, "spike": 4, "replicas": 4, "poison": 2,
    "rollback": 2,
}  # fmt: skip
_COUNTED = (16, 5)
"""Each 16th seed from the fifth on counts how results vary; the others are as without it."""


@dataclass(frozen=True, kw_only=True)
class InjectedFault:
    """A fault of the catalog, in one rank, from a step on."""

    name: str
    rank: int
    step: int
    amount: int | None = None
    target: str = ""
    for_s: float | None = None

    @property
    def is_persistent(self) -> bool:
        """Whether it comes again when a step is run again."""
        return self.for_s is not None


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training with one fault or none."""

    seed: int
    world: int
    parallel: Parallel
    plan: Plan
    steps: int
    fault: InjectedFault | None = None
    is_exact: bool = True
    """Whether torch's algorithms are deterministic, so that each bit counts."""
    batch_size: int = 8
    noise: float = 0.1
    """Of the labels."""
    rate: float = 0.02
    rate_jumps: tuple[tuple[int, float], ...] = ()
    """The steps at which the learning rate is multiplied, and by how much."""
    odd_samples: int = 0
    """One sample in so many is ten times as large as others; 0 for none."""
    has_bfloat16: bool = False
    dropout: float = 0.0
    has_batch_norm: bool = False
    choices: dict[str, Any] = field(default_factory=dict)
    """Arguments of `run.numerics`."""
    saves_every: int = 0
    """How often a checkpoint is saved; 0 for never."""

    def undisturbed(self) -> "Case":
        """The same training without the fault, while nobody looks."""
        return replace(self, fault=None, choices={"mode": "disabled"}, saves_every=0)


def drawn(seed: int) -> Case:
    """The case of a seed."""
    dice = random.Random(f"numerics {seed}")
    world = dice.choice((4, 4, 4, 8))
    (plan,) = dice.choices(list(_PLANS), list(_PLANS.values()))
    if seed % _COUNTED[0] == _COUNTED[1]:
        plan = "counted"
    kinds: tuple[Parallel, ...] = ("ddp", "fsdp", "hsdp", "pipeline")
    parallel = dice.choice(("ddp", "hsdp") if plan == "replicas" else kinds)
    case = Case(
        seed=seed, world=world, parallel=parallel, plan=plan, steps=12,
        is_exact=dice.random() < 0.7,
        has_bfloat16=dice.random() < 0.2 and parallel != "pipeline",
        dropout=dice.choice((0.0, 0.0, 0.2)),
        has_batch_norm=dice.random() < 0.3,
    )  # fmt: skip
    return _DRAWS[plan](dice, case)


def _healthy(dice: random.Random, case: Case) -> Case:
    steps = dice.randint(60, 90)
    jumps = [(dice.randint(5, steps), dice.choice((0.1, 0.3, 3.0, 5.0))) for _ in range(2)]
    return replace(
        case,
        steps=steps,
        batch_size=dice.choice((4, 8, 16)),
        noise=dice.choice((0.1, 1.0, 3.0)),
        rate_jumps=tuple(jumps) if dice.random() < 0.5 else (),
        odd_samples=dice.choice((0, 0, 0, 200)),
        choices={
            "mode": "validate_results",
            "validate_every": dice.choice((0, 9)),
            "hash_every": dice.choice((5, 20)),
        },
    )


def _validated(dice: random.Random, case: Case) -> Case:
    fault = _computation(dice, case, step=dice.randint(3, 10))
    fault = replace(fault, for_s=dice.choice((None, _FOR_EVER_S)))
    return replace(case, fault=fault, choices={"mode": "validate_results", "validate_every": 1})


def _periodic(dice: random.Random, case: Case) -> Case:
    fault = _computation(dice, case, step=dice.randint(3, 10))
    fault = replace(fault, for_s=_FOR_EVER_S)
    choices = {"mode": "validate_results", "validate_every": 4}
    return replace(case, steps=16, fault=fault, choices=choices)


def _spike(dice: random.Random, case: Case) -> Case:
    # What stays within the band is seen by `validate_every` alone: most flipped bits.
    name, amount = dice.choice(
        (
            ("nan_activation", None),
            ("scale_activation", 999_000_000),
            ("scale_activation", 99_000_000),
        )
    )
    fault = InjectedFault(
        name=name, amount=amount, rank=dice.randrange(case.world),
        step=dice.randint(_WARM + 2, _WARM + 8), for_s=dice.choice((None, _FOR_EVER_S)),
    )  # fmt: skip
    return replace(case, steps=_WARM + 12, fault=fault, choices={"mode": "validate_results"})


def _replicas(dice: random.Random, case: Case) -> Case:
    name = dice.choice(("flip_parameter", "flip_reduced_gradient"))
    # A flipped last bit of a gradient is lost when it is added to a parameter.
    most = 31 if name == "flip_parameter" else 10
    fault = InjectedFault(
        name=name, amount=dice.randint(2, most), rank=dice.randrange(case.world),
        step=dice.randint(9, 13),
    )  # fmt: skip
    choices: dict[str, Any] = {"mode": "validate_results", "hash_every": 4}
    case = replace(case, steps=26, fault=fault, choices=choices)
    if dice.random() < 0.5:
        return case
    return _saving(dice, replace(case, choices={**choices, "replica": "rollback"}))


def _poison(dice: random.Random, case: Case) -> Case:
    rank = dice.randrange(case.world)
    if case.parallel == "pipeline":
        rank |= 1  # the last stage has the labels; inputs alone only saturate the first layer
    fault = InjectedFault(
        name="poison_batch", amount=dice.choice((100, 1000)), rank=rank,
        step=dice.randint(_WARM + 3, _WARM + 9),
    )  # fmt: skip
    choices = {"mode": "validate_results", "unexpected": "skip"}
    return _saving(dice, replace(case, steps=_WARM + 14, fault=fault, choices=choices))


def _rollback(dice: random.Random, case: Case) -> Case:
    fault = _computation(dice, case, step=dice.randint(7, 10))
    choices = {"mode": "validate_results", "validate_every": 1, "transient": "rollback"}
    return _saving(dice, replace(case, fault=fault, choices=choices))


def _counted(dice: random.Random, case: Case) -> Case:
    fault = _computation(dice, case, step=dice.randint(3, 10)) if dice.random() < 0.5 else None
    return replace(case, fault=fault, choices={"mode": "report_determinism_stats"})


def _saving(dice: random.Random, case: Case) -> Case:
    return replace(
        case,
        saves_every=dice.randint(2, 5),
        # With FSDP each rank has its own running statistics, and a checkpoint has those of one.
        has_batch_norm=case.has_batch_norm and case.parallel == "ddp",
    )


_DRAWS = {
    "healthy": _healthy, "validated": _validated, "periodic": _periodic, "spike": _spike,
    "replicas": _replicas, "poison": _poison, "rollback": _rollback, "counted": _counted,
}  # fmt: skip


def _computation(dice: random.Random, case: Case, *, step: int) -> InjectedFault:
    """A fault in forward or backward; where not each bit counts, of more than a few percent."""
    name = dice.choice(("flip_gradient", "flip_activation", "scale_activation", "nan_activation"))
    amount: int | None = None
    if name.startswith("flip"):
        amount = dice.randint(0, 14 if case.is_exact else 8)
    elif name == "scale_activation":
        amount = 1000 if case.is_exact else 500_000
    rank = dice.randrange(case.world)
    # Half of the faults of activations are in an inner module, the others in the model's output.
    inner = "0" if case.parallel != "pipeline" or rank % 2 == 0 else "4"
    target = inner if name.endswith("_activation") and case.seed % 2 else ""
    return InjectedFault(name=name, amount=amount, rank=rank, step=step, target=target)
