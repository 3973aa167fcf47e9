"""Log files of any encoding, length and content."""

import gzip
import io
import random
from pathlib import Path

import pytest

from everstep_services.attribution.log_analysis.chunks import LogFile, Shapes
from everstep_services.attribution.log_analysis.files import analyze_files
from everstep_services.attribution.log_analysis.rules import shipped
from everstep_services.cli.__main__ import main
from tests.unit.attribution.log_analysis.logs import raised, written


@pytest.mark.parametrize("size", [2_000, 200_000, 3 << 20])
def test_words_far_into_a_long_line(size: int, tmp_path: Path) -> None:
    text = f'[rank3]: {{"args": "{"x" * size}", "message": "CUDA out of memory. Tried 2 GiB"}}\n'
    report = written(tmp_path, job=text)
    assert report.cause is not None
    assert report.cause.failure_class == "gpu_oom"
    assert report.culprits == ((3,) if size < 1 << 20 else ())


def test_a_failure_behind_a_progress_bar(tmp_path: Path) -> None:
    """A bar overwrites its line for days and has no end of line."""
    bar = "".join(f"\r {part % 100}%|███| {part}/99999 [1.1it/s]" for part in range(40_000))
    report = written(tmp_path, job=f"{bar}{raised('KeyError: 3')}")
    assert report.cause is not None
    assert (report.cause.failure_class, report.cause.line) == ("python_exception", 4)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "latin-1"])
def test_other_encodings(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_bytes(f"é\n{raised('KeyError: 3', '[rank3]: ')}".encode(encoding))
    assert analyze_files([path]).report().culprits == (3,)


def test_colours_are_looked_through(tmp_path: Path) -> None:
    text = raised("\x1b[1;35mKeyError\x1b[0m: \x1b[35m'tokens'\x1b[0m", "[rank3]: ")
    report = written(tmp_path, job=text)
    assert report.cause is not None
    assert report.cause.fingerprint == "observed:KeyError:step:'tokens'"


def test_a_compressed_log_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "job.log.gz"
    whole = gzip.compress(raised("KeyError: 3", "[rank3]: ").encode() + b"x y z\n" * 9000)
    path.write_bytes(whole)
    assert analyze_files([path]).report().culprits == (3,)
    path.write_bytes(whole[:-12])
    analysis = analyze_files([path])
    assert analysis.notes == [f"{path} is cut short or damaged (gzip): read up to there"]


def test_a_cut_off_end_leaves_it_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A4.6: the failure is at the end of a log; without the end nobody knows."""
    path = tmp_path / "job.log.gz"
    text = "".join(f"[rank0]: step {step} loss 0.1\n" for step in range(9000))
    path.write_bytes(gzip.compress(text.encode() + raised("ValueError: x").encode())[:-60])
    assert main(["logs", "analyze", str(path)]) == 1
    shown = capsys.readouterr().out
    assert "inconclusive: no line that could be read reports a failure" in shown
    assert f"Missing: the end of {path}." in shown
    path.write_bytes(gzip.compress(text.encode()))
    assert main(["logs", "analyze", str(path)]) == 0


@pytest.mark.parametrize(
    ("content", "missing"),
    [
        (random.Random(7).randbytes(300_000), "a readable copy of "),
        (b"step 1 loss 0.3\n" * 9000 + b"\0" * 900, "the end of "),
        ("step 1 loss 0.3\n".encode("utf-16-le") * 300, "a readable copy of "),
    ],
)
def test_noise_leaves_it_open(content: bytes, missing: str, tmp_path: Path) -> None:
    """A4.6: random bytes, zeros in place of an end, text of two bytes without a mark."""
    path = tmp_path / "job.log"
    path.write_bytes(content)
    report = analyze_files([path]).report()
    assert (report.verdict, report.missing) == ("inconclusive", (f"{missing}{path}",))
    assert len(report.notes) == 1


@pytest.mark.parametrize(
    "text", ["é" * 9000, "学習ステップ 損失\n" * 900, "\x1b[32mok\x1b[0m\n" * 900]
)
def test_text_of_all_languages_is_text(text: str, tmp_path: Path) -> None:
    report = written(tmp_path, job=text)
    assert (report.verdict, report.notes) == ("nothing", ())


def test_a_log_that_was_not_read_leaves_it_open(tmp_path: Path) -> None:
    """A4.6: one of two logs is not there."""
    path = tmp_path / "job.log"
    path.write_text("step 1 loss 0.3\n")
    assert analyze_files([path, tmp_path / "none.log"]).report().verdict == "inconclusive"


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (b"", "is empty"),
        (b"\x28\xb5\x2f\xfdabc", "is compressed (zstd): unpack it first"),
        (b"PK\x03\x04abc", "is compressed (zip): unpack it first"),
    ],
)
def test_files_without_lines(content: bytes, note: str, tmp_path: Path) -> None:
    """A13.3: one clear line."""
    path = tmp_path / "job.log"
    path.write_bytes(content)
    analysis = analyze_files([path])
    assert analysis.notes == [f"{path} {note}"]
    assert analysis.report().verdict == ("inconclusive" if content else "nothing")


def test_what_is_not_a_file(tmp_path: Path) -> None:
    """A13.3: a folder; a name that no file system has."""
    analysis = analyze_files([tmp_path, tmp_path / ("deep/" * 2000)])
    assert analysis.notes[0] == f"{tmp_path} is a folder: name the files in it"
    assert analysis.notes[1].endswith(" cannot be read: File name too long")
    assert len(analysis.notes[1]) < 400


@pytest.mark.parametrize(
    "before",
    [
        bytes(range(256)) * 999 + b"\n",
        b"\0" * 5000 + b"\n",
        b"x" * (5 << 20) + b"\n",
        b"\xff\xfe\n",
    ],
)
def test_hostile_content_hides_nothing(before: bytes, tmp_path: Path) -> None:
    """A13.3: binary, NULs, a line without end, another encoding."""
    path = tmp_path / "job.log"
    path.write_bytes(before + raised("KeyError: 'tokens'", "[rank3]: ").encode())
    assert analyze_files([path]).report().culprits == (3,)


def test_a_line_without_end_is_not_kept(tmp_path: Path) -> None:
    shapes = Shapes(shipped().words)
    log = LogFile(io.BytesIO(b"x" * (9 << 20)), shapes)
    assert [at for _ in log.chunks() for at in log.loud] == []
    assert (log.lines, log.bytes) == (1, 9 << 20)
