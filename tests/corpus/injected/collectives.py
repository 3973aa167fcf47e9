"""Ranks whose collectives do not meet."""

import contextlib
from collections.abc import Callable
from typing import Any

from tests.corpus.injected.registry import Training, fault


@fault("skipped_collective", "metrics")
def skip_metrics(training: Training) -> None:
    """The mean loss is not computed on a rank."""


@fault("skipped_collective", "save")
def skip_barrier(training: Training) -> None:
    """A rank does not wait for the checkpoint."""


@fault("skipped_collective", "backward")
def skip_backward(training: Training) -> None:
    """A bad batch is passed over by `continue`: no gradients are reduced."""
    with contextlib.suppress(ValueError):
        raise ValueError("bad batch")


@fault("skipped_collective", "load")
def end_early(training: Training) -> None:
    """A rank has fewer batches, and is at the end of its epoch."""
    import torch.distributed as dist

    dist.barrier(group=training.other_group)
    training.finish()


@fault("skipped_collective", "metrics", everywhere=True)
def branch_on_rank(training: Training) -> None:
    """`if rank != N:` around a broadcast that all have to call."""
    import torch
    import torch.distributed as dist

    if not training.is_culprit:
        dist.broadcast(torch.ones(4), src=training.neighbour, group=training.metrics_group)
    dist.barrier(group=training.other_group)


def _reduce(training: Training, *shape: int) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(*shape), group=training.metrics_group)


@fault("wrong_shape", "metrics")
def larger(training: Training) -> None:
    """A rank reduces a larger tensor."""
    _reduce(training, 50_000)


@fault("wrong_shape", "metrics")
def much_larger(training: Training) -> None:
    """A rank reduces a matrix where the others reduce a number."""
    _reduce(training, 1000, 1000)


@fault("wrong_shape", "metrics")
def empty(training: Training) -> None:
    """A rank reduces a tensor without elements."""
    _reduce(training, 0)


@fault("wrong_shape", "metrics", everywhere=True)
def uneven_gather(training: Training) -> None:
    """A rank gathers tensors of another length."""
    import torch
    import torch.distributed as dist

    length = 4096 if training.is_culprit else 4
    every = [torch.ones(length) for _ in range(training.world)]
    dist.all_gather(every, torch.ones(length), group=training.metrics_group)


@fault("wrong_shape", "metrics", everywhere=True)
def smaller(training: Training) -> None:
    """A rank reduces a part of what the others reduce."""
    _reduce(training, 10 if training.is_culprit else 50_000)


def _both_orders(training: Training, one: Callable[[], Any], other: Callable[[], Any]) -> None:
    """Most call one and then the other; the culprit the other way round."""
    for call in (other, one) if training.is_culprit else (one, other):
        call()


@fault("wrong_order", "metrics", everywhere=True)
def reduce_before_barrier(training: Training) -> None:
    """A rank swaps the collectives of two groups."""
    import torch
    import torch.distributed as dist

    _both_orders(
        training,
        lambda: dist.all_reduce(torch.ones(3), group=training.metrics_group),
        lambda: dist.barrier(group=training.other_group),
    )


@fault("wrong_order", "metrics", everywhere=True)
def swapped_reductions(training: Training) -> None:
    """A rank reduces the second tensor first, each in a group of its own."""
    import torch
    import torch.distributed as dist

    _both_orders(
        training,
        lambda: dist.all_reduce(torch.ones(3), group=training.metrics_group),
        lambda: dist.all_reduce(torch.ones(3), group=training.other_group),
    )


@fault("wrong_order", "metrics", everywhere=True)
def gather_before_broadcast(training: Training) -> None:
    """A rank swaps all_gather and broadcast."""
    import torch
    import torch.distributed as dist

    every = [torch.ones(2) for _ in range(training.world)]
    _both_orders(
        training,
        lambda: dist.all_gather(every, torch.ones(2), group=training.metrics_group),
        lambda: dist.broadcast(torch.ones(9), src=training.neighbour, group=training.other_group),
    )


@fault("wrong_order", "metrics", everywhere=True)
def save_before_metrics(training: Training) -> None:
    """A rank saves before it reports, the others after."""
    _both_orders(training, training.metrics, training.save)


@fault("wrong_order", "metrics", everywhere=True)
def both_receive(training: Training) -> None:
    """Two neighbours both receive before they send."""
    import torch
    import torch.distributed as dist

    culprit = (training.neighbour - 1) % training.world
    if training.rank in (culprit, training.neighbour):
        peer = training.neighbour if training.rank == culprit else culprit
        dist.recv(torch.empty(4), src=peer)
        dist.send(torch.ones(4), dst=peer)
    training.metrics()


def _crossed(training: Training, call: Callable[[Any], Any]) -> None:
    groups = [training.metrics_group, training.other_group]
    for group in groups if training.rank % 2 else reversed(groups):
        call(group)


@fault("two_groups", "metrics", everywhere=True)
def crossed_reductions(training: Training) -> None:
    """Even ranks reduce in one group first, odd ranks in the other."""
    import torch
    import torch.distributed as dist

    _crossed(training, lambda group: dist.all_reduce(torch.ones(3), group=group))


@fault("two_groups", "metrics", everywhere=True)
def crossed_barriers(training: Training) -> None:
    """Even ranks wait at one barrier first, odd ranks at the other."""
    import torch.distributed as dist

    _crossed(training, lambda group: dist.barrier(group=group))


@fault("two_groups", "metrics", everywhere=True)
def crossed_gathers(training: Training) -> None:
    """Even and odd ranks gather in different orders."""
    import torch
    import torch.distributed as dist

    every = [torch.ones(3) for _ in range(training.world)]
    _crossed(training, lambda group: dist.all_gather(every, torch.ones(3), group=group))


@fault("two_groups", "metrics", everywhere=True)
def crossed_calls(training: Training) -> None:
    """Even ranks are in a barrier, odd ranks in a reduction."""
    import torch
    import torch.distributed as dist

    calls = [
        lambda: dist.barrier(group=training.other_group),
        lambda: dist.all_reduce(torch.ones(3), group=training.metrics_group),
    ]
    for call in calls if training.rank % 2 else reversed(calls):
        call()


@fault("two_groups", "metrics", everywhere=True)
def ring_of_receives(training: Training) -> None:
    """Each rank receives from its neighbour before it sends: nobody begins."""
    import torch
    import torch.distributed as dist

    dist.recv(torch.empty(4), src=(training.rank + 1) % training.world)
    dist.send(torch.ones(4), dst=(training.rank - 1) % training.world)
