"""Trainings whose state goes from one process group into the next: `carried.py KIND FOLDER`.

Torch is imported once, and the ranks are forked. A kind is trained undisturbed, and then with a
step that breaks at some moment; each rank writes as JSON what came out.
"""

import gc
import json
import os
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # each training would import it with its first optimizer
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from trainer_sdk.checkpoint.data import PositionedSampler
from trainer_sdk.survive.carry import needs_rebuild, rebuild
from trainer_sdk.survive.group_abort import abort_groups, watch_groups

WORLD, STEPS, BROKEN_STEP, BROKEN_RANK, BATCH = 4, 4, 3, 1, 4
MOMENTS = ("between", "forward", "backward")
State = dict[str, Any]


class Fault(nn.Module):
    """Fails where it is told to."""

    moment = ""

    def forward(self, values: Tensor) -> Tensor:
        """The values."""
        moment, self.moment = self.moment, ""
        if moment == "forward":
            raise ValueError(moment)
        if moment == "backward":
            values.register_hook(_fail)  # type: ignore[no-untyped-call]
        return values


def _fail(gradient: Tensor) -> None:
    raise ValueError("backward")


class Net(nn.Module):
    """Layers of which not all can be divided equally, with a buffer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, width)
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(width, 3)
        self.fault = Fault()
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros(1), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        """The outputs, which the buffer scales."""
        hidden = self.drop(torch.relu(self.second(torch.relu(self.first(values)))))
        output: Tensor = self.last(self.fault(hidden)) * (1 + 0.1 * self.steps)
        return output


Wrap = Callable[[Net], DeviceMesh]


def sharded(*shape: int) -> Wrap:
    """FSDP2, or HSDP with two dimensions."""

    def wrap(model: Net) -> DeviceMesh:
        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for layer in (model.first, model.second):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return mesh

    return wrap


PLAN: Any = {"first": ColwiseParallel(), "second": RowwiseParallel()}


def parallel(model: Net) -> DeviceMesh:
    """Tensor parallelism alone; the last layer is the same on all ranks."""
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tensor",))
    parallelize_module(model, mesh, PLAN)
    return mesh


def parallel_and_sharded(model: Net) -> DeviceMesh:
    """Two data ranks of two tensor ranks each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], PLAN)
    fully_shard(model, mesh=mesh["data"])
    return mesh


KINDS: dict[str, Wrap] = {
    "fsdp": sharded(WORLD),
    "hsdp": sharded(2, 2),
    "tensor": parallel,
    "tensor and data": parallel_and_sharded,
}


def build(wrap: Wrap, width: int = 8) -> State:
    """A training, the same in each round."""
    torch.manual_seed(7)
    model = Net(width)
    wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return {
        "model": model,
        "optimizer": optimizer,
        "rate": torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
        "data": PositionedSampler(64, batch_size=BATCH, seed=3, place=(0, 1)),
        "losses": [],
        "epoch": 0,
        "mean": torch.zeros(1),
    }


DATA = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))


def train(state: State, until: int, moment: str = "") -> None:
    """Train until after this step; in the last one, a rank fails at a moment."""
    model, optimizer, data = state["model"], state["optimizer"], state["data"]
    for batch in data.counted(data):
        step = len(state["losses"]) + 1
        torch.manual_seed(100 * step)
        if step == until and dist.get_rank() == BROKEN_RANK:
            model.fault.moment = moment
        loss = model(DATA[batch]).square().mean()
        loss.backward()
        if moment:
            dist.barrier()  # as a norm of all gradients: no rank is a step ahead
        optimizer.step()
        optimizer.zero_grad()
        state["rate"].step()
        state["mean"] += loss.detach()
        state["epoch"] = step // 3
        state["losses"].append(loss.item().hex())
        with torch.no_grad():
            model.steps += 1
        if step == until:
            return


def tensors(state: State) -> Iterator[Tensor]:
    """This rank's part of all tensors, also of the optimizer."""
    model, optimizer = state["model"], state["optimizer"]
    states = (optimizer.state[parameter] for parameter in model.parameters())
    values = chain(
        model.parameters(), model.buffers(), *(each.values() for each in states), [state["mean"]]
    )
    return (getattr(value, "_local_tensor", value).detach() for value in values)


def digest(state: State) -> str:
    """Of all that the training has."""
    whole = xxhash.xxh3_128()
    for tensor in tensors(state):
        whole.update(tensor.numpy().tobytes())
    rates = [group["lr"] for group in state["optimizer"].param_groups]
    others = (rates, state["data"].consumed, state["epoch"], state["rate"].state_dict())
    whole.update(repr(others).encode())
    return whole.hexdigest()


class Rank:
    """A rank that goes from group to group."""

    def __init__(self, rank: int, folder: Path) -> None:
        self._rank, self._folder = rank, folder
        self._groups = 0

    def join(self, world_size: int = WORLD) -> None:
        """Form the next default group."""
        self._groups += 1
        store = f"file://{self._folder}/store-{self._groups}"
        dist.init_process_group("gloo", init_method=store, rank=self._rank, world_size=world_size)

    def leave(self) -> None:
        """Leave all groups, which may be broken."""
        abort_groups(is_last=True)

    def undisturbed(self, wrap: Wrap) -> dict[str, Any]:
        """A training without a fault."""
        self.join()
        state = build(wrap)
        train(state, STEPS)
        self.leave()
        return {"losses": state["losses"], "digest": digest(state)}

    def disturbed(self, wrap: Wrap, moment: str) -> dict[str, Any]:
        """A training whose step breaks, and that goes on in another group."""
        self.join()
        state = build(wrap)
        train(state, BROKEN_STEP - 1)
        position = state["data"].state_dict()
        error = ""
        if moment != "between":
            try:
                train(state, BROKEN_STEP, moment)
            except Exception as failure:
                error = str(failure)
                traceback.clear_frames(failure.__traceback__)
            state["data"].load_state_dict(position)
        self.leave()
        self.join()
        before = {tensor.data_ptr() for tensor in tensors(state)}
        former = weakref.ref(state["model"])
        assert needs_rebuild(state)
        state, unfit = rebuild(partial(build, wrap), state)
        moved = [tensor.data_ptr() in before for tensor in tensors(state)]
        train(state, STEPS)
        self.leave()
        return {
            "losses": state["losses"],
            "digest": digest(state),
            "unfit": unfit,
            "error": error,
            "is_freed": former() is None,
            "moved": sum(moved) / len(moved),
        }

    def repeated(self, wrap: Wrap) -> list[int]:
        """How many meshes and modules there are after each of several groups."""
        self.join()
        state = build(wrap)
        counts = []
        for until in range(1, 4):
            train(state, until)
            self.leave()
            self.join()
            state, _ = rebuild(partial(build, wrap), state)
            gc.collect()
            kept = [isinstance(each, (DeviceMesh, nn.Module)) for each in gc.get_objects()]
            counts.append(sum(kept))
        self.leave()
        return counts

    def unfit(self, wrap: Wrap) -> dict[str, Any]:
        """Why a state does not fit other modules, and whether it has left them as they were."""
        self.join()
        state = build(wrap)
        train(state, 2)
        self.leave()
        self.join()
        made, unfit = rebuild(partial(build, wrap, 12), state)
        fresh = build(wrap, 12)
        made["optimizer"].zero_grad()
        is_fresh = not made["optimizer"].state and all(
            torch.equal(own.to_local(), other.to_local())
            for own, other in zip(
                made["model"].parameters(), fresh["model"].parameters(), strict=True
            )
        )
        self.leave()
        return {"unfit": unfit, "is_fresh": is_fresh}

    def shrunk(self) -> dict[str, Any]:
        """A replica group that is alone after the other was lost."""
        self.join()
        state = build(sharded(2, 2))
        train(state, 3)
        self.leave()
        before = digest(state)
        if self._rank > 1:
            return {}
        self.join(2)
        state, unfit = rebuild(partial(build, sharded(1, 2)), state)
        is_same = digest(state) == before
        train(state, 4)
        self.leave()
        return {"unfit": unfit, "is_same": is_same, "losses": len(state["losses"])}


def outcome(rank: Rank, kind: str) -> dict[str, Any]:
    """All trainings of a kind."""
    wrap = KINDS[kind]
    told: dict[str, Any] = {"undisturbed": rank.undisturbed(wrap)}
    for moment in MOMENTS:
        told[moment] = rank.disturbed(wrap, moment)
    told["repeated"] = rank.repeated(wrap)
    if kind == "hsdp":
        told |= {"unfit": rank.unfit(wrap), "shrunk": rank.shrunk()}
    return told


def main(kind: str, folder: Path) -> None:
    """Fork the ranks."""
    watch_groups()
    gc.freeze()  # as the forge does: a collection would visit all of torch
    ranks = []
    for number in range(WORLD):
        child = os.fork()
        if not child:
            os._exit(_be_rank(number, kind, folder))
        ranks.append(child)
    for child in ranks:
        os.waitpid(child, 0)


def _be_rank(number: int, kind: str, folder: Path) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    told: dict[str, Any] = {}
    try:
        told = outcome(Rank(number, folder), kind)
    except BaseException:
        told = {"failed": traceback.format_exc()}
    with suppress(OSError):
        (folder / f"rank-{number}.json").write_text(json.dumps(told))
    return 0


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
