"""Runs drawn trainings on forked gloo ranks: `python training.py WORLD FOLDER SEED…`.

Torch is imported once, and the ranks of a world are forked once for all its trainings. Each rank
appends a line of JSON for each training to `rank-N.jsonl`.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.modules import module as module_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizer_hooks
from torch.utils.data import DataLoader, TensorDataset, dataloader

from tests.chaos.numerics_runs.drawing import Case, InjectedFault, drawn
from trainer_sdk.checkpoint import Checkpointer, PositionedSampler, RngState
from trainer_sdk.inject import numeric_faults
from trainer_sdk.inject.catalog import fault_request
from trainer_sdk.numerics.numerics import Numerics
from trainer_sdk.rank_session import Session, session
from trainer_sdk.testing import watched
from trainer_sdk.wire import NumericsReported

WIDTH, HIDDEN, SAMPLES = 8, 16, 512
_GLOO_S = 90
_next_batch = dataloader._BaseDataLoaderIter.__next__

Compute = Callable[[list[Tensor]], Tensor | None]


@dataclass
class Parallelized:
    """A model as a kind of parallelism trains it."""

    module: nn.Module
    compute: Compute
    """Forward and backward of a batch; the loss, where this rank knows it."""
    place: tuple[int, int]
    """This rank's place among those with other data."""


@cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Made once: each makes groups."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def model_of(case: Case) -> nn.Sequential:
    """The same on all ranks."""
    torch.manual_seed(case.seed)
    norm = nn.BatchNorm1d(HIDDEN) if case.has_batch_norm else nn.Identity()
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), norm, nn.Tanh(),
        nn.Dropout(case.dropout), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1),
    )  # fmt: skip


def data_of(case: Case) -> TensorDataset:
    """A linear truth with noise, and some samples that are much larger than others."""
    generator = torch.Generator().manual_seed(case.seed)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    if case.odd_samples:
        inputs[:: case.odd_samples] *= 10
    labels = inputs.sum(dim=1, keepdim=True) / WIDTH**0.5
    noise = torch.randn(SAMPLES, 1, generator=generator)
    return TensorDataset(inputs, labels + case.noise * noise)


def parallelized(case: Case) -> Parallelized:
    """The model on this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if case.parallel == "pipeline":
        return _staged(case)
    module: nn.Module = model_of(case)
    if case.parallel == "ddp":
        module = DistributedDataParallel(module)
    else:
        mesh = (
            mesh_of((world,), ("shard",))
            if case.parallel == "fsdp"
            else mesh_of((2, world // 2), ("replicate", "shard"))
        )
        for layer in module.children():
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
    precision = torch.autocast("cpu", torch.bfloat16) if case.has_bfloat16 else nullcontext()

    def compute(batch: list[Tensor]) -> Tensor:
        inputs, labels = batch
        with precision:
            result = module(inputs)
        loss: Tensor = nn.functional.mse_loss(result.float(), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return Parallelized(module, compute, (rank, world))


def _staged(case: Case) -> Parallelized:
    """Two stages that FSDP shards over the replicas of both; neighbours are a replica."""
    replicas = dist.get_world_size() // 2
    mesh = mesh_of((replicas, 2), ("data", "stage"))
    number = mesh.get_local_rank("stage")
    whole = model_of(case)
    part = whole[:3] if number == 0 else whole[3:]
    fully_shard(part, mesh=mesh["data"])
    stage = PipelineStage(part, number, 2, torch.device("cpu"), group=mesh.get_group("stage"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)

    def compute(batch: list[Tensor]) -> Tensor | None:
        inputs, labels = batch
        if number == 0:
            schedule.step(inputs)
            return None
        losses: list[Tensor] = []
        schedule.step(target=labels, losses=losses)
        return torch.stack(losses).mean().detach()

    return Parallelized(part, compute, (mesh.get_local_rank("data"), replicas))


class Training:
    """One training of a case on this rank."""

    def __init__(self, case: Case, folder: Path, skipped: list[tuple[int, int]]) -> None:
        self._case = case
        self._parts = parallelized(case)
        torch.manual_seed(1000 * case.seed + self._parts.place[0])
        self._optimizer = torch.optim.SGD(
            self._parts.module.parameters(), lr=case.rate, momentum=0.9
        )
        jumps = dict(case.rate_jumps)
        self._scheduler = torch.optim.lr_scheduler.MultiplicativeLR(
            self._optimizer, lambda step: jumps.get(step, 1.0)
        )
        self._sampler = PositionedSampler(
            SAMPLES, batch_size=case.batch_size, seed=case.seed, place=self._parts.place
        )
        self._skipped = skipped
        self._loader = DataLoader(data_of(case), batch_sampler=self._sampler)
        stage = dist.get_rank() % 2 if case.parallel == "pipeline" else 0
        self._state: dict[str, Any] = {
            f"model {stage}": self._parts.module, f"optimizer {stage}": self._optimizer,
            "scheduler": self._scheduler, "sampler": self._sampler, "rng": RngState(),
        }  # fmt: skip
        self._folder = folder
        self._checkpointer: Checkpointer | None = None
        self._losses: dict[int, float | None] = {}
        self._norms: dict[int, float] = {}

    def run(self) -> dict[str, Any]:
        """Train; all that a judge of the run needs."""
        with watched(dist.get_rank()) as watch:
            run = session()
            options: Mapping[str, Any] = self._case.choices
            if self._case.saves_every:
                self._checkpointer = Checkpointer(self._folder)
                options = {**options, "checkpointer": self._checkpointer}
                self._checkpointer.restore(self._state)
            numerics = Numerics(run, self._state, self._loader, **options)
            self._state["numerics"] = numerics
            if self._skipped:
                self._sampler.skip(self._skipped)
            self._train(run, numerics)
            if self._checkpointer is not None:
                self._checkpointer.close()
            events = [
                {"event": message.event, **message.body}
                for message in watch.messages
                if isinstance(message, NumericsReported)
            ]
        return {
            "losses": self._losses, "norms": self._norms, "events": events,
            "parameters": _bits_of(self._parts.module), "consumed": self._sampler.consumed,
        }  # fmt: skip

    def _train(self, run: Session, numerics: Numerics) -> None:
        parts, fault = self._parts, self._case.fault
        is_armed = False
        for batch in numerics:
            loss = numerics.compute(parts.compute, batch)
            norm = nn.utils.clip_grad_norm_(parts.module.parameters(), 100.0)
            step = run.steps_made + 1
            if numerics.accepts(loss=loss, grad_norm=norm):
                self._losses[step] = None if loss is None else float(loss.detach())
                self._norms[step] = float(getattr(norm, "full_tensor", lambda n=norm: n)())
                self._optimizer.step()
                self._scheduler.step()
            self._optimizer.zero_grad()
            run.step()
            made = run.steps_made
            if (
                self._checkpointer is not None
                and made == step
                and made % self._case.saves_every == 0
            ):
                self._checkpointer.save(made, self._state, wait=True)
            if fault is not None and not is_armed and made >= fault.step - 1:
                is_armed = True
                _inject(fault)
            if made >= self._case.steps:
                break


def _inject(fault: InjectedFault) -> None:
    if fault.rank == dist.get_rank():
        request = fault_request(
            fault.name, for_s=fault.for_s, amount=fault.amount, target=fault.target
        )
        numeric_faults.make(request)


def _without_faults() -> None:
    module_hooks._global_forward_hooks.clear()
    module_hooks._global_forward_pre_hooks.clear()
    optimizer_hooks._global_optimizer_pre_hooks.clear()
    dataloader._BaseDataLoaderIter.__next__ = _next_batch  # type: ignore[method-assign]


def _bits_of(module: nn.Module) -> list[int]:
    """A number for each parameter and buffer, of all its bits."""
    return [
        int(getattr(value, "_local_tensor", value).detach().double().view(torch.int64).sum())
        for value in (*module.parameters(), *module.buffers())
    ]


def carried_out(case: Case, folder: Path) -> dict[str, Any]:
    """The results of the case, and of the same training without the fault."""
    torch.use_deterministic_algorithms(case.is_exact)
    try:
        result = Training(case, folder / f"states-{case.seed}", []).run()
    finally:
        _without_faults()
    acts = dist_events(result["events"])
    skipped = [
        (act["samples_from"], act["samples_to"])
        for act in acts
        if act["event"] == "acted" and act["action"] == "skip" and act["outcome"] == "done"
    ]
    result["undisturbed"] = Training(case.undisturbed(), folder, skipped).run()
    result["events"] = acts
    return result


def dist_events(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of rank 0, on all ranks."""
    shared = [events]
    dist.broadcast_object_list(shared, 0)
    return shared[0]


def main(world: int, folder: Path, seeds: list[int]) -> int:
    """Fork the ranks, and wait for them."""
    pids = []
    for rank in range(world):
        pid = os.fork()
        if not pid:
            try:
                _rank(rank, world, folder, seeds)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) for pid in pids)


def _rank(rank: int, world: int, folder: Path, seeds: list[int]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world,
        timeout=timedelta(seconds=_GLOO_S),
    )  # fmt: skip
    with (folder / f"rank-{rank}.jsonl").open("a", buffering=1) as results:
        for seed in seeds:
            result = carried_out(drawn(seed), folder)
            results.write(json.dumps({"seed": seed, **result}) + "\n")
    dist.barrier()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), list(map(int, sys.argv[3:]))))
