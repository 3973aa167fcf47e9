"""The log analyzer: which failure began it."""

import json
from pathlib import Path

import pytest

from everstep.settings import remember_secret
from everstep_services.attribution.log_analysis import clocks
from everstep_services.attribution.log_analysis.files import analyze_files
from everstep_services.attribution.log_analysis.report import lines
from everstep_services.cli.__main__ import main
from tests.fakes import failure_logs
from tests.unit.attribution.log_analysis.logs import raised, written


def test_interleaved_tracebacks_are_told_apart(tmp_path: Path) -> None:
    """A4.5: the one that raised, not those that lost it, however their lines are mixed."""
    own = raised("KeyError: 'tokens'", "[rank3]: ").splitlines()
    lost = raised("RuntimeError: Connection closed by peer [10.0.0.5]:1", "[rank1]: ").splitlines()
    mixed = [line for pair in zip(lost, own, strict=True) for line in pair]
    report = written(tmp_path, job="\n".join(mixed))
    assert (report.verdict, report.culprits) == ("cause", (3,))
    assert report.cause is not None
    assert report.cause.frames == ("/home/u/train.py:9 in step",)
    assert report.cause.line == 8
    assert report.cascades == {"peer_lost": 1}
    text = list(lines(report))
    assert text[0].startswith("python_exception (user code): rank 3: ")
    assert "KeyError: 'tokens'" in text[1]


@pytest.mark.parametrize("prefix", ["", "[rank0]: ", "2026-11-02 03:11:11 "])
@pytest.mark.parametrize("code", ['try: {}["vocab"]', 'else: raise Boom("x")', "Error: int = 3"])
def test_a_line_of_code_is_not_the_exception(tmp_path: Path, code: str, prefix: str) -> None:
    """A4.5: what a traceback quotes may read like an exception and its text."""
    shown = raised("mypkg.errors.Boom: no vocab", prefix).replace("x = y[3]", code)
    report = written(tmp_path, job=shown)
    assert report.cause is not None
    assert "Boom: no vocab" in report.cause.quote
    assert report.cause.fingerprint.split(":")[1:3] == ["Boom", "step"]


def test_a_command_of_the_script_that_failed_is_its_exception(tmp_path: Path) -> None:
    """A4.1: launchers report the ends of ranks with the same exception, without a traceback."""
    error = "subprocess.CalledProcessError: Command '['tar']' returned non-zero exit status 2."
    report = written(tmp_path, job=raised(error, "[rank0]: "))
    assert report.cause is not None
    assert (report.cause.failure_class, report.culprits) == ("python_exception", (0,))


def test_a_rank_cannot_print_a_line_of_the_kernel(tmp_path: Path) -> None:
    """A13.3: what a script prints accuses no hardware."""
    xid = "[rank0]: NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
    report = written(tmp_path, job=xid + raised("ValueError: bad", "[rank1]: "))
    assert report.cause is not None
    assert (report.cause.failure_class, report.culprits) == ("python_exception", (1,))


def test_cascades_alone_are_inconclusive(tmp_path: Path) -> None:
    """A4.6: without the log of the culprit the report names what is missing."""
    lost = "RuntimeError: Connection closed by peer [10.0.0.5]:1"
    report = written(tmp_path, job=raised(lost, "[rank0]: ") + raised(lost, "[rank1]: "))
    assert (report.verdict, report.culprits) == ("inconclusive", ())
    assert report.missing


def test_a_rank_that_peers_name_is_the_culprit(tmp_path: Path) -> None:
    line = (
        "RuntimeError: Rank 0 successfully reached monitoredBarrier, but received errors while "
        "waiting for send/recv from rank 2. Please check rank 2 logs for faulty rank."
    )
    report = written(tmp_path, job=raised(line, "[rank0]: "))
    assert (report.verdict, report.culprits) == ("cause", (2,))


def test_the_rank_that_entered_fewer_collectives(tmp_path: Path) -> None:
    line = (
        "[rank{0}]:[E1102 x.cpp:629] [Rank {0}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum={1}, OpType=ALLREDUCE)\n"
        "[rank{0}]: [Rank {0}] last enqueued NCCL work: {1}, last completed NCCL work: 4.\n"
    )
    numbers = [9, 9, 8, 9]
    text = "".join(line.format(rank, number) for rank, number in enumerate(numbers))
    report = written(tmp_path, job=text)
    assert report.culprits == (2,)
    assert report.cause is not None
    assert report.cause.failure_class == "collective_timeout"


def test_what_training_outlived_is_not_the_cause(tmp_path: Path) -> None:
    """A4.2: a handled failure, and then steps."""
    steps = "".join(f"[rank0]: step {step} loss 2.0\n" for step in range(5))
    text = (
        raised("ValueError: bad record", "[rank0]: ") + steps + raised("KeyError: 3", "[rank1]: ")
    )
    assert written(tmp_path, job=text).culprits == (1,)


def of_steps(rank: int, first: int, last: int) -> str:
    return "".join(f"[rank{rank}]: step {step} loss 0.1\n" for step in range(first, last))


def test_a_rank_that_went_on_did_not_end_by_its_exception(tmp_path: Path) -> None:
    """A4.2: one step is enough where another rank's log ends with an exception."""
    caught = of_steps(0, 1, 5) + raised("TimeoutError: s3 read timed out", "[rank0]: ")
    caught += "[rank0]: retried ok\n" + of_steps(0, 5, 6) + of_steps(1, 5, 6)
    report = written(tmp_path, job=caught + raised("ZeroDivisionError: by zero", "[rank1]: "))
    assert (report.culprits, report.weight) == ((1,), 0.95)
    assert [other.rank for other in report.alternatives] == [0]
    alone = written(tmp_path, job=caught)
    assert (alone.culprits, alone.weight) == ((0,), 0.5)
    assert alone.missing == ("the end of the rank: it made a step after this exception",)


def test_an_exception_that_came_again_at_the_end_counts(tmp_path: Path) -> None:
    """The rank went on after the first of them, not after the last."""
    own = raised("TimeoutError: s3 read timed out", "[rank0]: ")
    report = written(tmp_path, job=of_steps(0, 1, 5) + own + of_steps(0, 5, 6) + own)
    assert (report.culprits, report.weight) == ((0,), 0.95)


def test_a_summary_of_the_last_step_is_no_step(tmp_path: Path) -> None:
    """Trackers print the last step again when a script ends; other ranks finish theirs."""
    own = of_steps(0, 1, 5) + raised("KeyError: 'a'", "[rank0]: ") + of_steps(0, 4, 5)
    report = written(tmp_path, job=own + of_steps(1, 4, 6))
    assert (report.culprits, report.weight) == ((0,), 0.95)


def test_ranks_that_fail_alike_are_all_named(tmp_path: Path) -> None:
    """A4.1: a deterministic error; clocks of nodes are not believed."""
    texts = {
        f"rank_{rank}": raised("ModuleNotFoundError: No module named 'x'") for rank in range(4)
    }
    report = written(tmp_path, **texts)
    assert report.culprits == (0, 1, 2, 3)
    assert report.cause is not None
    assert report.cause.failure_class == "import_error"
    assert report.missing


@pytest.mark.parametrize("failure_class", failure_logs.CLASSES)
def test_64_ranks_with_skewed_clocks(failure_class: str, tmp_path: Path) -> None:
    """A4.5, A7.6: cascades of 63 ranks; clocks of nodes up to 5 minutes wrong."""
    truth = failure_logs.write(tmp_path, failure_class, seed=1)
    report = analyze_files(truth.paths).report()
    assert report.cause is not None
    assert (report.verdict, report.cause.failure_class) == ("cause", failure_class)
    if truth.rank is not None:
        assert report.culprits == (truth.rank,)
    if truth.node:
        assert report.cause.node == truth.node


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [(failure_logs.HEALTHY, "nothing"), (failure_logs.ONLY_LOST, "inconclusive")],
)
def test_without_a_cause_nobody_is_named(kind: str, verdict: str, tmp_path: Path) -> None:
    """A4.6: a log of a job that is well; logs of all nodes but the culprit's."""
    report = analyze_files(failure_logs.write(tmp_path, kind, seed=1).paths).report()
    assert (report.verdict, report.culprits) == (verdict, ())


def steps(ahead_s: int) -> str:
    lines = []
    for step in range(1, 6):
        minute, second = divmod(60 * step + 600 + ahead_s, 60)
        lines.append(f"2026-11-02 03:{minute:02}:{second:02} step {step} loss 2\n")
    return "".join(lines)


def test_the_first_of_ranks_that_fail_alike_by_learned_clocks(tmp_path: Path) -> None:
    """A7.6: rank 1's clock is 5 minutes ahead; steps of both tell that it was first."""
    text = "CUDA error: an illegal memory access was encountered"
    report = written(
        tmp_path,
        rank_0=steps(0) + f"2026-11-02 03:15:40 {text}\n",
        rank_1=steps(300) + f"2026-11-02 03:20:05 {text}\n",
    )
    assert report.culprits == (1,)


def test_clocks_that_nothing_is_known_of_decide_nothing(tmp_path: Path) -> None:
    text = "CUDA error: an illegal memory access was encountered"
    report = written(
        tmp_path, rank_0=f"2026-11-02 03:15:40 {text}\n", rank_1=f"2026-11-02 03:20:05 {text}\n"
    )
    assert report.culprits == (0, 1)


def test_a_clock_does_not_outvote_a_cause(tmp_path: Path) -> None:
    """A lost connection that a clock puts an hour earlier stays a consequence."""
    report = written(
        tmp_path,
        rank_0="2026-11-02 02:15:40 Connection closed by peer [10.0.0.5]:1\n",
        rank_1="2026-11-02 03:20:05 CUDA error: misaligned address\n",
    )
    assert report.culprits == (1,)


@pytest.mark.parametrize(
    "text",
    [
        "[2026-11-02 03:11:11,500] x",
        "2026/11/02 03:11:11.5 x",
        "I1102 03:11:11.500000 4711 train.py:71] x",
        "[rank2]:[E1102 03:11:11.500000000 ProcessGroupNCCL.cpp:632] x",
    ],
)
def test_times_of_usual_formats(text: str) -> None:
    assert clocks.seconds(text, 2026) == clocks.seconds("2026-11-02T03:11:11.5", 2026)


@pytest.mark.parametrize(
    "text", ["step 4711", "9999-99-99 99:99:99", "E9999 99:99:99.1", "Foo 41 99:99:99"]
)
def test_what_is_no_time(text: str) -> None:
    assert clocks.seconds(text, 2026) is None


def test_an_old_line_of_the_kernel_is_not_the_cause(tmp_path: Path) -> None:
    """Training went on for days after it, by any clock."""
    old = "Oct 28 03:11:11 node-0 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python\n"
    report = written(tmp_path, rank_0=steps(0) + raised("KeyError: 'tokens'"), z_kern=old)
    assert report.culprits == (0,)


def test_command_prints_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.log"
    path.write_text(raised("KeyError: 'tokens'", "[rank3]: "))
    assert main(["logs", "analyze", str(path)]) == 3
    assert "rank 3" in capsys.readouterr().out.splitlines()[0]
    assert main(["logs", "analyze", str(path), "-o", "json"]) == 3
    record = json.loads(capsys.readouterr().out)
    assert record["schema"] == "everstep.log-report/v1"
    assert record["report"]["culprits"] == [3]
    assert record["report"]["retry"] == "after_change"
    path.write_text("step 1 loss 2\n")
    assert main(["logs", "analyze", str(path)]) == 0
    capsys.readouterr()
    assert main(["logs", "analyze", str(tmp_path / "none.log")]) == 2
    assert "none.log does not exist" in capsys.readouterr().err


def test_secrets_are_masked(tmp_path: Path) -> None:
    remember_secret("correct-horse-battery")
    text = "ValueError: correct-horse-battery evs_abcdefgh https://u:geheim@host \x1b]0;x\x07"
    report = written(tmp_path, job=raised(text, "[rank0]: "))
    shown = "\n".join(lines(report))
    for secret in ("correct-horse", "abcdefgh", "geheim", "\x1b"):
        assert secret not in shown


def test_what_finalizers_raise_ends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(
        "step 1\nException ignored in: <function X.__del__ at 0x7f>\n"
        'Traceback (most recent call last):\n  File "t.py", line 3, in __del__\n'
        "AttributeError: x\n"
    )
    assert analyze_files([path]).report().verdict == "nothing"
