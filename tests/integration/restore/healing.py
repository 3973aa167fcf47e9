"""Four gloo ranks heal states in each way: `healing.py FOLDER`, or `healing.py FOLDER CASE`."""

import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from everstep.hashing import hash_of
from trainer_sdk.checkpoint import Checkpointer
from trainer_sdk.checkpoint.data import PerRank, PositionedSampler, RngState
from trainer_sdk.checkpoint.flat_state import flatten
from trainer_sdk.checkpoint.restore.target import local
from trainer_sdk.survive import heal as healing
from trainer_sdk.survive import peer_memory, state_copy
from trainer_sdk.survive.heal import Healed, heal
from trainer_sdk.survive.peer_memory import MemoryToken
from trainer_sdk.survive.place import place_of

WORLD = 4


class Loader:
    """A position that differs between ranks."""

    def __init__(self) -> None:
        self.at = dist.get_rank()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def built(seed: int = 0, width: int = 96) -> dict[str, Any]:
    """Tensors of many kinds, and other values."""
    torch.manual_seed(seed)
    convolution = nn.Conv2d(1, 4, 3)
    convolution.weight.data = convolution.weight.data.to(memory_format=torch.channels_last)
    model = nn.Sequential(convolution, nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50),
        "data": PositionedSampler(64, batch_size=2),
        "random": RngState(),
        "large": torch.full((600_000,), float(seed)),
        "half": torch.zeros(3, dtype=torch.bfloat16),
        "sparse": torch.eye(3).to_sparse(),
        "empty": torch.zeros(0),
        "notes": {"losses": [1.5, 2.5], "name": "a"},
    }


def sharded(mesh: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    model: Any = fully_shard(nn.Linear(16, 8), mesh=mesh)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def trained(state: dict[str, Any], steps: int) -> dict[str, Any]:
    """The state after so many steps, equal on all ranks."""
    for _ in range(steps):
        torch.manual_seed(int(state["notes"]["losses"][-1]))
        state["model"](torch.randn(2, 1, 8, 8)).square().mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["scheduler"].step()
        state["data"].advance()
        state["notes"]["losses"].append(state["notes"]["losses"][-1] + 1)
        state["large"] += 1
    return state


def trained_sharded(state: dict[str, Any], steps: int) -> dict[str, Any]:
    for _ in range(steps):
        state["model"](torch.ones(2, 16)).square().mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
    return state


def bits(state: dict[str, Any]) -> str:
    """A hash of all that must be equal."""
    sent = {name: part for name, part in state.items() if name != "random"}
    values = [
        (key, hash_of(local(value).to_dense().float().numpy().tobytes()))
        if torch.is_tensor(value)
        else (key, value)
        for key, value in sorted(flatten(sent).values.items())
    ]
    return hash_of(repr(values).encode())


def healed_by(
    state: dict[str, Any], *, step: int | None, is_torn: bool = False, **more: Any
) -> tuple[Healed, bool]:
    """The outcome, and whether a change was announced."""
    changes: list[None] = []
    given: dict[str, Any] = {"made_in": 1, "round": 2} | more
    given["begin_change"] = lambda: changes.append(None)
    return heal(state, step=step, is_torn=is_torn, **given), bool(changes)


def told(state: dict[str, Any], healed: Healed, changed: bool) -> dict[str, Any]:
    """What a rank reports, after a step that shows that the optimizer goes on."""
    before = bits(state)
    if "notes" in state:
        trained(state, 1)
    return {
        "origin": healed.origin,
        "step": healed.step,
        "donor": healed.donor,
        "changed": changed,
        "bits": before,
        "next": bits(state),
        "kept": healed.kept,
        "taken": healed.taken,
        "replaced": list(healed.replaced),
        "has_size": healed.size_bytes > 0,
    }


def new_rank(**more: Any) -> dict[str, Any]:
    """Rank 3 is a new process: its optimizer has no state, and its random numbers are its own."""
    rank = dist.get_rank()
    state = built(9) if rank == 3 else trained(built(), 3)
    dice = torch.get_rng_state()
    healed = healed_by(state, step=None if rank == 3 else 3, **more)
    keeps_dice = torch.equal(dice, torch.get_rng_state())
    return told(state, *healed) | {"keeps_dice": keeps_dice}


def through_the_group() -> dict[str, Any]:
    with replaced(MemoryToken, "is_at", staticmethod(lambda *_: False)):
        return new_rank()


def behind_and_torn() -> dict[str, Any]:
    """Rank 0 is a step behind, and rank 2 in the middle of it; the others have made it."""
    rank = dist.get_rank()
    state = trained(built(), 0 if rank == 0 else 1)
    if rank == 2:
        state["model"][0].weight.data.zero_()
    return told(state, *healed_by(state, step=0 if rank in (0, 2) else 1, is_torn=rank == 2))


def before_the_first_step() -> dict[str, Any]:
    """Rank 1 is torn in its first step, and has a state of the optimizer that the others lack."""
    rank = dist.get_rank()
    state = trained(built(), 1 if rank == 1 else 0)
    return told(state, *healed_by(state, step=0, is_torn=rank == 1))


def wrong_bytes() -> dict[str, Any]:
    """What rank 3 reads first is wrong, and what it reads from another rank is right."""
    right, donors = peer_memory.read_memory, set()

    def read(pid: int, source: int, target: int, length: int, into: Any) -> None:
        right(pid, source, target, length, into)
        donors.add(pid)
        if len(donors) == 1:
            into.update(b"wrong")

    with replaced(state_copy, "read_memory", read):
        return new_rank()


def unreadable() -> dict[str, Any]:
    """The first donor cannot give what it has, so another does."""
    right = state_copy.Content.of
    tries: list[None] = []

    def of(state: Any) -> Any:
        tries.append(None)
        if dist.get_rank() == 0 and len(tries) == 1:
            raise ValueError("it cannot be read")
        return right(state)

    with replaced(state_copy.Content, "of", of):
        return new_rank()


def unequal() -> dict[str, Any]:
    """Two ranks that should hold the same do not, and there is no image."""
    rank = dist.get_rank()
    state = built(9) if rank == 3 else trained(built(), 3)
    if rank == 1:
        state["model"][3].bias.data[0] += 1
    try:
        healed_by(state, step=None if rank == 3 else 3)
    except healing.ReplicasDifferError as error:
        return {"error": str(error)}
    raise AssertionError("it was not noticed")


def own_unfit() -> dict[str, Any]:
    """What rank 3 has built has another form: no donor serves, and there is no image."""
    rank = dist.get_rank()
    state = built(9, width=5) if rank == 3 else trained(built(), 3)
    healed, _ = healed_by(state, step=None if rank == 3 else 3, place="of all")
    return {"origin": healed.origin, "reason": healed.reason}


def from_image(folder: Path) -> dict[str, Any]:
    """All ranks are torn, and go back to a checkpoint."""
    with Checkpointer(folder / "root", every=1000, job="heal") as saves:
        state = {name: part for name, part in trained(built(), 2).items() if name != "sparse"}
        saves.save(2, state, wait=True)
        saved = bits(state)
        trained(state, 1)
        healed, changed = healed_by(state, step=2, is_torn=True, images=saves)
        return {
            "origin": healed.origin,
            "step": healed.step,
            "made_in": healed.made_in,
            "changed": changed,
            "is_saved": bits(state) == saved,
        }


def all_new() -> dict[str, Any]:
    healed, _ = healed_by(built(), step=None)
    return {"origin": healed.origin, "step": healed.step, "is_first": healed.is_first}


def hsdp() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    state = trained_sharded(sharded(mesh), 2)
    if (rank := dist.get_rank()) == 3:
        state = sharded(mesh)
    place = place_of(state)
    return told(state, *healed_by(state, step=None if rank == 3 else 2)) | {"place": place}


def places() -> dict[str, Any]:
    """The place of this rank in several kinds of parallelism."""
    rank = dist.get_rank()
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    plain = nn.Linear(4, 4)
    divided = nn.Linear(4, 4)
    divided.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    zero = ZeroRedundancyOptimizer(plain.parameters(), torch.optim.SGD, lr=0.1)
    states: dict[str, Any] = {
        "plain": plain,
        "stages": nn.Linear(4, 4 + rank // 2),
        "zero": [plain, zero],
        "megatron": divided,
        "loader": PerRank(Loader()),
        "fsdp": fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (4,))),
        "hsdp": fully_shard(nn.Linear(4, 4), mesh=both),
        "fsdp in stages": fully_shard(nn.Linear(4, 4), mesh=both["inner"]),
    }
    return {kind: place_of({"part": part}) for kind, part in states.items()}


def donor_dies() -> dict[str, Any]:
    """The donor of rank 3 is killed while rank 3 copies."""
    rank = dist.get_rank()
    state = built(9) if rank == 3 else trained(built(), 3)
    if rank == 0:
        state_copy.Content.result = lambda _: os._exit(9)  # type: ignore[method-assign,assignment]
    changes: list[None] = []
    try:
        heal(
            state,
            step=None if rank == 3 else 3,
            is_torn=False,
            made_in=1,
            round=2,
            begin_change=lambda: changes.append(None),
        )
    except RuntimeError as error:
        return {"error": type(error).__name__, "changed": bool(changes)}
    raise AssertionError("it was not noticed")


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Any:
    former = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, former)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "new rank": new_rank,
    "through the group": through_the_group,
    "behind and torn": behind_and_torn,
    "before the first step": before_the_first_step,
    "wrong bytes": wrong_bytes,
    "unreadable": unreadable,
    "unequal": unequal,
    "own unfit": own_unfit,
    "all new": all_new,
    "hsdp": hsdp,
    "places": places,
}


def run(rank: int, folder: Path, case: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet {case}", rank=rank, world_size=WORLD
    )
    results: dict[str, Any]
    if case:
        results = donor_dies()
    else:
        results = {kind: make() for kind, make in CASES.items()}
        results["image"] = from_image(folder)
    (folder / f"{case}{rank}.json").write_text(json.dumps(results))
    if not case:
        dist.barrier()


def main(folder: Path, case: str = "") -> int:
    """Fork the ranks, and wait for them."""
    torch.set_num_threads(1)
    pids = []
    for rank in range(WORLD):
        pid = os.fork()
        if not pid:
            try:
                run(rank, folder, case)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return max(codes[1:] if case else codes)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
