"""A training on DDP or FSDP2 without the SDK: each step prints a digest of what its rank has.

With the number 0 of steps it goes on until it is ended.
"""

import hashlib
import itertools
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
if os.environ["SHARDED"] == "1":
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model: torch.nn.Module = net
else:
    model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(dist.get_rank())
steps = int(os.environ["STEPS"])
for step in itertools.count(1):
    optimizer.zero_grad()
    model(torch.randn(4, 8, generator=generator)).square().mean().backward()
    optimizer.step()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        local = getattr(parameter, "_local_tensor", parameter).detach()
        digest.update(local.contiguous().numpy().tobytes())
    print(step, digest.hexdigest()[:8], flush=True)
    if step == steps:
        break
dist.destroy_process_group()
