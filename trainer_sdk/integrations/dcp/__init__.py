"""Everstep's writer and verification below `torch.distributed.checkpoint` (`dcp`).

    dcp.save(state, checkpoint_id="/ckpt/step-100", storage_writer=DcpWriter())
    dcp.load(state, checkpoint_id="/ckpt/step-100", storage_reader=DcpReader())

A checkpoint is hashed and durable before one rename makes it visible. `checkpoint_id` ends in a
step; the folder before it is the place of all checkpoints of the job, as for `Checkpointer`.
"""

from trainer_sdk.integrations.dcp.reader import DcpReader, newest_verified
from trainer_sdk.integrations.dcp.stager import DcpStager
from trainer_sdk.integrations.dcp.writer import DcpWriter

__all__ = ["DcpReader", "DcpStager", "DcpWriter", "newest_verified"]
