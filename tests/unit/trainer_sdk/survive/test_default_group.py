"""A round that ends while its group forms is left, and errors of a group are told from others."""

import socket

import pytest
import torch.distributed as dist

from trainer_sdk.survive.boundary import RoundOver
from trainer_sdk.survive.default_group import form_group, is_broken_group


def free_port() -> str:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return str(bound.getsockname()[1])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_round_may_end_before_all_ranks_have_come(rank: int) -> None:
    """Rank 1 waits for the store of rank 0, and rank 0 for rank 1."""
    looks = iter([False, False])
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    with pytest.raises(RoundOver):
        form_group(environ, "gloo", lambda: next(looks, True))
    assert not dist.is_initialized()


def test_without_a_launcher_there_is_no_group() -> None:
    assert not form_group({}, "gloo", lambda: False)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"),
        RuntimeError("Timed out waiting 1800000ms for recv operation to complete"),
        dist.DistBackendError("NCCL error"),
        ConnectionResetError("reset"),
    ],
)
def test_another_rank_may_be_the_cause(error: Exception) -> None:
    assert is_broken_group(error)


@pytest.mark.parametrize(
    "error", [ValueError("connection"), RuntimeError("CUDA out of memory"), KeyError("gloo")]
)
def test_an_own_error_is_not_of_a_group(error: Exception) -> None:
    assert not is_broken_group(error)
