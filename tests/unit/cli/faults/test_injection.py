"""Faults on their way to their agents: the effects of earlier ones on the job are expected."""

from pathlib import Path

import msgspec
import pytest

from everstep.bus.topology import ROUNDS
from everstep.messages import encode
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.faults.injection import FaultInjection
from everstep_services.cli.faults.scenario import FaultPlace, planned
from everstep_services.cli.invocation import Invocation
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.unit.rendezvous.documents import round_document


@pytest.mark.parametrize("stage", ["", "gone"])
async def test_a_node_that_an_earlier_fault_has_taken_is_named(tmp_path: Path, stage: str) -> None:
    whole = round_document("llama", seats=2, name_characters=20)
    first, second = whole.seats
    left = (first, msgspec.structs.replace(second, stage=stage)) if stage else (first,)
    bus = MemoryBus(MemoryServer())
    now = msgspec.structs.replace(whole, seats=left)
    await bus.documents(ROUNDS).put("llama", encode(now), revision=None)
    fault = planned({"fault": "cut_off", "node": second.node})
    ordering = FaultInjection(Invocation(environ={}), "llama", seed=1)
    with pytest.raises(CliError) as caught:
        await ordering._one(bus, fault, FaultPlace(None, second.node))
    assert caught.value.code is Exit.NOT_FOUND
    assert str(caught.value).startswith(
        f"llama no longer runs on {second.node}: round 3 runs on {first.node}."
    )
