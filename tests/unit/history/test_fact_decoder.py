"""What history takes from the stream, and what it refuses with a reason."""

import pytest

from everstep.messages import BlobRef
from everstep_services.history.fact_decoder import decode_batch
from tests.unit.history.facts import delivered, make


@pytest.mark.parametrize("node", ["' OR 1=1", "a.b", "n\x00", "n" * 129])
def test_a_fact_that_names_a_node_as_none_can_be_called_is_refused(node: str) -> None:
    """No command could exclude or forgive such a row, which somebody else's job has made."""
    batch = decode_batch([delivered(make("node_left", node=node), 1)])
    assert not batch.facts
    ((_, why),) = batch.refused
    assert "it names a node " in why


def test_any_other_fact_is_taken() -> None:
    assert len(decode_batch([delivered(make("node_left", node="node-1"), 1)]).facts) == 1


def test_a_blob_of_another_job_is_refused() -> None:
    """A13.1: REST would give it to everybody who may read the job that named it."""
    blob = BlobRef(job="theirs", id="b" * 32, size_bytes=1, parts=1)
    batch = decode_batch([delivered(make("evidence_collected", blob=blob), 1)])
    assert not batch.facts
    assert "its blob is of another job, 'theirs'" in batch.refused[0][1]


@pytest.mark.parametrize("name", ["../../../x", "", "a b", "n" * 129])
def test_a_fact_needs_an_id_that_can_be_a_part_of_a_path(name: str) -> None:
    batch = decode_batch([delivered(make("node_left", id=name, node="node-1"), 1)])
    assert not batch.facts
    assert "its id " in batch.refused[0][1]
