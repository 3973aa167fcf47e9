"""A rank's figures in TensorBoard and Weights & Biases: real packages, offline."""

import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from torch.nn import Linear

from trainer_sdk import layout, testing
from trainer_sdk.rank_session import Session, session
from trainer_sdk.trackers import Tracker

_LONG_S = 3600.0


class Notes:
    """A sink that keeps what it is given, or fails."""

    def __init__(self, error: str = "") -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.is_closed = False
        self._error = error

    def write(self, figures: Mapping[str, float], step: int) -> None:
        if self._error:
            raise OSError(self._error)
        self.rows.append((step, dict(figures)))

    def close(self) -> None:
        self.is_closed = True


def tracker(run: Session, sink: Notes) -> Tracker:
    return Tracker(sink, *run._figures(), every_s=_LONG_S)


def train(run: Session, steps: int) -> None:
    for _ in range(steps):
        with run.section("data"):
            pass
        run.step()


def test_a_tracker_passes_on_only_new_figures() -> None:
    sink = Notes()
    with testing.watched():
        run = session()
        follower = tracker(run, sink)
        run.report("loss", 0.5)
        train(run, 3)
        follower.write()
        follower.write()
        train(run, 1)
        follower.write()
        run.report("loss", 0.25)
        follower.write()
    (first, second, third) = sink.rows
    assert first[0] == 3
    assert sorted(first[1]) == ["everstep/loss", "everstep/section/data_s", "everstep/step_s"]
    assert first[1]["everstep/loss"] == 0.5
    assert (second[0], sorted(second[1])) == (4, ["everstep/section/data_s", "everstep/step_s"])
    assert third == (4, {"everstep/loss": 0.25})


def test_a_mark_is_written_once_at_its_own_step() -> None:
    sink = Notes()
    with testing.watched():
        run = session()
        follower = tracker(run, sink)
        run._trackers.append(follower)
        train(run, 3)
        run._mark("numerics/rollback", 2)
        follower.write()
        follower.write()
        run._trackers.clear()
    assert sink.rows[0] == (2, {"everstep/numerics/rollback": 2.0})
    assert len(sink.rows) == 2, "the mark, then the figures"


def test_the_tracker_of_rank_0_tells_how_all_ranks_spread(tmp_path: Path) -> None:
    """Its agent writes the file once the tracker has made it."""
    sink, file = Notes(), tmp_path / layout.SPREADS_FILE
    with testing.watched():
        follower = Tracker(sink, *session()._figures()[:2], str(file), every_s=_LONG_S)
        follower.write()
        assert not file.exists()
        follower.start()
        assert file.exists()
        follower.write()
        fresh = tmp_path / "fresh"
        fresh.write_text('{"score/own/min": 0.4}')
        fresh.replace(file)
        follower.write()
        follower.write()
        follower.close()
    assert [figures for _, figures in sink.rows] == [{"everstep/ranks/score/own/min": 0.4}]


def test_medians_are_of_the_durations_on_the_page() -> None:
    sink = Notes()
    with testing.watched():
        run = session()
        train(run, 3)
        seconds = run._words.cast("B").cast("d")
        for number, took_s in ((1, 0.1), (2, 0.9), (3, 0.2)):
            seconds[layout.RINGS_AT + layout.RING_ENTRIES + number] = took_s
            seconds[layout.STEPS_AT + number] = 10 * took_s
        tracker(run, sink).write()
    ((_, figures),) = sink.rows
    assert figures["everstep/section/data_s"] == 0.2
    assert figures["everstep/step_s"] == 5.5, "the first step has no beginning"


def test_a_sink_that_fails_is_reported_once_and_the_training_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sink = Notes(error="the disk of this very test is full")
    with testing.watched():
        run = session()
        follower = tracker(run, sink)
        follower.start()
        train(run, 2)
        follower.close()
        follower.close()
    assert sink.is_closed
    line = "everstep: figures cannot be written: the disk of this very test is full\n"
    assert capsys.readouterr().err.count(line) == 1


def test_without_tensorboard_a_warning_names_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    with testing.watched():
        run = session()
        assert not run.report_to_tensorboard(str(tmp_path))
        assert run.step() == 1
        run.close()
    assert list(tmp_path.iterdir()) == []


def test_an_object_that_is_not_a_run_of_wandb_is_refused() -> None:
    with testing.watched():
        assert not session().report_to_wandb("llama")


def test_tensorboard_reads_back_what_a_rank_reported(tmp_path: Path) -> None:
    """Every rank has its own figures, not only rank 0."""
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="the extra `tensorboard` is not installed",
    )
    with testing.watched(rank=3):
        with session() as run:
            assert run.report_to_tensorboard(str(tmp_path), every_s=_LONG_S)
            run.report("loss", 0.5)
            train(run, 5)
        assert run._trackers == []
    events = reader.EventAccumulator(str(tmp_path / "rank-3"))
    events.Reload()
    tags = events.Tags()["tensors"]
    assert sorted(tags) == ["everstep/loss", "everstep/section/data_s", "everstep/step_s"]
    (loss,) = events.Tensors("everstep/loss")
    assert (loss.step, list(loss.tensor_proto.float_val) or loss.tensor_proto.tensor_content) == (
        5,
        [0.5],
    )


def test_tensorboard_reads_back_marks_of_results_at_their_steps(tmp_path: Path) -> None:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="the extra `tensorboard` is not installed",
    )
    wrong = [float("nan")]
    with testing.watched(), session() as run:
        assert run.report_to_tensorboard(str(tmp_path), every_s=_LONG_S)
        numerics = run.numerics({"model": Linear(1, 1)}, range(5), mode="validate_results")
        for batch in numerics:
            loss = numerics.compute(lambda number: wrong.pop() if number == 2 and wrong else 1.0,
                                    batch)  # fmt: skip
            if numerics.accepts(loss=loss):
                run.step()
        assert run.steps_made == 5
    events = reader.EventAccumulator(str(tmp_path / "rank-0"))
    events.Reload()
    for mark in ("nan", "again"):
        assert [event.step for event in events.Tensors(f"everstep/numerics/{mark}")] == [3]


_WANDB = """
import sys, torch, trainer_sdk, wandb
run = wandb.init(project="everstep", mode="offline", dir=sys.argv[1])
rank = trainer_sdk.session()
assert rank.report_to_wandb(run, every_s=3600)
rank.report("loss", 0.5)
for number in range(1, 4):
    with rank.section("data"):
        pass
    rank.step()
    run.log({"mine": number}, step=number)
wrong = [float("nan")]
numerics = rank.numerics({"model": torch.nn.Linear(1, 1)}, range(1), mode="validate_results")
for _ in numerics:
    loss = numerics.compute(lambda: wrong.pop() if wrong else 1.0)
    numerics.accepts(loss=loss)
rank.close()
run.finish()
"""
_BLOCK, _HEAD = 32768, 7
_FULL, _LAST = 1, 4


def records(data: bytes) -> Iterator[bytes]:
    """The records in a file of wandb: a log in LevelDB's format, after a header of 7 bytes."""
    at, whole = _HEAD, b""
    while at + _HEAD <= len(data):
        if _BLOCK - at % _BLOCK < _HEAD:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + _HEAD : at + _HEAD + length]
        at += _HEAD + length
        if kind in {_FULL, _LAST}:
            yield whole
            whole = b""


def rows(folder: Path) -> list[dict[str, float]]:
    """The rows of the only run, without what wandb adds."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    found = []
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = [(one.key or one.nested_key[0], one.value_json) for one in record.history.item]
            found.append({key: float(text) for key, text in items if not key.startswith("_")})
    return found


def test_a_run_of_wandb_keeps_its_rows_and_gets_our_figures(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    done = subprocess.run(
        [sys.executable, "-c", _WANDB, str(tmp_path)],
        env={**os.environ, "WANDB_SILENT": "true", "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second, third = rows(tmp_path)
    assert (first, second) == ({"mine": 1}, {"mine": 2})
    assert (third["mine"], third["everstep/loss"], third["everstep/step"]) == (3, 0.5, 3)
    assert set(third) == {
        *("mine", "everstep/loss", "everstep/step"),
        *("everstep/step_s", "everstep/section/data_s"),
        *("everstep/numerics/nan", "everstep/numerics/again", "everstep/section/numerics_s"),
    }
    assert (third["everstep/numerics/nan"], third["everstep/numerics/again"]) == (4, 4)
