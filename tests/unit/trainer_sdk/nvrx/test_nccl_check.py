"""What in-process restart needs of NCCL, as NVRx and NCCL document it."""

import pytest

from trainer_sdk.nvrx.nccl_check import of_group, of_release, troubles

GOOD = {"TORCH_NCCL_RETHROW_CUDA_ERRORS": "0", "NCCL_NVLS_ENABLE": "0"}
HARD_S = 90.0


def test_nothing_is_wrong_where_all_is_set() -> None:
    assert troubles(GOOD, (2, 29, 3), HARD_S) == []
    assert troubles({**GOOD, "TORCH_NCCL_RETHROW_CUDA_ERRORS": "False"}, None, HARD_S) == []


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"TORCH_NCCL_RETHROW_CUDA_ERRORS": ""}, "set TORCH_NCCL_RETHROW_CUDA_ERRORS=0"),
        ({"NCCL_NVLS_ENABLE": "2"}, "set NCCL_NVLS_ENABLE=0"),
        ({"NCCL_COLLNET_ENABLE": "1"}, "unset NCCL_COLLNET_ENABLE"),
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60"}, "before hard_timeout (90 s); raise it"),
    ],
)
def test_each_variable_has_its_remedy(changed: dict[str, str], told: str) -> None:
    (text,) = troubles(GOOD | changed, None, HARD_S)
    assert text.endswith(told)


def test_a_monitor_that_is_off_ends_nothing() -> None:
    off = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60", "TORCH_NCCL_ENABLE_MONITORING": "0"}
    assert troubles(GOOD | off, None, HARD_S) == []


@pytest.mark.parametrize(
    ("release", "is_good"),
    [
        ((2, 21, 5), False), ((2, 26, 2), True), ((2, 28, 2), True), ((2, 28, 3), False),
        ((2, 28, 8), False), ((2, 28, 9), True), ((2, 29, 3), True),
    ],
)  # fmt: skip
def test_releases_that_cannot_abort_are_known(release: tuple[int, ...], is_good: bool) -> None:
    assert (of_release(release) == []) == is_good


def test_a_group_must_outlast_the_hard_timeout() -> None:
    assert of_group(600.0, HARD_S) == ""
    assert "after 60 s" in of_group(60.0, HARD_S)
