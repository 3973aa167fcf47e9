"""Numeric faults in real ranks of a script without the SDK, on DDP and FSDP2."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from everstep_services.agent.injection.service import RankChannel
from tests.integration.scripts.rig import Node, opened
from tests.waiting import until_async
from trainer_sdk.inject.catalog import BadFaultError, fault_request

pytestmark = pytest.mark.timeout(180)
RANKS = 2
SCRIPT = str(Path(__file__).with_name("computing.py"))


@pytest_asyncio.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with opened(tmp_path, SCRIPT, warm=True) as node:
        yield node


def digests(node: Node, rank: int) -> list[str]:
    """What each step has left in this rank."""
    out = node.folder / f"{node.round}-{rank}.out"
    lines = out.read_text().splitlines() if out.exists() else []
    return [line.split()[1] for line in lines if len(line.split()) == 2]


async def trained(node: Node, *faults: str, is_sharded: bool) -> list[list[str]]:
    plan = ";".join(f"{fault},round={node.round + 1}" for fault in faults)
    await node.start(
        RANKS, warm=True, EVERSTEP_INJECTION="1", EVERSTEP_INJECT=plan, STEPS="6",
        SHARDED=str(int(is_sharded)),
    )  # fmt: skip
    gone = await node.gone(RANKS)
    errors = [(node.folder / f"{node.round}-{rank}.err").read_text() for rank in range(RANKS)]
    assert [gone[rank].code for rank in range(RANKS)] == [0] * RANKS, errors
    return [digests(node, rank) for rank in range(RANKS)]


async def test_gradients_are_harmed_before_and_after_their_reduction(node: Node) -> None:
    healthy = await trained(node, is_sharded=False)
    assert healthy[0] == healthy[1]
    harmed = await trained(
        node,
        "flip_gradient@2:rank=1,target=2.weight",
        "flip_reduced_gradient@4:rank=1,amount=3",
        is_sharded=False,
    )
    assert harmed[0][:2] == healthy[0][:2]
    assert harmed[0][2] != healthy[0][2], "in step 3 all ranks learn a wrong gradient"
    same = [mine == others for mine, others in zip(*harmed, strict=True)]
    assert same == [True, True, True, True, False, False]


async def test_shards_are_harmed(node: Node) -> None:
    healthy = await trained(node, is_sharded=True)
    for fault in ("flip_gradient", "flip_parameter"):
        harmed = await trained(node, f"{fault}@2:rank=1", is_sharded=True)
        for rank in range(RANKS):
            assert harmed[rank][:2] == healthy[rank][:2], fault
        assert harmed != healthy, fault


async def test_a_running_rank_is_harmed_and_its_replica_is_not(node: Node) -> None:
    await node.start(RANKS, warm=True, EVERSTEP_INJECTION="1", SHARDED="0", STEPS="0")
    await until_async(lambda: len(digests(node, 1)) > 2, "the ranks compute")
    async with RankChannel.opened(node.rank_folder(1), 1) as door:
        with pytest.raises(BadFaultError, match="cannot last for 0 s"):
            await door.knock(fault_request("flip_parameter", for_s=0))
    async with RankChannel.opened(node.rank_folder(1), 1) as door:
        await door.knock(fault_request("flip_parameter", target="2.bias:3", amount=4))
        await door.go()

    def differ() -> bool:
        return any(mine != his for mine, his in zip(digests(node, 0), digests(node, 1)))  # noqa: B905

    await until_async(differ, "the replicas differ")
    assert "flip_parameter of 2.bias" in (node.folder / f"{node.round}-1.err").read_text()
