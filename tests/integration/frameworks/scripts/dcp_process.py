"""A rank whose saves are made by a process of torch: `dcp_process.py ROOT`."""

import os
import sys
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from trainer_sdk.integrations.dcp import DcpWriter

if __name__ == "__main__":
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['EVERSTEP_TEST_STORE']}",
        rank=0,
        world_size=1,
    )
    for step in (1, 2):
        saving = async_save(
            {"w": torch.full((5,), float(step))},
            checkpoint_id=f"{sys.argv[1]}/step-{step}",
            storage_writer=DcpWriter(),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        assert isinstance(saving, Future)
        saving.result(timeout=120)
    dist.destroy_process_group()
