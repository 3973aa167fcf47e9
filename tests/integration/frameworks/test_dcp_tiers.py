"""`dcp.save` and `dcp.load` use the memory of the nodes, as `Checkpointer` does."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.integration.frameworks.ranks import launch
from trainer_sdk.checkpoint.job_context import read_job_context
from trainer_sdk.checkpoint.storage import storage_for
from trainer_sdk.checkpoint.storage.checkpoints import stored_checkpoints

pytestmark = pytest.mark.timeout(600)


class DcpJob:
    """A training of two ranks without an agent; its images are in the memory of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = f"dcp-{uuid4().hex[:8]}"
        self.images = Path(read_job_context({"EVERSTEP_JOB": self.name}).images)

    def run(self, steps: int, **environ: str) -> str:
        arguments = (str(self.folder), str(steps))
        return launch("dcp_tiers.py", *arguments, ranks=2, EVERSTEP_JOB=self.name, **environ)

    def steps(self) -> list[int]:
        """The steps in the global tier."""
        root = storage_for(str(self.folder / "checkpoints"))
        return [there.step for there in stored_checkpoints(root)]

    def restored(self) -> list[list[object]]:
        """The step and tier that each rank has restored."""
        return [json.loads((self.folder / f"restored-0-{rank}").read_text()) for rank in range(2)]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[DcpJob]:
    job = DcpJob(tmp_path)
    yield job
    shutil.rmtree(job.images, ignore_errors=True)


def test_ranks_load_from_memory_another_nodes_copy_and_the_global_tier(job: DcpJob) -> None:
    """Step 7 is in memory only; when an image of it is damaged, all load step 5 (A8.8).

    So they do with other shardings, which one line reports. An image that `newest_verified` has
    verified is verified again only if it has changed. A save or load of one rank alone, which would
    wait for the other, is refused.
    """
    printed = job.run(0)
    assert job.steps() == [5]
    line = "all ranks load step 5 from the global tier, and not step 7 from memory: on rank 0, "
    assert printed.count(f"{line}sharded is sharded in another way than it was saved") == 1
    assert printed.count(line) == 2


@pytest.mark.variant
def test_a_load_takes_the_newest_state_from_memory_or_from_a_peer(job: DcpJob) -> None:
    """Step 7 was never saved to the global tier. Then rank 1's image is another node's copy.

    At the end of the training, nothing is left in memory (A9.1).
    """
    job.run(12, LEAVE="7")
    assert job.steps() == [5]
    job.run(12, LEAVE="8")
    assert job.restored() == [[7, "memory"], [7, "memory"]]
    copies = job.images / "held" / "slot-1" / "rank-1"
    copies.parent.mkdir(parents=True)
    (job.images / "own" / "rank-1").rename(copies)
    job.run(9)
    assert job.restored() == [[8, "memory"], [8, "peer"]]
    assert not list(job.images.glob("own/*"))


@pytest.mark.variant
def test_a_damaged_image_is_passed_over_for_the_global_tier(job: DcpJob) -> None:
    """No rank loads step 7, as rank 1's image of it is damaged; all load step 5 (A8.8)."""
    job.run(12, LEAVE="7")
    job.run(6, DAMAGE="1", EVERSTEP_TEST_LATER="1")
    assert job.restored() == [[5, "global"], [5, "global"]]


@pytest.mark.variant
def test_after_a_load_with_other_shards_the_training_continues_from_the_global_tier(
    job: DcpJob,
) -> None:
    """Step 7 in memory has other shards: the training continues from step 5, and saves over it."""
    job.run(12, LEAVE="7")
    job.run(12, OTHER_SHARDS="1", EVERSTEP_TEST_LATER="1", LEAVE="6")
    assert job.restored() == [[5, "global"], [5, "global"]]
    job.run(12, EVERSTEP_TEST_LATER="1", LEAVE="8")
    assert job.restored() == [[6, "memory"], [6, "memory"]]
