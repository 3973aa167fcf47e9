"""Small trainings on real gloo ranks, with faults of one rank: `trainings.py KIND WORLD FOLDER`.

Torch is imported once, and the ranks are forked. Each runs all cases of its kind, and writes what
came out as JSON.
"""

import io
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from trainer_sdk.numerics.numerics import Numerics
from trainer_sdk.rank_session import session
from trainer_sdk.testing import watched
from trainer_sdk.wire import NumericsReported

STEPS, FAULTY_STEP = 6, 4
WIDTH = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training, and what disturbs it."""

    name: str
    fault: str = ""
    """`nan` or `scale` an activation, scale the `gradient` of one, or change a bit of a
    `parameter`; empty for none."""
    is_persistent: bool = False
    rank: int = 1
    choices: dict[str, Any]
    micro_batches: int = 1
    state: str = "wrapped"
    """What the state has: the `wrapped` module, the module that DDP wraps, or no module."""
    is_left: bool = False
    """Whether the loop is left before its data end, and the session is closed then."""


CHECKED = {"mode": "validate_results", "validate_every": 1}
CASES = [
    Case(name="undisturbed", choices={"mode": "disabled"}),
    Case(name="validated", choices=CHECKED),
    Case(name="transient nan", fault="nan", choices={"mode": "validate_results"}),
    Case(name="transient scale", fault="scale", choices=CHECKED),
    Case(name="transient gradient", fault="gradient", choices=CHECKED),
    Case(name="persistent scale", fault="scale", is_persistent=True, choices=CHECKED),
    Case(name="persistent gradient", fault="gradient", is_persistent=True, choices=CHECKED),
    Case(name="observed nan", fault="nan", choices={"mode": "observe"}),
    Case(name="observed and left", fault="nan", choices={"mode": "observe"}, is_left=True),
    Case(name="replica", fault="parameter", choices={"mode": "observe", "hash_every": 1}),
    Case(
        name="replica unwrapped",
        fault="parameter",
        choices={"mode": "observe", "hash_every": 1},
        state="unwrapped",
    ),
    Case(
        name="persistent unwrapped",
        fault="scale",
        is_persistent=True,
        choices=CHECKED,
        state="unwrapped",
    ),
    Case(name="no replicas", choices={"mode": "observe"}, state="none"),
    Case(name="undisturbed micro", choices={"mode": "disabled"}, micro_batches=2),
    Case(name="transient micro", fault="scale", choices=CHECKED, micro_batches=2),
    Case(
        name="persistent micro", fault="scale", is_persistent=True, choices=CHECKED, micro_batches=2
    ),
]


FEW = (
    "undisturbed", "validated", "transient nan", "transient scale", "persistent gradient", "replica"
)  # fmt: skip
"""The cases of all kinds but DDP."""


class Device:
    """This rank's device, which may compute wrongly."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.step = 0
        self._is_due = bool(case.fault) and dist.get_rank() == case.rank

    @torch.no_grad()
    def keep(self, module: nn.Module) -> None:
        """Keep the parameters, or change a bit of one."""
        if self._is_due and self.step == 2 and self._case.fault == "parameter":
            parameter = next(module.parameters())
            local = getattr(parameter, "_local_tensor", parameter)
            local.view(torch.int32).view(-1)[0] ^= 1 << 20

    def compute(self, values: Tensor) -> Tensor:
        """The values, or wrong ones."""
        if not self._is_due or self.step < FAULTY_STEP or self._case.fault == "parameter":
            return values
        if not self._case.is_persistent:
            self._is_due = False
        if self._case.fault == "nan":
            return values * float("nan")
        if self._case.fault == "scale":
            return values * 1.001
        values.register_hook(lambda gradient: gradient * 1.5)  # type: ignore[no-untyped-call]
        return values


class Faulty(nn.Module):
    """A layer that the device may compute wrongly."""

    device: Device | None = None

    def forward(self, values: Tensor) -> Tensor:
        """The values."""
        return values if self.device is None else self.device.compute(values)


def model() -> nn.Sequential:
    """The same on all ranks."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(WIDTH, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        Faulty(),
        nn.Dropout(0.2),
        nn.Linear(16, 1),
    )


@dataclass
class Training:
    """What a kind of parallelism trains."""

    module: nn.Module
    run: Callable[[Tensor], Tensor]
    """Forward and backward of a batch; it returns the loss."""
    data_rank: int
    scaler: torch.amp.GradScaler | None = None

    def clip(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Clip the gradients; their norm."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        return nn.utils.clip_grad_norm_(self.module.parameters(), 0.5)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Change the parameters."""
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()


def replicated() -> Training:
    """DDP."""
    module = DistributedDataParallel(model())
    return Training(module, _plain(module), dist.get_rank())


def sharded(*shape: int) -> Training:
    """FSDP2, or HSDP with two dimensions."""
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    module = model()
    fully_shard(module[0], mesh=mesh)
    fully_shard(module, mesh=mesh)
    return Training(module, _plain(module), dist.get_rank())


def staged() -> Training:
    """Two stages that FSDP shards over two replicas of both: ranks 0 and 1 are a replica."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    whole = model()
    number = mesh.get_local_rank("stage")
    module = whole[:2] if number == 0 else whole[2:]
    fully_shard(module, mesh=mesh["data"])
    stage = PipelineStage(module, number, 2, torch.device("cpu"), group=mesh.get_group("stage"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, _: output.square().mean())

    def run(batch: Tensor) -> Tensor:
        if number == 0:
            schedule.step(batch)
            return torch.zeros(())
        losses: list[Tensor] = []
        schedule.step(target=torch.zeros(len(batch), 1), losses=losses)
        return torch.stack(losses).mean()

    return Training(module, run, mesh.get_local_rank("data"))


def compiled() -> Training:
    """DDP of a compiled module."""
    module = DistributedDataParallel(torch.compile(model(), backend="aot_eager"))
    return Training(module, _plain(module), dist.get_rank())


def compiled_blocks() -> Training:
    """FSDP2 of a module whose blocks are compiled, as torchtitan does it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = model()
    module = nn.Sequential(layers[:3], layers[3:])
    for block in module:
        block.compile(backend="aot_eager")
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return Training(module, _plain(module), dist.get_rank())


def replicated_tensors() -> Training:
    """The replicas of FSDP2, whose parameters are DTensors."""
    module = model()
    replicate(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return Training(module, _plain(module), dist.get_rank())


def sharded_flat() -> Training:
    """FSDP1."""
    module = FullyShardedDataParallel(model(), use_orig_params=True, device_id=torch.device("cpu"))
    return Training(module, _plain(module), dist.get_rank())


def tensor_parallel() -> Training:
    """Two data ranks of two tensor ranks each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(7)
    module = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), Faulty(), nn.Linear(16, 1))
    plan: Any = {"0": ColwiseParallel(), "3": RowwiseParallel()}
    parallelize_module(module, mesh["tensor"], plan)
    fully_shard(module, mesh=mesh["data"])
    return Training(module, _plain(module), mesh.get_local_rank("data"))


def scaled() -> Training:
    """DDP with a scaler of gradients, which finds its scale in the first step."""
    module = DistributedDataParallel(model())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)

    def run(batch: Tensor) -> Tensor:
        loss: Tensor = module(batch).square().mean()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss

    return Training(module, run, dist.get_rank(), scaler)


def _plain(module: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(batch: Tensor) -> Tensor:
        loss: Tensor = module(batch).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return run


KINDS: dict[str, Callable[[], Training]] = {
    "ddp": replicated,
    "pair": replicated,
    "fsdp": lambda: sharded(dist.get_world_size()),
    "hsdp": lambda: sharded(2, dist.get_world_size() // 2),
    "pipeline": staged,
    "compiled": compiled,
    "blocks": compiled_blocks,
    "replicate": replicated_tensors,
    "fsdp1": sharded_flat,
    "tensor": tensor_parallel,
    "scaler": scaled,
}


def trained(kind: str, case: Case) -> dict[str, Any]:
    """Train, and return losses, the sum of all parameters, and the events."""
    training = KINDS[kind]()
    device = Device(case)
    for layer in training.module.modules():
        if isinstance(layer, Faulty):
            layer.device = device
    torch.manual_seed(training.data_rank)
    data = torch.randn(STEPS * case.micro_batches, 8, WIDTH)
    torch.manual_seed(1000 + dist.get_rank())
    optimizer = torch.optim.SGD(training.module.parameters(), lr=0.1, momentum=0.9)
    losses, tries = [], 0
    with watched(dist.get_rank()) as watch, redirect_stderr(io.StringIO()) as lines:
        run = session()
        state = {
            "optimizer": optimizer,
            "scaler": training.scaler,
            **_models(case, training.module),
        }
        numerics = Numerics(run, state, data, **case.choices)
        loss = 0.0
        batches = islice(numerics, FAULTY_STEP if case.is_left else None)
        for number, batch in enumerate(batches, 1):
            device.step = run.steps_made + 1
            loss += float(numerics.compute(training.run, batch).detach())
            if number % case.micro_batches:
                continue
            tries += 1
            norm = training.clip(optimizer)
            if numerics.accepts(loss=loss, grad_norm=norm):
                losses.append(loss)
                training.step(optimizer)
                device.keep(training.module)
            optimizer.zero_grad()
            run.step()
            loss = 0.0
        run.close()
        return {
            "losses": losses,
            "steps": run.steps_made,
            "tries": tries,
            "parameters": _digest(training.module),
            "events": [
                {"event": message.event, **message.body}
                for message in watch.messages
                if isinstance(message, NumericsReported)
            ],
            "lines": lines.getvalue().splitlines(),
        }


def _models(case: Case, module: nn.Module) -> dict[str, Any]:
    if case.state == "none":
        return {}
    return {"model": module if case.state == "wrapped" else module.module}


def _digest(module: nn.Module) -> list[float]:
    values = [value.detach() for value in (*module.parameters(), *module.buffers())]
    return [float(getattr(value, "_local_tensor", value).double().sum()) for value in values]


def main(kind: str, world: int, folder: Path) -> int:
    """Fork the ranks, and wait for them."""
    pids = []
    for rank in range(world):
        pid = os.fork()
        if not pid:
            try:
                _rank(kind, rank, world, folder)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)


def _rank(kind: str, rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world
    )
    cases = [case for case in CASES if kind == "ddp" or case.name in FEW]
    results = {case.name: trained(kind, case) for case in cases}
    (folder / f"rank-{rank}.json").write_text(json.dumps(results))
    dist.barrier()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
