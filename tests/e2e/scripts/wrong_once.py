"""A training of two ranks in which rank 1 computes NaN once, and a step is run again."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import trainer_sdk

STEPS, WRONG = 8, 5
"""The last step, and the one that is wrong."""


def main() -> None:
    dist.init_process_group("gloo")
    torch.use_deterministic_algorithms(mode=True)
    torch.manual_seed(1)
    run, runs = trainer_sdk.session(), 0
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batches = [torch.randn(4, 8) for _ in range(STEPS)]
    numerics = run.numerics(
        {"model": model, "optimizer": optimizer}, batches, mode="validate_results"
    )

    def compute(batch: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        factor = float("nan") if runs == WRONG and dist.get_rank() == 1 else 1.0
        loss: Tensor = model(batch).square().mean() * factor
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for batch in numerics:
        optimizer.zero_grad()
        loss = numerics.compute(compute, batch)
        if numerics.accepts(loss=loss):
            optimizer.step()
            run.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
