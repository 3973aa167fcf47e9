"""Which rank a process is, by the variables of launchers."""

import socket

import pytest

from trainer_sdk.launchers import LaunchedRank, job_of, launched_rank

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_x/none_7kq2/attempt_2/1/error.json",
    "MASTER_ADDR": "node-1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "8",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "11",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        (TORCHRUN, LaunchedRank("torchrun", 5, 1, 8, 4, 1, 2, 3)),
        (SRUN, LaunchedRank("srun", 8, 0, 11, 3, 2, 0, 0)),
        (MPIRUN, LaunchedRank("mpirun", 6, 2, 8, 4, 1, 0, 0)),
        (SRUN | TORCHRUN, LaunchedRank("torchrun", 5, 1, 8, 4, 1, 2, 3)),
    ],
)
def test_each_launcher_is_known(environ: dict[str, str], place: LaunchedRank) -> None:
    assert launched_rank(environ) == place


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        TORCHRUN | {"RANK": "first"},
        TORCHRUN | {"RANK": "-1"},
        {name: text for name, text in SRUN.items() if name != "SLURM_STEP_ID"},
    ],
    ids=["nothing", "no local rank", "no number", "negative", "a batch script"],
)
def test_a_process_without_a_launcher_is_not_a_rank(environ: dict[str, str]) -> None:
    assert launched_rank(environ) is None


def test_a_restart_by_the_launcher_is_the_next_round() -> None:
    place = launched_rank(TORCHRUN)
    assert place is not None
    assert place.round == 3


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        (TORCHRUN | {"EVERSTEP_JOB": "mine"}, "mine"),
        (TORCHRUN | SRUN | {"TORCHELASTIC_RUN_ID": "run/7 b"}, "run-7-b"),
        (TORCHRUN | SRUN, "slurm-4711-0"),
        (SRUN, "slurm-4711-0"),
        (TORCHRUN, "node-1-29500"),
        (TORCHRUN | {"WORLD_SIZE": "4"}, f"torchrun-{socket.gethostname()}-7kq2"),
        (MPIRUN | {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1"}, "10-0-0-7-1"),
    ],
    ids=["named", "run id", "both", "srun", "no id", "one node", "an address"],
)
def test_all_ranks_agree_on_the_job(environ: dict[str, str], job: str) -> None:
    place = launched_rank(environ)
    assert place is not None
    assert job_of(environ, place) == job
