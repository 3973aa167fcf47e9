"""Which rank writes what several ranks have, and what they are asked to agree on."""

from typing import Any

import pytest
import torch

from tests.unit.trainer_sdk.checkpoint.saved_states import together
from trainer_sdk.checkpoint.flat_state import StatePiece, flatten
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.save.description import Description, PlanError, offered
from trainer_sdk.checkpoint.save.plan import Plan, make_plan
from trainer_sdk.checkpoint.save.shared_scalars import SharedScalars


class Wrapped:
    """How torch's guides wrap a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {f"own.{key}": value for key, value in self.model.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def plan_of(state: dict[str, Any], group: RankGroup, *, to_files: bool = True) -> Plan:
    return make_plan(flatten(state), group, "mark", with_all=False, state=state, to_files=to_files)


@pytest.mark.parametrize("wrap", [lambda model: model, Wrapped], ids=["module", "wrapped"])
def test_buffers_and_values_are_those_of_the_lowest_rank_and_the_rest_is_balanced(
    wrap: Any,
) -> None:
    def one(group: RankGroup) -> list[str]:
        norm = torch.nn.Sequential(torch.nn.Linear(90, 90), torch.nn.BatchNorm1d(90))
        plan = plan_of({"model": wrap(norm), "lr": 0.1}, group)
        return [plan.local.pieces[one.number].key.rpartition("1.")[2] for one in plan.placed]

    first, other = together(2, one)
    assert {"running_mean", "running_var", "num_batches_tracked", "lr"} <= set(first)
    assert other, "the largest tensors are shared out"
    assert not set(first) & set(other)


def piece(key: str, rows: int | None) -> StatePiece:
    if rows is None:
        return StatePiece(key, (key,), 4, True, dtype="float32")
    shape = {"shape": (1, 2), "offsets": (1 - rows, 0), "sizes": (rows, 2)}
    return StatePiece(key, (key,), 8 * rows, True, dtype="float32", is_shard=True, **shape)  # type: ignore[arg-type]


def test_a_rank_without_rows_of_a_parameter_does_not_write_its_steps() -> None:
    ranks = [
        Description((piece("o.3.mean", rows), piece("o.3.step", None), piece("o.4.step", None)), "")
        for rows in (0, 1, 0)
    ]
    written = [[item.index.fqn for item in plan.items] for plan in offered(ranks)]
    assert written == [["o.3.mean", "o.4.step"], ["o.3.mean", "o.3.step"], ["o.3.mean"]]


def test_optimizers_that_number_other_parameters_are_refused_where_files_are_written() -> None:
    def one(group: RankGroup, *, to_files: bool, name: str) -> None:
        model = torch.nn.ModuleDict({f"stage{group.rank}": torch.nn.Linear(3, 3)})
        optimizer = torch.optim.Adam(model.parameters())
        state = {"model": model, name.format(group.rank): optimizer}
        plan_of(state, group, to_files=to_files)

    with pytest.raises(PlanError, match='optimizer has other parameters on rank 1 than .*"optimi'):
        together(2, lambda group: one(group, to_files=True, name="optimizer"))
    together(2, lambda group: one(group, to_files=False, name="optimizer"))
    together(2, lambda group: one(group, to_files=True, name="optimizer-{}"))


def test_unlike_values_of_one_name_are_refused_on_all_ranks() -> None:
    with pytest.raises(PlanError, match=r"w is float32\[5\] on rank 1, and float32\[4\] on"):
        together(2, lambda group: plan_of({"w": torch.ones(4 + group.rank)}, group))


def test_scalars_that_differ_are_found_once() -> None:
    def one(group: RankGroup) -> list[str]:
        scalars = SharedScalars(group)
        found = []
        for late in (0, 1, 0, 1):
            state = {
                "step": torch.tensor(6.0 - late * (group.rank == 2)),
                "seen": torch.full((3,), group.rank),
                f"own{group.rank}": group.rank,
                **({"loss": 0.5 + group.rank * late} if group.rank else {}),
                "name": "run",
            }
            flat = flatten(state)
            plan = plan_of(state, group)
            highest = group.highest(scalars.bounds(plan, flat))
            found.append(scalars.difference(plan, flat, highest))
        return found

    right, wrong, *rest = together(3, one)[0]
    assert right == ""
    assert set(wrong.split("; ")) == {
        "step is 6.0 on rank 0 and 5.0 on rank 2",
        "loss is 1.5 on rank 1 and 2.5 on rank 2",
    }
    assert rest == ["", ""]
