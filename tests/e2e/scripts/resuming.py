"""A training with an optimizer of torch that fails after step 10, and resumes from step 8.

Its argument says whether it reports where it resumes.
"""

import os
import sys

import torch

import trainer_sdk

FAILS, SAVED, LAST = 10, 8, 14


def main(reports: bool) -> None:
    run = trainer_sdk.session()
    is_first = os.environ["EVERSTEP_ROUND"] == "1"
    weights = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    done = 0 if is_first else SAVED
    if reports:
        run.start_at(done)
    while done < LAST:
        weights.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        done += 1
        run.step(done)
        if is_first and done == FAILS:
            raise ValueError("the loss is not a number")


if __name__ == "__main__":
    main(sys.argv[1] == "reports")
