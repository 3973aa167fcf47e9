"""A training by the documentation of NVRx: sections, calculated limits, local checkpoints.

`training.py FOLDER FAULT`; with `killed`, rank 1 dies in the first round after step 7, and with
`hung` it stays in that step. Nothing in it knows Everstep.
"""

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
    CliqueReplicationStrategy,
)
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

STEPS, SAVE_EVERY, FAULT_AFTER = 12, 3, 7
WITHIN = timedelta(seconds=120)


def main(folder: Path, fault: str) -> None:  # noqa: PLR0915 - to be read from top to bottom
    client = RankMonitorClient()
    client.init_workload_monitoring()
    state_file = folder / "ft_state.json"
    if state_file.exists():
        client.load_state_dict(json.loads(state_file.read_text()))
        assert client.section_timeouts.section["step"] is not None
    client.start_section("setup")
    dist.init_process_group("gloo", timeout=WITHIN)
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # Each rank is a node with a disk of its own.
    manager = LocalCheckpointManager(
        folder / f"disk-{rank}",
        repl_strategy=CliqueReplicationStrategy.from_replication_params(1, 2),
    )
    queue, first = AsyncCallsQueue(persistent=True), 0
    if manager.find_latest() != -1:
        loaded, (first, _, _) = manager.load()
        model.load_state_dict(loaded.state_dict["model"])
    (folder / f"from-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{rank}").write_text(str(first))
    client.end_section("setup")

    for step in range(first + 1, STEPS + 1):
        client.start_section("step")
        generator = torch.Generator().manual_seed(100 * step + rank)
        loss = model(torch.randn(8, 4, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == FAULT_AFTER:  # the save before it is complete
            queue.maybe_finalize_async_calls(blocking=True)
            harm(fault, rank)
        client.end_section("step")
        if step % SAVE_EVERY == 0:
            client.start_section("checkpointing")
            queue.maybe_finalize_async_calls(blocking=True)
            weights = {name: one.clone() for name, one in model.state_dict().items()}
            state = BasicTensorAwareStateDict({"model": weights, "step": step})
            queue.schedule_async_request(manager.save(state, step, is_async=True))
            client.end_section("checkpointing")
            client.calculate_and_set_section_timeouts(
                selected_sections=["setup", "step"], calc_out_of_section=False
            )
            if rank == 0:
                state_file.write_text(json.dumps(client.state_dict()))
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    end = [manager.find_latest(), [round(float(one), 6) for one in model.module.weight.flatten()]]
    (folder / f"end-{rank}").write_text(json.dumps(end))
    client.shutdown_workload_monitoring()
    del model  # before its group: otherwise torch may hang
    dist.destroy_process_group()


def harm(fault: str, rank: int) -> None:
    if (rank, os.environ["TORCHELASTIC_RESTART_COUNT"]) != (1, "0"):
        return
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    while fault == "hung":
        signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
