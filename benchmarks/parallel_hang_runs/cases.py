"""What fails in a training of parallel groups, as often as published, and at which rank."""

import random
from dataclasses import dataclass

FAULTS = (
    # a rank takes another way on its CPU: more than 60 % of the timeouts of collectives
    ("other_branch", 10, "a branch leaves a collective of the tensor group out"),
    ("other_norm", 8, "a branch takes the norm over another group"),
    ("alone_in_metrics", 10, "a branch enters a collective of all ranks alone"),
    ("compiles", 12, "a rank alone compiles, and waits for its compiler"),
    ("skips_sample", 8, "an exception handler leaves the rest of the step out"),
    ("waits_in_handler", 8, "an exception handler waits for all ranks"),
    ("fewer_batches", 8, "the data of a rank ends early"),
    # a kernel hangs
    ("hung_kernel", 9, "a call of a library does not return"),
    ("hung_kernel_locked", 9, "the same, with the interpreter's lock"),
    # arguments differ
    ("wrong_split", 5, "all_to_all with other sizes"),
    ("wrong_shape", 3, "a gradient of another size"),
    ("wrong_root", 2, "a broadcast from another rank"),
    ("wrong_peer", 2, "a send to a rank of another pipeline"),
    # network and hardware least
    ("frozen", 2, "the host stops the rank"),
    ("killed", 2, "the rank is killed"),
    ("cut_off", 2, "the connections of the rank end"),
)
"""Name, weight, and what happens. The classes have the order and, where given, the shares of Meta's
report on NCCL watchdog timeouts; the shares of the other classes and within a class are ours."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a seed has drawn."""

    fault: str
    rank: int
    step: int
    micro_batch: int


def drawn(seed: int, shape: tuple[int, int, int], fault: str | None = None) -> Drawn:
    """The fault and where it is; the fault may be chosen."""
    dice = random.Random(seed)
    chosen = dice.choices([name for name, *_ in FAULTS], [weight for _, weight, _ in FAULTS])[0]
    name = fault or chosen
    tp, pp, dp = shape
    last = pp - 1 if name == "wrong_peer" else pp  # the last stage sends to nobody
    rank = dice.randrange(tp * dp * last)
    step, micro_batch = dice.randint(2, 5), dice.randrange(2)
    if name == "skips_sample" and rank < tp * dp:
        micro_batch = 1  # a rank of the first stage that leaves out a whole step hangs nowhere
    return Drawn(name, rank, step, micro_batch)
