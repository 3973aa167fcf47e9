"""A late message about a save does not release a buffer that another save uses."""

import mmap
from pathlib import Path

from tests.unit.trainer_sdk.checkpoint.saved_states import KeptReports
from trainer_sdk.checkpoint.image_folder import mark_image
from trainer_sdk.checkpoint.manifest import Identity
from trainer_sdk.checkpoint.save.buffers import Buffer
from trainer_sdk.checkpoint.save.request import Save
from trainer_sdk.checkpoint.save.save_queue import SaveQueue
from trainer_sdk.checkpoint.storage.checkpoints import CheckpointMark
from trainer_sdk.checkpoint.writer.protocol import (
    FromWriter,
    PartWritten,
    SaveDone,
    SaveFailed,
    WriteFile,
)


class Queue(SaveQueue):
    """A queue whose writer is the test."""

    def __init__(self) -> None:
        super().__init__(0, KeptReports())
        self.buffer = Buffer()

    def sent(self) -> Save:
        """A save that was sent to the writer; all saves use the same buffer in turn."""
        assert self.buffer.is_free
        save = self.begin(None, self.buffer, (), 0.0)
        save.order = WriteFile(save=save.number, image="", size_bytes=1, path="/ckpt/model.pt")
        return save

    def hear(self, line: FromWriter) -> bool:
        """Whether the buffer is free after this message."""
        self._receive(line)
        return self.buffer.is_free


def written(save: Save) -> PartWritten:
    return PartWritten(save=save.number, size_bytes=1, write_s=0.1)


def test_the_end_of_a_save_releases_the_buffer_once() -> None:
    queue = Queue()
    first = queue.sent()
    assert queue.hear(written(first))
    second = queue.sent()
    assert not queue.hear(SaveDone(save=first.number, place="/ckpt"))
    assert queue.hear(written(second))


def test_a_failure_releases_the_buffer_once() -> None:
    queue = Queue()
    first = queue.sent()
    assert queue.hear(written(first))
    queue.sent()
    assert not queue.hear(SaveFailed(save=first.number, stage="publish", reason="the disk is full"))


def test_a_save_that_fails_before_its_write_releases_its_buffer() -> None:
    queue = Queue()
    assert queue.hear(
        SaveFailed(save=queue.sent().number, stage="write", reason="the disk is full")
    )


def test_a_removed_image_leaves_no_mark(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    buffer = Buffer(str(folder))
    buffer.fit(4096)
    identity = Identity(job="j", round=1, step=20, world_size=1, layout="l")
    mark_image(folder, identity, CheckpointMark(reason="the loss is nan"))
    buffer.remove()
    assert not folder.exists()


def test_a_mapped_image_stays_readable_when_the_next_state_is_smaller(tmp_path: Path) -> None:
    buffer = Buffer(str(tmp_path / "a"))
    buffer.fit(3 * mmap.PAGESIZE)
    buffer.octets.fill_(7)
    with open(buffer.path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    buffer.fit(mmap.PAGESIZE)
    assert set(mapped[:]) == {7}
    assert Path(buffer.path).stat().st_size == mmap.PAGESIZE
