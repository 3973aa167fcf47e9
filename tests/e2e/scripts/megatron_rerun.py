"""Megatron's own re-run state machine in a small training on gloo, without a GPU.

The machine needs CUDA for its device's number, its random state and its flags: these three are
replaced, and `os.uname` names Everstep's node, since all nodes of a test are one host. The packages
around the machine's module stay out: they import kernels for GPUs. All else is Megatron's.

At iteration 6 rank 1's loss is wrong: on `node-2` (`persistent`), in the first run (`transient`) or
everywhere (`correct`).
"""

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

import trainer_sdk

megatron = next(Path(entry) for entry in sys.path if Path(entry, "megatron", "core").is_dir())
for name in ("megatron", "megatron.core", "megatron.core.dist_checkpointing"):
    package = sys.modules[name] = ModuleType(name)
    package.__path__ = [str(megatron.joinpath(*name.split(".")))]

from megatron.core import rerun_state_machine as rerun  # noqa: E402

WRONG_AT = 6
folder, fault = Path(sys.argv[1]), sys.argv[2]
node = os.environ["EVERSTEP_NODE"]
host = os.uname()


def reduce_any(self: object, value: Any) -> Any:
    flags = torch.tensor(value if isinstance(value, list) else [value], dtype=torch.int32)
    dist.all_reduce(flags)
    found = tuple(count > 0 for count in flags.tolist())
    return found if isinstance(value, list) else found[0]


torch.cuda.current_device = lambda: 0
torch.cuda.get_rng_state = lambda: None  # type: ignore[assignment, misc]
torch.cuda.set_rng_state = lambda state: None  # type: ignore[assignment, misc]
rerun.RerunStateMachine._reduce_any = reduce_any
os.uname = lambda: (host.sysname, node, host.release)  # type: ignore[assignment, return-value]

dist.init_process_group("gloo")
rank = dist.get_rank()
rerun.initialize_rerun_state_machine(
    mode=rerun.RerunMode.VALIDATE_RESULTS, result_rejected_tracker_filename=str(folder / "rejected")
)
machine = rerun.get_rerun_state_machine()
saved = folder / f"state-{rank}"
runs: list[int] = []


def computed(iteration: int) -> torch.Tensor:
    runs.append(iteration)
    is_there = rank == 1 and iteration == WRONG_AT
    is_first = runs.count(iteration) == 1
    wrong = {"persistent": node == "node-2", "transient": is_first, "correct": True}
    return torch.tensor(2.0 / iteration * (1000.0 if is_there and wrong[fault] else 1.0))


run, first = trainer_sdk.session(), 1
if saved.exists():
    state = torch.load(saved, weights_only=False)
    machine.load_state_dict(state)
    first = state["current_iteration"] + 1
run.start_at(first - 1)
batches = rerun.RerunDataIterator(iter(range(first, 100)))
for _ in range(first, 100):
    while machine.should_run_forward_backward(batches):
        machine.validate_result(
            computed(next(batches)),
            rejection_func=lambda loss: loss.item() > 100.0,
            message="Spiky loss",
        )
    is_saved, is_over, code = machine.should_checkpoint_and_exit()
    if is_saved:
        state = machine.state_dict(batches, "torch_dist")
        torch.save({**state, "sharded": state["sharded"].data}, saved)
        dist.barrier()
    if is_over:
        sys.exit(code)
    run.step()
