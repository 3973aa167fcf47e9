"""Ranks that end with an exception: code, configuration, memory, numbers, storage."""

import argparse
import itertools
import json
import mmap
import os
import resource
import subprocess
from pathlib import Path

from tests.corpus.injected.registry import Training, fault


@fault("exception", "forward")
def key_error(training: Training) -> None:
    """KeyError"""
    {"ids": 1}["tokens"]


@fault("exception", "forward")
def size_error(training: Training) -> None:
    """Tensors that do not fit together."""
    import torch

    torch.ones(4, 3) @ torch.ones(4, 3)


@fault("exception", "optimize")
def assertion(training: Training) -> None:
    """An assertion of the script."""
    assert training.step == -1, "the schedule is over"


@fault("exception", "backward")
def twice_backward(training: Training) -> None:
    """backward is called twice."""
    training.backward()
    training.backward()


@fault("exception", "load")
def own_error(training: Training) -> None:
    """An exception of the user's own class."""

    class BadShardError(Exception):
        pass

    try:
        json.loads("{")
    except ValueError as error:
        raise BadShardError("shard 17 has no tokens") from error


@fault("exception", "prepare")
def in_a_worker(training: Training) -> None:
    """A worker of the DataLoader raises."""
    training.workers, training.trap = 1, lambda: list(range(1))[1]


@fault("missing_file", "load")
def no_shard(training: Training) -> None:
    """A shard of the data is not there."""
    (training.folder / "shard_17.bin").read_bytes()


@fault("missing_file", "start", everywhere=True)
def no_configuration(training: Training) -> None:
    """The configuration is not there, for any rank."""
    json.loads((training.folder / "config.json").read_text())


@fault("missing_file", "save")
def no_checkpoint(training: Training) -> None:
    """torch.load of a checkpoint that is not there."""
    import torch

    torch.load(training.folder / "step_40.pt")


@fault("missing_file", "load")
def no_folder(training: Training) -> None:
    """A folder of the data is not there."""
    os.listdir(training.folder / "data")


@fault("missing_file", "optimize")
def no_program(training: Training) -> None:
    """A program is not there."""
    subprocess.run(["no-such-program"], check=True)


@fault("bad_config", "start", everywhere=True)
def unknown_option(training: Training) -> None:
    """An option that the script does not have."""
    argparse.ArgumentParser(prog="train.py").parse_args(["--lerning-rate", "3"])


@fault("bad_config", "start", everywhere=True)
def not_a_number(training: Training) -> None:
    """A value that is not a number."""
    float("1e-3x")


@fault("bad_config", "start", everywhere=True)
def no_module(training: Training) -> None:
    """A package that is not installed."""
    import no_such_package  # type: ignore[import-not-found]  # noqa: F401


@fault("bad_config", "start", everywhere=True)
def no_variable(training: Training) -> None:
    """An environment variable that is not set."""
    os.environ["NO_SUCH_DATA_ROOT"]


@fault("bad_config", "start", everywhere=True)
def bad_json(training: Training) -> None:
    """A configuration that is not JSON."""
    json.loads("{'lr': 3}")


def _limit_memory(more: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * mmap.PAGESIZE + more
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


@fault("out_of_memory", "forward")
def tensor_too_large(training: Training) -> None:
    """torch cannot have the memory for a tensor."""
    import torch

    _limit_memory(1 << 28)
    torch.ones(1 << 30)


@fault("out_of_memory", "load")
def too_many_objects(training: Training) -> None:
    """Python cannot have the memory for its objects."""
    _limit_memory(1 << 27)
    list(map(bytes, itertools.repeat(1 << 20, 10_000)))


@fault("out_of_memory", "load")
def array_too_large(training: Training) -> None:
    """One object is too large."""
    _limit_memory(1 << 27)
    bytearray(1 << 34)


@fault("out_of_memory", "save")
def no_mapping(training: Training) -> None:
    """Memory cannot be mapped: ENOMEM."""
    _limit_memory(1 << 27)
    mmap.mmap(-1, 1 << 34)


@fault("out_of_memory", "load")
def killed_by_the_kernel(training: Training) -> None:
    """The kernel kills the rank: its control group, in EVERSTEP_CORPUS_GROUP, has little memory."""
    group = Path(os.environ["EVERSTEP_CORPUS_GROUP"])
    (group / "cgroup.procs").write_text(str(os.getpid()))
    list(map(bytearray, itertools.repeat(1 << 24)))


@fault("nan", "forward")
def loss_is_nan(training: Training) -> None:
    """The script checks its loss."""
    training.forward()
    training.loss = training.loss * float("nan")
    raise ValueError(f"loss is {training.loss.item()} at step {training.step}")


@fault("nan", "backward")
def anomaly(training: Training) -> None:
    """torch's anomaly mode finds it."""
    import torch

    with torch.autograd.set_detect_anomaly(True):
        weight = torch.zeros(1, requires_grad=True)
        (torch.sqrt(weight) * 0).sum().backward()  # type: ignore[no-untyped-call]


@fault("nan", "optimize")
def gradients(training: Training) -> None:
    """The norm of the gradients is not finite."""
    import torch

    for one in training.net.parameters():
        one.grad.fill_(float("inf"))
    torch.nn.utils.clip_grad_norm_(training.net.parameters(), 1.0, error_if_nonfinite=True)


@fault("nan", "metrics", everywhere=True)
def spread(training: Training) -> None:
    """One rank's loss is NaN, and all see it in the mean."""
    if training.is_culprit:
        training.loss = training.loss * float("nan")
    import torch.distributed as dist

    loss = training.loss.detach().clone().reshape(1)
    dist.all_reduce(loss, group=training.metrics_group)
    if loss.isnan():
        raise FloatingPointError(f"loss is nan at step {training.step}")


@fault("nan", "optimize")
def loss_scale(training: Training) -> None:
    """The loss scale cannot become smaller."""
    raise RuntimeError(
        "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."
    )


@fault("disk_full", "save")
def write_to_a_full_disk(training: Training) -> None:
    """A write finds no space."""
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(bytes(1 << 16))


@fault("disk_full", "save")
def save_to_a_full_disk(training: Training) -> None:
    """torch.save finds no space."""
    import torch

    with open("/dev/full", "wb") as file:
        torch.save(training.net.state_dict(), file)


@fault("disk_full", "metrics")
def log_to_a_full_disk(training: Training) -> None:
    """A log cannot be flushed."""
    with open("/dev/full", "w") as file:
        file.write("step 3 loss 1.0\n")


@fault("disk_full", "save")
def fill_a_small_disk(training: Training) -> None:
    """A small file system, in EVERSTEP_CORPUS_DISK, becomes full."""
    path = Path(os.environ["EVERSTEP_CORPUS_DISK"], f"model_{training.rank}.pt")
    import torch

    torch.save({"weights": torch.zeros(16 << 20)}, path)


@fault("disk_full", "save")
def reserve_on_a_small_disk(training: Training) -> None:
    """Space on a small file system, in EVERSTEP_CORPUS_DISK, cannot be reserved."""
    with Path(os.environ["EVERSTEP_CORPUS_DISK"], f"reserved_{training.rank}").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 64 << 20)


def _as_nobody() -> None:
    """Root may do anything; a rank of nobody's may not."""
    if not os.getuid():
        os.seteuid(65534)


@fault("permission", "save")
def write_forbidden(training: Training) -> None:
    """A folder that may not be written."""
    _as_nobody()
    (Path("/usr/lib") / "step_40.pt").write_bytes(b"")


@fault("permission", "load")
def read_forbidden(training: Training) -> None:
    """A file that may not be read."""
    path = training.folder / f"secret_{training.rank}"
    path.write_bytes(b"rows")
    path.chmod(0)
    _as_nobody()
    path.read_bytes()


@fault("permission", "save")
def folder_forbidden(training: Training) -> None:
    """A folder in which nothing may be made."""
    _as_nobody()
    Path("/usr/lib/checkpoints").mkdir()


@fault("permission", "start", everywhere=True)
def program_forbidden(training: Training) -> None:
    """A file that may not be run."""
    path = training.folder / f"prepare_{training.rank}.sh"
    path.write_text("#!/bin/sh\n")
    subprocess.run([path], check=True)


@fault("permission", "save")
def rename_forbidden(training: Training) -> None:
    """A file that may not be put in another's place."""
    _as_nobody()
    os.replace("/etc/hostname", "/etc/hostname.old")
