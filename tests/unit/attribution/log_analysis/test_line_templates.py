"""Lines that differ in numbers that nothing depends on mean the same, and only these."""

import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import mean

import pytest

from benchmarks.foreign import public
from everstep_services.attribution.log_analysis import chunks
from everstep_services.attribution.log_analysis.line_templates import LineTemplates
from everstep_services.attribution.log_analysis.rules import shipped
from tests.fakes import failure_logs, failure_loops
from tests.unit.attribution.log_analysis.logs import both, raised

_TURNS = 8
ALL = failure_loops.ALL
_WATCHDOG = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum={}, OpType=X)"


def meanings(*lines: str) -> Sequence[object]:
    """The meanings of lines of kinds that come often enough to be learned."""
    templates = LineTemplates(shipped())
    for line in lines * 4:
        templates.meaning(line.encode())
    return [templates.meaning(line.encode()) for line in lines]


@pytest.mark.parametrize(
    ("line", "another"),
    [
        ("2025-11-02 03:11:11 KeyError: 'a'", "2026-11-02 03:11:11 KeyError: 'a'"),
        ("[2026-11-02 03:11:11,250] Traceback (most recent call last):",
         "[2026-12-31 23:59:01,9] Traceback (most recent call last):"),
        ('  File "/u/train.py", line 88, in main', '  File "/u/train.py", line 9, in main'),
        ("[rank3]: RuntimeError: step 17 of pid 9000 took 1.5 s",
         "[rank3]: RuntimeError: step 3 of pid 12 took 99.25 s"),
        ("frame #0: c10::Error::Error() + 0x96 (0x7f12ab34cd87 in a.so)",
         "frame #0: c10::Error::Error() + 0x96 (0x55dead00beef in a.so)"),
        (f"E1102 03:11:13.5 77 [Rank 3] {_WATCHDOG.format(4)}",
         f"E1201 13:00:00.1 9 [Rank 3] {_WATCHDOG.format(417)}"),
        ("bash: line 1: 2552014 Segmentation fault", "bash: line 1: 14 Segmentation fault"),
    ],
)  # fmt: skip
def test_numbers_that_do_not_matter(line: str, another: str) -> None:
    one, two = meanings(line, another)
    assert one is two


@pytest.mark.parametrize(
    ("line", "another"),
    [
        ("[rank3]: KeyError: 'a'", "[rank4]: KeyError: 'a'"),
        ("[rank3]: KeyError: 'a'", "[rank30]: KeyError: 'a'"),
        ("KeyError: 'layer3.weight'", "KeyError: 'layer4.weight'"),
        ("process exited with exit code 137", "process exited with exit code 139"),
        ("  exitcode  : -9 (pid: 17)", "  exitcode  : -7 (pid: 17)"),
        ("NVRM: Xid (PCI:0000:01:00): 79, pid=1", "NVRM: Xid (PCI:0000:01:00): 31, pid=1"),
        ("[rank3]: lost: frame 0x7f12ab34cd87", "[rank4]: lost: frame 0x7f12ab34cd87"),
    ],
)  # fmt: skip
def test_numbers_that_matter(line: str, another: str) -> None:
    one, two = meanings(line, another)
    assert one is not two


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_public_failures_that_come_again(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each failure alone in a loop: with other digits, the answer is that of reading everything."""
    path, shares = tmp_path / "job.log", []
    for number, case in enumerate(public.cases()[share == 1 :: 2]):
        text = "".join(f"{line}\n" for line in case.lines)
        path.write_text(failure_loops.loop([text], _TURNS, random.Random(number), share, ALL))
        fast, slow, passed = both(path, monkeypatch)
        assert fast == slow, case.thread
        shares.append(passed)
    assert mean(shares) > 0.3


@pytest.mark.parametrize("seed", range(6))
def test_failures_of_several_ranks_that_come_again(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failures of all kinds between each other, with attempts and steps."""
    dice = random.Random(seed)
    texts = [
        "".join(f"{prefix}{line}\n" for line in case.lines)
        for case in dice.sample(list(public.cases()), 5)
        for prefix in ("", f"[rank{dice.randrange(3)}]: ", "2026-11-02 03:11:11 [default3]:")
    ]
    texts += [
        raised("KeyError: 'a'", "[rank1]: "), raised("RuntimeError:\nbus error in step 3"),
        f"During handling of the above exception, another occurred:\n{raised('ValueError: 1')}",
        "iteration 7/ 9 loss: 1\n", "all is well, step by step\n", "starting worker group 3\n",
    ]  # fmt: skip
    path = tmp_path / "job.log"
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 60_000)
    path.write_text(failure_loops.loop(texts, 4 * _TURNS, dice, dice.choice((0.1, 0.5)), ALL))
    fast, slow, _ = both(path, monkeypatch)
    assert fast == slow


@pytest.mark.parametrize("kind", ["python_exception", "collective_timeout", "gpu_oom", "killed"])
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_logs_of_jobs_that_fail_again(
    kind: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = failure_logs.write(tmp_path, kind, seed, 16)
    path = max(truth.paths, key=lambda path: path.stat().st_size)
    text = path.read_bytes().decode("utf-8", "replace").replace("\r\n", "\n")
    path.write_text(failure_loops.loop([text], 5, random.Random(seed), 0.3, ALL))
    fast, slow, _ = both(path, monkeypatch)
    assert fast == slow


def test_a_crash_loop_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.log"
    path.write_text("".join(islice(failure_loops.crashes(), 300)))
    fast, slow, passed = both(path, monkeypatch)
    assert fast == slow
    assert fast.cause is not None
    assert fast.cause.failure_class == "gpu_oom"
    assert passed > 0.95
