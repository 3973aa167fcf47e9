"""What history takes from the stream, and what it refuses with a reason."""

import pytest

from everstep_services.history.reading import read
from tests.unit.history_facts import delivered, make


@pytest.mark.parametrize("node", ["' OR 1=1", "a.b", "n\x00", "n" * 129])
def test_a_fact_that_names_a_node_as_none_can_be_called_is_refused(node: str) -> None:
    """No command could exclude or forgive such a row, which somebody else's job has made."""
    batch = read([delivered(make("node_left", node=node), 1)])
    assert not batch.facts
    ((_, why),) = batch.refused
    assert "it names a node " in why


def test_any_other_fact_is_taken() -> None:
    assert len(read([delivered(make("node_left", node="node-1"), 1)]).facts) == 1
