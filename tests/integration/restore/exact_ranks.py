"""Trains in many ways on real ranks, restarts each, and compares it with an undisturbed training.

Torch is imported once, and the ranks of all cases are forked from here, once for each world size. A
restart is a new model, with other numbers in it, and a new `Checkpointer`. Prints the differences.
"""

import faulthandler
import json
import os
import random
import shutil
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # each rank would import it with its first optimizer
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

from trainer_sdk.checkpoint.checkpointer import Checkpointer
from trainer_sdk.checkpoint.data import RngState

WORLD, OTHER = 4, 2
SAVED_AFTER = 2, 3, 5
"""The steps after which a training is saved and restarted."""
LAST = 7
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Nested(Optimizer):
    """An optimizer whose state has a number, a None, a dict and a list of tensors."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "about": {"name": "nested", "none": None}})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                state = self.state[one]
                if not state:
                    zeros = torch.zeros_like(one, dtype=torch.float64)
                    state.update(
                        step=0, none=None, means={"first": zeros}, last=[zeros], most=zeros
                    )
                state["step"] += 1
                state["means"]["first"] = state["means"]["first"] * 0.9 + one.grad
                one.sub_((state["means"]["first"] * group["lr"] / state["step"]).to(one.dtype))
                state["last"] = [one.grad.double()]
                state["most"] = state["most"] + state["means"]["first"].abs() / 3


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=0.01),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "nested": Nested,
    "sgd": lambda p: SGD(p, lr=0.1),
    "adam one by one": lambda p: Adam(p, lr=torch.tensor(0.01), foreach=False),
    "adamw foreach": lambda p: AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "adam amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True),
    "nadam": lambda p: NAdam(p, lr=0.01),
    "adagrad": lambda p: Adagrad(p, lr=0.01),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, momentum=0.9, centered=True),
}


class Counted(nn.Module):
    """It has a buffer that changes at each step."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return batch


def parts() -> dict[str, nn.Module]:
    """The second weight has three rows: of four ranks, one has none of them."""
    return {
        "0": nn.Linear(8, 16),
        "1": nn.Dropout(0.2),
        "2": Counted(),
        "3": nn.Linear(16, 3),
        "4": nn.Linear(3, 4, bias=False).requires_grad_(False),
    }


def model_of(*names: str) -> nn.Sequential:
    """The parts with these names, which they keep; all of them if none is named."""
    made = parts()
    return nn.Sequential(OrderedDict((name, made[name]) for name in names or made))


def batch_of(step: int, place: int) -> torch.Tensor:
    return torch.arange(32.0).view(4, 8).mul(1 + step + 10 * place).sin()


def sharded(model: nn.Module, mesh: Any = None) -> nn.Module:
    fully_shard(model, mesh=mesh)
    return model


def mesh_of(first: str, second: str, *, stages: int = 0) -> Any:
    """All ranks in two dimensions: in pairs, or in so many stages."""
    size = dist.get_world_size()
    shape = (stages, size // stages) if stages else (size // 2, 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=(first, second))


def backward(loss: Any) -> float:
    loss.backward()
    return float(loss)


class Training:
    """The training of one rank."""

    by_name = False

    def __init__(self, optimizer: str) -> None:
        self.model = self.build()
        self.optimizer = OPTIMIZERS[optimizer](
            [one for one in self.model.parameters() if one.requires_grad]
        )
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.rank = dist.get_rank()

    def build(self) -> nn.Module:
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        held: Any = ByName(self.model, self.optimizer) if self.by_name else self.optimizer
        return {
            "model": self.model,
            "optimizer": held,
            "schedule": self.schedule,
            "random": RngState(),
        }

    def gradients(self, step: int) -> float:
        """Make the gradients of a step, and return its loss."""
        return backward(self.model(batch_of(step, self.rank)).pow(2).mean())

    def step(self, step: int) -> float:
        loss = self.gradients(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return loss

    def renew(self) -> None:
        """Do what a restart does, besides ours."""

    def digest(self) -> dict[str, str]:
        """All that the rank has, by key."""
        held = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "random": {"torch": torch.get_rng_state(), "python": hash(random.getstate())},
        }
        return {key.replace("._orig_mod", ""): _digest(value) for key, value in _leaves(held)}

    def unsharded(self) -> dict[str, str]:
        """All that ranks have together, by name; the same for any world size."""
        held = {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=_FLAT),
            "schedule": self.schedule.state_dict(),
        }
        return {
            key: _digest(value.full_tensor() if isinstance(value, DTensor) else value)
            for key, value in _leaves(held)
        }


class ByName:
    """The state of an optimizer by the names of parameters, as torch's guides have it."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return dict(get_optimizer_state_dict(self.model, self.optimizer, options=_FLAT))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state, options=_FLAT)


class Replicated(Training):
    """Each rank has running means of its own, and uses those of rank 0."""

    def build(self) -> nn.Module:
        return DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(8), *parts().values()))

    def renew(self) -> None:
        """Have the first step add gradients in the order of a first step."""
        assert isinstance(self.model, DistributedDataParallel)
        self.model = DistributedDataParallel(self.model.module)


class Sharded(Training):
    def build(self) -> nn.Module:
        return sharded(model_of())


class Alternating(Training):
    """Every second restart compiles the model, or does not compile it any more."""

    made = 0

    def turn(self, model: nn.Module) -> nn.Module:
        Alternating.made += 1
        if Alternating.made % 2:
            return model
        compiled = torch.compile(model, backend="eager")
        assert isinstance(compiled, nn.Module)
        return compiled


class ShardedCompiled(Alternating):
    def build(self) -> nn.Module:
        return self.turn(sharded(model_of()))


class ReplicatedCompiled(Alternating, Replicated):
    def build(self) -> nn.Module:
        model = self.turn(nn.Sequential(nn.BatchNorm1d(8), *parts().values()))
        return DistributedDataParallel(model)


class ShardedByName(Sharded):
    by_name = True


class ShardedInReplicas(Training):
    def build(self) -> nn.Module:
        return sharded(model_of(), mesh=mesh_of("replicas", "shards"))


class InTensors(Training):
    """Tensor parallel; the dropout would differ between ranks that must have the same."""

    def build(self) -> nn.Module:
        return self.split(init_device_mesh("cpu", (dist.get_world_size(),)))

    def split(self, mesh: Any) -> nn.Module:
        model = model_of()
        model[1] = nn.Identity()
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})

    def gradients(self, step: int) -> float:
        return backward(self.model(batch_of(step, 0)).pow(2).mean())


class InShardedTensors(InTensors):
    def build(self) -> nn.Module:
        mesh = mesh_of("dp", "tp")
        return sharded(self.split(mesh["tp"]), mesh=mesh["dp"])


class InStages(Training):
    """Two stages of a pipeline, each sharded over half of the ranks."""

    by_name = True

    def build(self) -> nn.Module:
        half = dist.get_world_size() // 2
        self.stage = dist.get_rank() // half
        self.peer = (dist.get_rank() + half) % (2 * half)
        names = ("3", "4") if self.stage else ("0", "1", "2")
        return sharded(model_of(*names), mesh=mesh_of("pp", "dp", stages=2)["dp"])

    def gradients(self, step: int) -> float:
        between = torch.zeros(4, 16)
        if not self.stage:
            out = self.model(batch_of(step, self.rank))
            dist.send(out.detach(), self.peer)
            dist.recv(between, self.peer)
            out.backward(between)
            return float(out.sum())
        dist.recv(between, self.peer)
        loss = backward(self.model(between.requires_grad_()).pow(2).mean())
        assert between.grad is not None
        dist.send(between.grad, self.peer)
        return loss


class InNamedStages(InStages):
    """Each stage gives its optimizer a name of its own."""

    by_name = False

    def state(self) -> dict[str, Any]:
        state = super().state()
        state[f"optimizer-{self.stage}"] = state.pop("optimizer")
        return state


class OfExperts(Training):
    """A layer that all ranks have, and experts of which each rank has another number."""

    by_name = True

    def build(self) -> nn.Module:
        owners = [0, 0, 1, min(2, dist.get_world_size() - 1)]
        model = nn.ModuleDict({"shared": nn.Linear(8, 3)})
        experts = [nn.Linear(3, 3 + number) for number in range(len(owners))]
        for number, owner in enumerate(owners):
            if owner == dist.get_rank():
                model[f"expert{number}"] = experts[number]
        return model

    def gradients(self, step: int) -> float:
        assert isinstance(self.model, nn.ModuleDict)
        out = self.model["shared"](batch_of(step, self.rank))
        experts = [part(out) for name, part in self.model.items() if name != "shared"]
        loss = backward(sum(one.pow(2).mean() for one in (out, *experts)))
        for one in self.model["shared"].parameters():
            dist.all_reduce(one.grad)
        return loss


SHARDINGS: dict[str, type[Training]] = {
    "fsdp2": Sharded,
    "ddp": Replicated,
    "hsdp": ShardedInReplicas,
    "tp": InTensors,
    "tp+fsdp2": InShardedTensors,
    "pp+fsdp2": InStages,
    "pp+fsdp2 named": InNamedStages,
    "experts": OfExperts,
    "fsdp2 by name": ShardedByName,
    "fsdp2 compiled": ShardedCompiled,
    "ddp compiled": ReplicatedCompiled,
}
_WITHOUT_NAMES = {"nested"}
"""Optimizers whose state torch's functions for states by name do not know."""


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}")
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{key}.{number}")
        yield f"{key}.type", len(value)
    else:
        yield key, value


def _digest(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    local = value.to_local() if isinstance(value, DTensor) else value
    octets = local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    form = f"{type(value).__name__} {local.dtype} {tuple(local.shape)}"
    return f"{form} {xxhash.xxh3_64_hexdigest(octets)}"


class Case:
    """A way to train, and where it is saved."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.sharding, self.optimizer, self.tier = name.split("/")
        self.folder = folder / name.replace("/", "_").replace(" ", "-")
        self.rank = dist.get_rank()
        self.differing: list[str] = []

    def saves(self, root: str = "root") -> Checkpointer:
        os.environ["EVERSTEP_IMAGES"] = str(self.folder / "images")
        return Checkpointer(
            self.folder / root, every=10**9, keep_memory=self.tier != "global", job="exact"
        )

    def training(self, seed: int) -> Training:
        torch.manual_seed(seed)
        random.seed(seed)
        return SHARDINGS[self.sharding](self.optimizer)

    def compare(self, when: str, here: Mapping[str, str], there: Mapping[str, str]) -> None:
        wrong = [
            key for key in sorted(here.keys() | there.keys()) if here.get(key) != there.get(key)
        ]
        if wrong:
            key = wrong[0]
            self.differing.append(
                f"{self.name}: {when}, rank {self.rank}: {len(wrong)} of {len(there)} differ, as "
                f"{key}: {here.get(key)} and not {there.get(key)}"
            )

    def restart(self) -> None:
        """Where the state of the rank is after the end of its round."""
        dist.barrier()
        own = self.folder / f"images/own/rank-{self.rank}"
        if self.tier == "peer":
            held = self.folder / f"images/held/slot-0/rank-{self.rank}"
            shutil.rmtree(held, ignore_errors=True)
            shutil.copytree(own, held)
            shutil.rmtree(own)
        dist.barrier()

    def restored(self, training: Training, saves: Checkpointer, step: int) -> None:
        found = saves.restore(training.state())
        tier = "memory" if step == LAST and self.tier == "peer" else self.tier
        if found is None or (found.step, found.tier) != (step, tier):
            raise AssertionError(f"restored {found}, and not step {step} of {tier}")

    def same_world(self) -> dict[str, str]:
        """Train, and restart again and again; returns what the last save has, unsharded."""
        (self.folder / "images").mkdir(parents=True, exist_ok=True)
        (self.folder / "images/offer.json").write_text('{"round": 9, "complete": true}')
        undisturbed = self.training(7)
        right, kept = {}, {}
        for step in range(1, LAST + 1):
            right[step] = {"loss": repr(undisturbed.step(step))} | undisturbed.digest()
            if step in (*SAVED_AFTER, LAST):
                kept[step] = undisturbed.digest()
                undisturbed.renew()
                if self.tier == "global":
                    kept[step] = undisturbed.digest()
        training, saves = self.training(7), self.saves()
        for step in range(1, LAST + 1):
            now = {"loss": repr(training.step(step))} | training.digest()
            self.compare(f"after step {step}", now, right[step])
            if step in SAVED_AFTER:
                saves.save(step, training.state(), wait=True)
                saves.close()
                self.restart()
                training, saves = self.training(100 + step), self.saves()
                self.restored(training, saves, step)
                self.compare(f"after the restore of step {step}", training.digest(), kept[step])
        saves.save(LAST, training.state(), wait=True)
        again = self.training(200)
        self.restored(again, saves, LAST)
        saves.close()
        self.compare("after restore, save and restore", again.digest(), kept[LAST])
        return self.unsharded(again)

    def unsharded(self, training: Training) -> dict[str, str]:
        """What all ranks have together; nothing if a rank differs, as the others would hang."""
        wrong = torch.tensor(len(self.differing))
        dist.all_reduce(wrong)
        return {} if wrong or self.optimizer in _WITHOUT_NAMES else training.unsharded()

    def other_world(self, root: str, to: str) -> dict[str, str]:
        """Restore, and save elsewhere; returns what was restored, unsharded."""
        training, saves = self.training(300), self.saves(root)
        found = saves.restore(training.state())
        assert found is not None
        assert found.step == LAST
        saves.close()
        saves = self.saves(to)
        saves.save(LAST, training.state(), wait=True)
        saves.close()
        return self.unsharded(training)


def in_world(
    folder: Path, size: int, work: Callable[[Case], Any], names: list[str]
) -> dict[str, Any]:
    """What the ranks of a world of this size found, for each case: by rank."""
    store = folder / f"store-{os.urandom(4).hex()}"
    ranks = []
    for rank in range(size):
        child = os.fork()
        if not child:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
            _be_rank(folder, store, names, work)
        ranks.append(child)
    for child in ranks:
        os.waitpid(child, 0)
    found = [json.loads(Path(f"{store}-{rank}").read_text()) for rank in range(size)]
    return {name: [one.get(name) for one in found] for name in names}


def _be_rank(folder: Path, store: Path, names: list[str], work: Callable[[Case], Any]) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found: dict[str, Any] = {}
    name = ""
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        for name in names:
            faulthandler.dump_traceback_later(90, exit=True)  # ranks that differ wait for ever
            case = Case(folder, name)
            found[name] = [work(case), case.differing]
        dist.barrier()
    except BaseException:
        found[name] = [{}, [f"{name}: rank {rank}: {traceback.format_exc()}"]]
    Path(f"{store}-{rank}").write_text(json.dumps(found))
    os._exit(0)


def _united(case: list[Any]) -> dict[str, str]:
    return {key: value for rank in case if rank for key, value in rank[0].items()}


def main(folder: Path, names: list[str], others: list[str]) -> list[str]:
    same = in_world(folder, WORLD, Case.same_world, names)
    differing = [line for ranks in same.values() for rank in ranks if rank for line in rank[1]]
    if differing:
        return differing
    fewer = in_world(folder, OTHER, lambda case: case.other_world("root", "other"), others)
    again = in_world(folder, WORLD, lambda case: case.other_world("other", "again"), others)
    for when, world in (("in another world", fewer), ("back in the first world", again)):
        for name in others:
            differing += [line for rank in world[name] if rank for line in rank[1]]
            right, found = _united(same[name]), _united(world[name])
            wrong = [key for key in right.keys() | found.keys() if right.get(key) != found.get(key)]
            differing += [f"{name}: {when}: {key}: {found.get(key)}" for key in wrong[:2]]
    return differing


if __name__ == "__main__":
    print(json.dumps({"differing": main(Path(sys.argv[1]), *map(json.loads, sys.argv[2:]))}))
