"""Several queues of saves in one process, at once: each has its own, and none harms another."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint_helpers.saved_by import WITHIN_S, load, manifest_of, path_of, saving
from tests.integration.checkpoints.test_files import Door
from tests.stopping import stop
from tests.unit.trainer_sdk.checkpoint.saved_states import together
from tests.variants import variant
from tests.waiting import until
from trainer_sdk import layout, testing
from trainer_sdk.checkpoint import Checkpointer, FileSaver, SaveError, async_save
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.restore.discovery import OFFER
from trainer_sdk.checkpoint.save import buffers
from trainer_sdk.checkpoint.save.buffers import Arena, Buffer, TakenError
from trainer_sdk.checkpoint.save.save_queue import SaveQueue
from trainer_sdk.checkpoint.schedule.write_rate import LEAST_BYTES_PER_S

SCRIPT = Path(__file__).parents[1] / "scripts" / "two_queues.py"
State = dict[str, Any]


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with testing.watched():
        yield


def state(value: float) -> State:
    """Those of all queues have one form: a mistake would fit."""
    return {"weights": torch.full((1 << 16,), value), "value": value, "nested": {"list": [value]}}


def value_of(found: State) -> float:
    """Which of them it is, whole."""
    (value,) = {found["value"], *found["nested"]["list"], *found["weights"].tolist()}
    return float(value)


def loaded(folder: Path, step: int) -> float:
    """By torch alone, from `folder / "root"`."""
    return value_of(load(folder, step, state(0)))


def stopped(*queues: SaveQueue) -> list[int]:
    """Their writers, which write nothing until they go on."""
    found = []
    for one in queues:
        one.warm()
        found.append(one.writer_pid or 0)
    for pid in found:
        stop(pid)
    return found


def go_on(writers: list[int]) -> None:
    for pid in writers:
        with suppress(ProcessLookupError):  # one that was killed
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("order", [1, -1])
def test_saves_to_different_places_at_once_are_all_durable(tmp_path: Path, order: int) -> None:
    folders = [tmp_path / "model", tmp_path / "average"]
    files = FileSaver()
    durable: list[int] = []
    with ExitStack() as stack:
        both = [
            stack.enter_context(Checkpointer(one / "root", keep_memory=True)) for one in folders
        ]
        for step in (1, 2, 3):
            writers = stopped(*(one._queue for one in both), files._queue)
            handles = [
                one.save(step, state(10 * number + step), finalize=(lambda: durable.append(1),))
                for number, one in enumerate(both)
            ]
            handles.append(files.schedule(state(20 + step), tmp_path / f"{step}.pt"))
            assert [one.state for one in handles] == ["staged"] * 3
            go_on(writers[::order])
            assert all(one.wait(WITHIN_S) for one in handles[::order])
            assert [len(one.maybe_finalize()) for one in both] == [1, 1]
            assert len(files.maybe_finalize()) == 1
    files.close()
    assert len(durable) == 6
    for step in (1, 2, 3):
        found = [loaded(folder, step) for folder in folders]
        found.append(value_of(torch.load(tmp_path / f"{step}.pt")))
        assert found == [step, 10 + step, 20 + step]


def test_each_of_two_with_memory_restores_its_own(tmp_path: Path) -> None:
    roots = [tmp_path / "model", tmp_path / "average"]
    saved = [Checkpointer(root, keep_memory=True) for root in roots]
    for value, one in enumerate(saved, 1):
        assert one.save(value, state(value), wait=True)
    for one in saved:
        one._close(abort=False, is_failing=True)  # as a failure leaves it: the images stay
    for value, root in enumerate(roots, 1):
        live = state(0)
        with Checkpointer(root, keep_memory=True) as again:
            found = again.restore(live)
        assert found is not None
        assert (found.step, found.tier, value_of(live)) == (value, "memory", value)


def test_who_keeps_nothing_in_memory_restores_no_state_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The images of a rank are one state's, and all of a job have the same form here."""
    images = tmp_path / "images"
    monkeypatch.setenv(layout.IMAGES_VARIABLE, str(images))
    monkeypatch.setenv("EVERSTEP_JOB", "two")
    roots = {"model": True, "average": False}
    found: list[tuple[str, float] | None] = []
    for number in (1, 2):
        monkeypatch.setenv(layout.ROUND_VARIABLE, str(number))
        images.mkdir(exist_ok=True)
        (images / OFFER).write_text(json.dumps({"round": number, "complete": True}))
        found.clear()
        for value, (name, keeps) in enumerate(roots.items(), 1):
            live = state(0)
            with Checkpointer(tmp_path / name, keep_memory=keeps) as saves:
                restored = saves.restore(live)
                found.append(None if restored is None else (restored.tier, value_of(live)))
                if restored is None:
                    assert saves.save(10 - value, state(value), wait=True)
    assert found == [("memory", 1), ("global", 2)]


def test_a_second_one_that_keeps_the_same_images_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "_WITHIN_S", 0.0)
    with Checkpointer(tmp_path / "a", keep_memory=True, job="two-images") as first:
        before = set(threading.enumerate())  # of an earlier test, some may just be ending
        with pytest.raises(TakenError, match="another Checkpointer of this process has the images"):
            Checkpointer(tmp_path / "b", memory_every=5, job="two-images")
        assert before.issuperset(threading.enumerate()), "it has no writer"
        assert first.save(1, state(1), wait=True)
    Checkpointer(tmp_path / "b", memory_every=5, job="two-images").close()


@pytest.mark.parametrize("restores", [False, True])
def test_two_save_different_steps_into_one_place(tmp_path: Path, restores: bool) -> None:
    """Also where one of them has restored, which begins a round: the other one's is the same."""
    root, more = tmp_path / "root", {"more": torch.zeros(10 << 20)}
    with Checkpointer(root) as before:
        assert before.save(1, state(1) | more, wait=True)
    with (
        Checkpointer(root) as one,
        Checkpointer(root, write_bytes_per_s=LEAST_BYTES_PER_S) as other,
    ):
        assert not restores or one.restore(state(0) | more)
        late = other.save(11, state(11) | more, occasion="interval")
        until(lambda: [*(root / ".saving").glob("11-*/.__0_0*")], "it is being written")
        writers = stopped(other._queue)
        assert one.save(10, state(10) | more, wait=True).durable
        assert late.state == "staged"
        go_on(writers)
        assert late.wait(WITHIN_S), late.reason
        newest = other.latest()
    assert newest is not None
    assert newest.step == 11
    assert [loaded(tmp_path, step) for step in (10, 11)] == [10, 11]
    rounds = {manifest_of(tmp_path, step).identity.round for step in (10, 11)}
    assert rounds == {int(restores)}


def test_of_two_saves_of_one_step_into_one_place_one_is_there(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root") as one, Checkpointer(tmp_path / "root") as other:
        writers = stopped(one._queue, other._queue)
        handles = [saves.save(1, state(value)) for value, saves in enumerate((one, other), 1)]
        go_on(writers)
        durable = [handle.wait(WITHIN_S) for handle in handles]
        assert sorted(durable) == [False, True]
        assert "is what round 0 has saved" in handles[durable.index(False)].reason
    assert loaded(tmp_path, 1) == 1 + durable.index(True)
    assert not [*(tmp_path / "root" / ".saving").iterdir()]


def test_two_ranks_have_two_queues_each(tmp_path: Path) -> None:
    folders = [tmp_path / "model", tmp_path / "average"]

    def one(group: RankGroup) -> list[list[int]]:
        with ExitStack() as stack:
            both = [stack.enter_context(saving(folder, group)) for folder in folders]
            for step in (1, 2):
                for number, queue in enumerate(both):
                    own = {f"rank-{group.rank}": torch.full((9,), group.rank)}
                    assert queue.save(step, state(10 * number + step) | own, wait=True)
            return [queue.finish() for queue in both[:: 1 - 2 * group.rank]]

    assert together(2, one) == [[[1, 2], [1, 2]]] * 2
    assert [loaded(folder, 2) for folder in folders] == [2, 12]
    assert [len(manifest_of(folder, 2).files) for folder in folders] == [3, 3]


def killed(saves: Checkpointer, root: Path) -> None:
    os.kill(until(lambda: saves._queue.writer_pid, "a writer"), signal.SIGKILL)


def without_a_root(_: Checkpointer, root: Path) -> None:
    root.touch()


@pytest.mark.parametrize("harm", [killed, without_a_root])
def test_one_that_fails_does_no_harm_to_another(
    tmp_path: Path, harm: Callable[[Checkpointer, Path], None]
) -> None:
    files = FileSaver(on_error="fatal")
    bad = Checkpointer(tmp_path / "bad", on_error="fatal")
    with Checkpointer(tmp_path / "root", on_error="fatal") as good:
        writers = stopped(bad._queue, good._queue, files._queue)
        failing, durable = bad.save(1, state(1)), good.save(1, state(2))
        file = files.schedule(state(3), tmp_path / "file.pt")
        harm(bad, tmp_path / "bad")
        go_on(writers)
        assert not failing.wait(WITHIN_S)
        assert durable.wait(WITHIN_S)
        assert file.wait(WITHIN_S)
        with pytest.raises(SaveError, match="step 1"):
            bad.maybe_finalize()
        assert good.save(2, state(4), wait=True).durable
    files.close()
    bad.close()
    assert [loaded(tmp_path, step) for step in (1, 2)] == [2, 4]
    assert value_of(torch.load(tmp_path / "file.pt")) == 3
    assert not path_of(tmp_path / "bad", 1).exists()


@pytest.mark.parametrize(("how", "code"), [("works", 0), variant("fails", 1), ("hangs", 1)])
def test_the_end_waits_for_all_of_them(tmp_path: Path, how: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, how],
        env=os.environ | {"EVERSTEP_ATTACH": "off"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert ("the save of step 1 failed" in done.stderr) is bool(code)
    (tmp_path / "works").rename(tmp_path / "root")
    assert load(tmp_path, 1, {"a": torch.zeros(1 << 20)})["a"].unique().tolist() == [2]
    assert torch.load(tmp_path / "file.pt")["a"].unique().tolist() == [3]


def test_what_is_called_after_a_save_may_begin_one_elsewhere(tmp_path: Path) -> None:
    elsewhere = tmp_path / "other" / "root"
    with Checkpointer(elsewhere) as other, Checkpointer(tmp_path / "root") as saves:

        def copied() -> None:
            assert async_save(state(2), tmp_path / "file.pt").wait(WITHIN_S)
            assert other.save(1, state(3), wait=True).durable

        saves.save(1, state(1), finalize=(copied,))
    assert loaded(tmp_path, 1) == 1
    assert loaded(tmp_path / "other", 1) == 3
    assert value_of(torch.load(tmp_path / "file.pt")) == 2


def test_two_queues_of_files_write_each_name_whole(tmp_path: Path) -> None:
    """Also the name that both write, and more names than there is memory for."""
    both = [FileSaver(), FileSaver(in_flight=2)]

    def schedule(number: int) -> None:
        for count in range(6):
            value = 10 * number + count
            both[number].schedule(state(value), tmp_path / f"{value}.pt")
            both[number].schedule(state(value), tmp_path / "shared.pt")

    threads = [threading.Thread(target=schedule, args=(number,)) for number in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for saver in both:
        saver.close()
    for value in (*range(6), *range(10, 16)):
        assert value_of(torch.load(tmp_path / f"{value}.pt")) == value
    assert value_of(torch.load(tmp_path / "shared.pt")) in (5, 15)
    assert len([*tmp_path.iterdir()]) == 13


def test_threads_of_one_queue_of_files_have_a_buffer_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two names would have one state."""
    saves, door, plain = FileSaver(), Door(), Arena.next
    given: list[Buffer | None] = []

    def slowly(self: Arena) -> Buffer | None:
        found = plain(self)
        given.append(found)
        if len(given) == 1:
            until(lambda: door.waited or len(given) > 1, "the other one waits, or has one, too")
        return found

    monkeypatch.setattr(saves, "_scheduling", door, raising=False)
    monkeypatch.setattr(Arena, "next", slowly)
    threads = [
        threading.Thread(target=saves.schedule, args=(state(value), tmp_path / f"{value}.pt"))
        for value in range(2)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    saves.close()
    assert [value_of(torch.load(tmp_path / f"{value}.pt")) for value in range(2)] == [0, 1]


def test_a_process_with_more_than_a_thousand_descriptors_saves(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    try:
        with ExitStack() as stack:
            for _ in range(1100):
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            with Checkpointer(tmp_path / "root") as saves:
                assert saves.save(1, state(1), wait=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert loaded(tmp_path, 1) == 1
