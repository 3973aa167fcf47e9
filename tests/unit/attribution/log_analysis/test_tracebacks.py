"""Tracebacks: the exception is their last line, and of a chain the last one that was raised."""

from pathlib import Path

import pytest

from everstep_services.attribution.log_analysis.report import LogReport
from tests.unit.attribution.log_analysis.logs import raised, written

CAUSED = "The above exception was the direct cause of the following exception:"
MEANWHILE = "During handling of the above exception, another exception occurred:"


def trace(code: str, last: str, *, indent: str = "  ", prefix: str = "[rank0]: ") -> str:
    lines = (
        "Traceback (most recent call last):", f'{indent}File "/u/train.py", line 9, in <module>',
        f"{2 * indent}main()", f'{indent}File "/u/train.py", line 5, in main',
        f"{2 * indent}{code}", last,
    )  # fmt: skip
    return "".join(f"{prefix}{line}\n" for line in lines)


def fingerprint(report: LogReport) -> str:
    assert report.cause is not None
    return report.cause.fingerprint


@pytest.mark.parametrize(
    "code", ['else: raise Boom("x")', 'try: {}["vocab"]', "finally: close()", "Total: int = f(y)"]
)
@pytest.mark.parametrize("prefix", ["[rank0]: ", "", "0: ", "[1,0]<stderr>:"])
def test_a_source_line_is_not_the_exception(code: str, prefix: str, tmp_path: Path) -> None:
    """A7.1: a line of code may have the form of an exception."""
    report = written(tmp_path, job=trace(code, "mypkg.errors.Boom: x", prefix=prefix))
    assert fingerprint(report) == "observed:Boom:main:x"
    assert report.cause is not None
    assert report.cause.quote.endswith("mypkg.errors.Boom: x")


@pytest.mark.parametrize("code", ['else: raise Boom("x")', 'try: {}["vocab"]'])
def test_a_logger_that_strips_lines(code: str, tmp_path: Path) -> None:
    report = written(tmp_path, job=trace(code, "mypkg.errors.Boom: x", indent=""))
    assert fingerprint(report) == "observed:Boom:main:x"


@pytest.mark.parametrize("link", [CAUSED, MEANWHILE])
def test_of_a_chain_the_last_exception_counts(link: str, tmp_path: Path) -> None:
    """A7.1: the exception that ended the rank names the failure."""
    first = trace('try: {}["vocab"]', "KeyError: 'vocab'")
    last = trace("raise E() from e", "RuntimeError: cannot build the model")
    chain = f"{first}[rank0]: \n[rank0]: {link}\n[rank0]: \n{last}"
    report = written(tmp_path, job=chain + chain)  # as when the launcher repeats it
    assert fingerprint(report) == "observed:RuntimeError:main:cannot build the model"
    assert report.alternatives == ()


def test_of_interleaved_chains_each_ends_by_itself(tmp_path: Path) -> None:
    first, last = raised("KeyError: 'a'", "{0}"), raised("ValueError: b", "{0}")
    chain = f"{first}{{0}}\n{{0}}{CAUSED}\n{{0}}\n{last}".splitlines()
    mixed = "".join(f"{line.format(f'[rank{rank}]: ')}\n" for line in chain for rank in range(2))
    report = written(tmp_path, job=mixed)
    assert fingerprint(report) == "observed:ValueError:step:b"
    assert (report.culprits, report.alternatives) == ((0, 1), ())


def test_a_failed_clean_up_does_not_hide_the_device(tmp_path: Path) -> None:
    """An exception of a known kind explains a general one that came while it was handled."""
    first = raised("torch.OutOfMemoryError: CUDA out of memory.", "[rank0]: ")
    last = raised("AttributeError: 'NoneType' object has no attribute 'close'", "[rank0]: ")
    report = written(tmp_path, job=f"{first}[rank0]: {MEANWHILE}\n{last}")
    assert report.cause is not None
    assert report.cause.failure_class == "gpu_oom"


def test_two_tracebacks_without_a_link_are_two_failures(tmp_path: Path) -> None:
    report = written(tmp_path, job=raised("KeyError: 'a'") + raised("ValueError: b"))
    assert fingerprint(report) == "observed:KeyError:step:'a'"
    assert len(report.alternatives) == 1


def test_the_members_of_a_group(tmp_path: Path) -> None:
    text = """\
  + Exception Group Traceback (most recent call last):
  |   File "/u/t.py", line 1, in main
  |     try: f()
  | ExceptionGroup: many (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/u/t.py", line 3, in f
    |     else: raise ValueError("a")
    | ValueError: a
    +------------------------------------
"""
    assert fingerprint(written(tmp_path, job=text)) == "observed:ValueError:f:a"
