"""The batch script that `everstep slurm sbatch` writes, without a Slurm.

Acceptance: A12.3.
"""

import os
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from everstep.errors import EverstepError
from everstep_services.cli.run.arguments import UsageError, scan
from everstep_services.cli.slurm.batch_script import (
    BatchRequest,
    ControlPlane,
    DrainMode,
    batch_script,
    checked_job,
    time_s,
)

RUN = ("--nnodes", "4", "--spares", "1", "--nproc-per-node", "8", "train.py", "--lr", "3e-4")


def script(
    *words: str,
    folder: str = "/shared/llama",
    time: str = "04:00:00",
    signal_s: int = 600,
    chain: int = 0,
    control_plane: ControlPlane = "outside",
    directives: tuple[str, ...] = (),
    leaves_when_drained: bool = False,
    drains_excluded: DrainMode = "off",
    program: str = "everstep",
) -> str:
    request = BatchRequest(
        words=words,
        job="llama",
        folder=folder,
        time=time,
        signal_s=signal_s,
        chain=chain,
        control_plane=control_plane,
        directives=directives,
        leaves_when_drained=leaves_when_drained,
        drains_excluded=drains_excluded,
        program=program,
    )
    return batch_script(request, scan(words, {}))


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line]


def refused(*words: str, **options: object) -> str:
    with pytest.raises(EverstepError) as error:
        script(*words, **options)  # type: ignore[arg-type]  # any option
    text = str(error.value)
    assert "\n" not in text
    return text


def test_nodes_are_those_that_train_and_the_spares() -> None:
    assert directives(script(*RUN)) == [
        "--job-name=llama",
        "--nodes=5",
        "--ntasks-per-node=1",
        "--no-kill",
        "--open-mode=append",
        "--output=/shared/llama/slurm-%j.out",
        "--time=04:00:00",
        "--signal=USR1@600",
        "--requeue",
    ]
    assert "--nodes=6" in script("--nnodes", "2:6", "train.py")


def test_a_chain_is_an_array_that_is_never_requeued() -> None:
    text = script(*RUN, chain=8)
    assert {"--array=1-8%1", "--no-requeue"} <= set(directives(text))
    assert "--requeue" not in directives(text)
    assert '--folder "$folder" --retries 2 --chain' in text


def test_one_lost_node_ends_no_other_whatever_the_cluster_is_set_to() -> None:
    """The options override WaitTime and KillOnBadExit of slurm.conf (A12.3)."""
    assert "srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0" in script(*RUN)


def test_the_restarts_are_those_of_nemo_unless_others_are_given() -> None:
    assert "--max-restarts 3 --preempt-grace 570 --nnodes 4" in script(*RUN)
    text = script("--max-restarts", "7", "--preempt-grace", "300", *RUN)
    assert '--job "$job" --max-restarts 7 --preempt-grace 300 --nnodes 4' in text


def test_words_reach_the_script_as_they_were() -> None:
    text = script("train.py", "--name", "it's a test", "$HOME", "a;b")
    assert """train.py --name 'it'"'"'s a test' '$HOME' 'a;b'\n""" in text


@pytest.mark.parametrize(
    ("words", "asked", "watches"),
    [
        (RUN, False, True),
        (("--nnodes", "2:4", "train.py"), False, True),
        (("--nnodes", "2", "train.py"), False, False),
        (("--nnodes", "2", "train.py"), True, True),
    ],
)
def test_drained_nodes_leave_where_another_takes_their_place(
    words: tuple[str, ...], asked: bool, watches: bool
) -> None:
    assert ("slurm watch" in script(*words, leaves_when_drained=asked)) is watches


@pytest.mark.parametrize("mode", ["observe", "enforce"])
def test_excluded_nodes_are_drained_only_on_request(mode: DrainMode) -> None:
    text = script("--nnodes", "2", "train.py", drains_excluded=mode)
    assert f"everstep slurm watch --drain-excluded {mode} &" in text
    assert "--drain-excluded" not in script(*RUN)


def test_spares_that_are_no_whole_groups_are_refused_before_the_job_waits_in_the_queue() -> None:
    with pytest.raises(UsageError, match="with --group-size 2 a spare group has 2 nodes"):
        script("--nnodes", "4", "--spares", "1", "--group-size", "2", "train.py")


@pytest.mark.parametrize("folder", ["/a b/c", "/a%j/b", "/a #b"])
def test_folders_with_odd_names(folder: str) -> None:
    text = script(*RUN, folder=folder)
    (output,) = [line for line in directives(text) if line.startswith("--output")]
    assert output in {
        '--output="/a b/c"/slurm-%j.out', "--output=/a%%j/b/slurm-%j.out",
        '--output="/a #b"/slurm-%j.out',
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400), ("90:30", 5430), ("1:30:30", 5430), ("2-0", 172800), ("1-1:30", 91800),
        ("1-0:0:1", 86401), ("x", None), ("", None), ("1:2:3:4", None), ("-1", None), ("1h", None),
    ],
)  # fmt: skip
def test_time_limits_as_slurm_reads_them(text: str, seconds: int | None) -> None:
    assert time_s(text) == seconds


@pytest.mark.parametrize(
    ("words", "options", "line"),
    [
        ((), {}, "which training shall run?"),
        (("--job", "x", "train.py"), {}, "--job after `--`: name the job before"),
        (("--node-rank", "1", "train.py"), {}, "--node-rank after `--`: each node has its own"),
        (("--standalone", "train.py"), {}, "use --control-plane inside"),
        (("--nodes", "4", "train.py"), {}, "there is no option --nodes; did you mean --nnodes?"),
        (("--nnodes", "0", "train.py"), {}, "a job has at least one node"),
        (("--preempt-grace", "900", "train.py"), {}, "--preempt-grace 900: Slurm's warning comes"),
        (RUN, {"time": "soon"}, "--time 'soon': write minutes, HH:MM:SS or D-HH:MM:SS"),
        (RUN, {"time": "10"}, "--time 10: Slurm's warning, 600 s before the end"),
        (RUN, {"chain": 1}, "--chain 1: a chain has at least 2 allocations"),
        (RUN, {"directives": ("--nodes=3",)}, "the script has its own --nodes; it follows from"),
        (RUN, {"directives": ("-p gpu",)}, "write a long option, for example --sbatch=--qos=high"),
        (RUN, {"directives": ("--qos=a\n#SBATCH --x",)}, "write a long option"),
        (RUN, {"folder": '/a"\ntouch b #"'}, "Slurm cannot read '\"' in the path of the output"),
        (RUN, {"folder": "/a\ntouch b"}, "Slurm cannot read '\\n' in the path of the output"),
        (RUN, {"folder": "/a\\b"}, "name a folder without quotes, backslashes"),
    ],
)  # fmt: skip
def test_bad_options_are_one_line(
    words: tuple[str, ...], options: dict[str, object], line: str
) -> None:
    assert line in refused(*words, **options)


def test_names_that_no_job_may_have_are_one_line() -> None:
    with pytest.raises(EverstepError, match="--job: "):
        checked_job("a b")


# -- the script itself, with programs that only note how they were called --------------------------


def program(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def run(text: str, tmp_path: Path) -> tuple[int, Sequence[str]]:
    calls = tmp_path / "calls"
    calls.touch()
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": "2",
        "CALLS": str(calls),
    }
    done = subprocess.run(
        ["bash"], input=text, text=True, env=environ, check=False, timeout=60, capture_output=True
    )
    assert not done.stderr, done.stderr
    return done.returncode, calls.read_text().splitlines()


@pytest.mark.parametrize("code", [0, 1, 90, 91, 92, 93, 94, 137])
def test_the_script_hands_on_the_code_and_exits_with_the_jobs(tmp_path: Path, code: int) -> None:
    """Whatever srun returns, `finish` decides, and its code is the script's (A12.3)."""
    program(tmp_path, "srun", f'echo "srun $*" >> $CALLS; exit {code}')
    program(tmp_path, "everstep", 'echo "everstep $*" >> $CALLS; exit 17')
    text = script("train.py", folder=str(tmp_path / "folder"))
    assert run(text, tmp_path) == (
        17,
        [
            "srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 everstep run --job "
            "llama --max-restarts 3 --preempt-grace 570 train.py",
            f"everstep slurm finish {code} --folder {tmp_path}/folder --retries 2 --requeue",
        ],
    )
    assert (tmp_path / "folder/allocations/7-2").is_dir()


def test_a_signal_to_the_script_does_not_end_it_before_its_step(tmp_path: Path) -> None:
    """Slurm's SIGTERM at a requeue reaches the batch script, too (A12.1)."""
    program(tmp_path, "srun", "kill -TERM $PPID; kill -USR1 $PPID; exit 91")
    program(tmp_path, "everstep", 'echo "everstep $*" >> $CALLS; exit $3')
    code, calls = run(script("train.py", folder=str(tmp_path / "folder")), tmp_path)
    assert code == 91
    assert [call.split()[:4] for call in calls] == [["everstep", "slurm", "finish", "91"]]


def test_a_control_plane_inside_is_stopped_with_the_script(tmp_path: Path) -> None:
    program(tmp_path, "srun", 'echo "srun on $EVERSTEP_BUS__URL" >> $CALLS')
    program(
        tmp_path,
        "everstep",
        'echo "everstep $1 $2" >> $CALLS\n'
        "[ $1 != env ] || echo export EVERSTEP_BUS__URL=nats://here:1",
    )
    folder = str(tmp_path / "folder")
    assert run(script("train.py", folder=folder, control_plane="inside"), tmp_path) == (
        0,
        [
            "everstep down --state-dir",
            "everstep up --detach",
            "everstep env --job",
            "srun on nats://here:1",
            "everstep slurm finish",
            "everstep down --state-dir",
        ],
    )


def test_a_program_whose_path_has_a_blank_is_one_word(tmp_path: Path) -> None:
    place = tmp_path / "ever step's"
    place.mkdir()
    program(tmp_path, "srun", 'shift 4; "$@"')
    program(place, "everstep", 'echo "$1 $2" >> $CALLS')
    text = script(
        "train.py",
        folder=str(tmp_path / "folder"),
        control_plane="inside",
        leaves_when_drained=True,
        program=str(place / "everstep"),
    )
    code, calls = run(text, tmp_path)
    assert code == 0
    assert sorted(set(calls) - {"slurm watch"}) == [
        "down --state-dir",
        "env --job",
        "run --job",
        "slurm finish",
        "up --detach",
    ]


def test_a_control_plane_that_does_not_start_is_a_failed_allocation(tmp_path: Path) -> None:
    program(tmp_path, "srun", 'echo "srun" >> $CALLS')
    program(tmp_path, "everstep", 'echo "everstep $1 $2" >> $CALLS; [ $1 != up ]')
    folder = str(tmp_path / "folder")
    code, calls = run(script("train.py", folder=folder, control_plane="inside"), tmp_path)
    assert code == 94
    assert "srun" not in calls
