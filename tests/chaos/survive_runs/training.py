"""A training that survives, with the failures of a case: `training.py FOLDER SEED`.

`training.py FOLDER SHAPE` has none. Each rank appends to `told-RANK` where each round begins, and
each finished step with its loss and a hash of its parameters and states of the optimizer.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any, get_args

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import trainer_sdk
from tests.chaos.survive_runs.drawing import HEALINGS, STEPS, Failure, Shape, drawn
from trainer_sdk.checkpoint import Checkpointer, PositionedSampler
from trainer_sdk.survive import heal as healing
from trainer_sdk.survive import loop

run = trainer_sdk.session()
folder = Path(sys.argv[1])
case = None if sys.argv[2] in get_args(Shape) else drawn(int(sys.argv[2]))
shape = sys.argv[2] if case is None else case.shape
rank = int(os.environ["RANK"])
stage = rank % 2
is_pipeline = shape.startswith(("pipeline", "twins"))
INPUTS = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))


def tell(*words: object) -> None:
    number = os.environ.get("EVERSTEP_ROUND", "1")
    line = " ".join(map(str, (words[0], number, *words[1:], os.getpid())))
    with (folder / f"told-{rank}").open("a") as file:
        file.write(line + "\n")


class Moments:
    """The failures of this rank; each happens once, after those before it."""

    def __init__(self, failures: tuple[Failure, ...]) -> None:
        self._failures = failures
        self.step = 0

    def at(self, point: str, healing: str = "") -> None:
        """Have the next failure happen if this is the point for it."""
        for number, failure in enumerate(self._failures):
            if (folder / f"failed-{number}").exists():
                continue
            if failure.rank == rank and failure.point == point and self._is_due(failure, healing):
                happen = partial(self._happen, number, failure)
                if failure.delay_ms:
                    timer = Timer(failure.delay_ms / 1e3, happen)
                    timer.daemon = True
                    timer.start()
                else:
                    happen()
            return

    def _is_due(self, failure: Failure, healing: str) -> bool:
        if failure.point == "heal":
            return HEALINGS.index(healing) >= HEALINGS.index(failure.healing)
        return self.step >= failure.step

    def _happen(self, number: int, failure: Failure) -> None:
        try:
            with (folder / f"failed-{number}").open("x") as file:
                file.write(f"{os.environ['EVERSTEP_ROUND']} {os.getpid()} {self.step}")
        except FileExistsError:
            return
        match failure.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "segfault":
                ctypes.string_at(0)
            case "raise":
                raise ValueError("an error of the script")
            case "hang":
                with run.section("hangs"):
                    time.sleep(1000)
            case "node" | "agent":
                pass  # who watches the folder kills it


moments = Moments(() if case is None else case.failures)


class Optimizer(torch.optim.AdamW):
    """Has a point between its two groups."""

    def _init_group(self, group: dict[str, Any], *arguments: Any) -> Any:
        if group is self.param_groups[-1]:
            moments.at("optimizer")
        return super()._init_group(group, *arguments)  # type: ignore[no-untyped-call]


def model_of() -> nn.Sequential:
    if shape.startswith("twins"):
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 16))
    layers = [nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 32), nn.Linear(32, 5)]
    if is_pipeline:
        return nn.Sequential(*(layers[3:] if stage else layers[:3]))
    model = nn.Sequential(*layers)
    if shape.startswith(("hsdp", "fsdp")):
        form = (2, 2) if shape.startswith("hsdp") else (4,)
        mesh = init_device_mesh("cpu", form, mesh_dim_names=("copies", "shards")[-len(form) :])
        for layer in (model[0], model[3], model):
            fully_shard(layer, mesh=mesh)
    return model


def build() -> dict[str, Any]:
    if (folder / "failed-0").exists():
        moments.at("heal", "build")
    model = model_of()
    parameters = list(model.parameters())
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2]}]
    suffix = f" {stage}" if is_pipeline else ""
    place = (rank // 2, 2) if is_pipeline else None
    return {
        f"model{suffix}": model,
        f"optimizer{suffix}": Optimizer(groups, lr=1e-2),
        "data": PositionedSampler(512, batch_size=8, place=place),
    }


def computing(model: nn.Module) -> Callable[[Tensor], float | None]:
    """Forward and backward of a batch in the groups of this round; the loss, if it is here."""
    if is_pipeline:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
        part = PipelineStage(model, stage, 2, torch.device("cpu"), group=mesh.get_group("stage"))
        schedule = ScheduleGPipe(part, 2, loss_fn=nn.functional.mse_loss)

        def compute(batch: Tensor) -> float | None:
            losses: list[Tensor] = []
            if stage:
                width = 16 if shape.startswith("twins") else 5
                schedule.step(target=torch.zeros(len(batch), width), losses=losses)
            else:
                schedule.step(batch)
            for parameter in model.parameters():  # DDP fails in its second step here
                dist.all_reduce(parameter.grad, group=mesh.get_group("data"))
            return torch.stack(losses).mean().item() if losses else None

        return compute
    if shape.startswith(("ddp", "numerics")):
        # By default the first step of each has other buckets, and so another order of summation.
        model = DistributedDataParallel(model, find_unused_parameters=True)

    def compute_whole(batch: Tensor) -> float:
        loss: Tensor = model(batch).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    return compute_whole


def numerics_of(state: dict[str, Any], data: PositionedSampler) -> Any:
    loader = DataLoader(TensorDataset(INPUTS), batch_sampler=data)
    numerics = run.numerics(state, loader, mode="validate_results", validate_every=3, hash_every=2)
    state["numerics"] = numerics
    return numerics


def hash_of_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    hasher = xxhash.xxh3_64()
    for parameter in model.parameters():
        for tensor in (parameter, *dict(sorted(optimizer.state[parameter].items())).values()):
            local = getattr(tensor, "_local_tensor", tensor)
            hasher.update(local.detach().contiguous().numpy().tobytes())
    return hasher.hexdigest()


@run.survive(
    build,
    checkpointer=lambda: Checkpointer(
        folder / "saved", job="survive", every=case.saves_every if case else STEPS * 2
    ),
    place=f"stage {stage}" if shape.startswith("twins") else "",
)
def train(state: dict[str, Any], step: int, saves: Checkpointer) -> None:
    model, optimizer, data = list(state.values())[:3]
    compute = computing(model)
    numerics = numerics_of(state, data) if shape.startswith("numerics") else None
    for batch in (numerics or data.counted(data)) if step < STEPS else ():
        moments.step = step + 1
        moments.at("any")
        optimizer.zero_grad()
        if numerics is None:
            loss = compute(INPUTS[batch])
        else:
            loss = numerics.compute(lambda inputs: compute(inputs[0]), batch)
            assert numerics.accepts(loss=loss), "a right step is refused"
        optimizer.step()
        moments.at("stepped")
        told = ("-" if loss is None else loss.hex(), hash_of_state(model, optimizer))
        try:
            step = run.step()
        finally:  # the round may be over, and the step is finished
            tell("step", moments.step, *told)
        if case and step % case.saves_every == 0:
            moments.at("save")
        saves.step(step, state)
        if step == STEPS:
            break
    tell("end", step, hash_of_state(model, optimizer))


def watch_healing() -> None:
    """Have the points of a healing, and tell where each round begins."""
    heal, copy = healing.heal, healing._Healing._copy

    def healed(*arguments: Any, **named: Any) -> Any:
        is_first = not (folder / "failed-0").exists()
        if not is_first:
            moments.at("heal", "agree")
        result = heal(*arguments, **named)
        if not is_first:
            moments.at("heal", "copied")
        tell("begin", result.step or 0, result.origin, result.kept, result.taken)
        return result

    def copied(*arguments: Any) -> Any:
        if (folder / "failed-0").exists():
            moments.at("heal", "copy")
        return copy(*arguments)

    loop.heal = healed  # type: ignore[attr-defined]
    healing._Healing._copy = copied  # type: ignore[assignment,method-assign]


watch_healing()
torch.set_num_threads(1)
train()
