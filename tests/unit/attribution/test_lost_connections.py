"""What the ends of ranks say that have lost a connection to each other."""

from msgspec.structs import replace

from everstep.messages import RankEnd
from tests.unit.attribution.cases import PEER, case, end, lost_peer, raised
from tests.unit.attribution.test_ends import judged


async def test_ranks_that_all_lost_each_other_had_no_network() -> None:
    """None of them had ended before: nobody is the root."""
    found = await judged(case(ends=tuple(map(lost_peer, range(4)))))
    assert (found.cause, found.ranks, found.nodes) == ("network", (), ())
    assert (await judged(case(ends=tuple(map(lost_peer, range(3)))))).is_inconclusive


def aborted(rank: int, first_error: str) -> RankEnd:
    return end(rank, how="signal", exit_code=None, signal="SIGABRT", first_error=first_error)


async def test_a_rank_that_aborted_explains_why_the_others_lost_it() -> None:
    """A4.5: an abort is a consequence only where something else explains the others' ends."""
    native = aborted(2, "Fatal Python error: Aborted")
    found = await judged(case(ends=(native, *map(lost_peer, (0, 1, 3)))))
    assert (found.cause, found.kind, found.ranks) == ("framework", "aborted", (2,))
    root = raised(3, "ValueError", "batch 17 has no labels")
    found = await judged(case(ends=(native, lost_peer(0), lost_peer(1), root)))
    assert (found.cause, found.ranks) == ("user_code", (3,))


async def test_an_abort_by_gloo_may_be_about_sizes_and_names_no_rank() -> None:
    """A7.2: it aborts the one that is sent too much, whichever of them has the wrong size."""
    misfit = aborted(1, "terminate called after throwing an instance of 'gloo::EnforceNotMet'")
    found = await judged(case(ends=(lost_peer(0), misfit)))
    assert found.is_inconclusive, "a connection that broke ends in the same words"
    assert [(it.cause, it.ranks) for it in found.others] == [("user_code", ())]


REFUSES = "terminate called after throwing an instance of 'gloo::EnforceNotMet'; what(): "
ACCEPT = "[enforce fail at gloo/transport/tcp/listener.cc:63] false. accept: Invalid argument"
SIZES = "[enforce fail at gloo/transport/tcp/pair.cc:1] op.preamble.length <= op.nbytes. 40 vs 4"


async def test_the_text_of_gloo_s_error_tells_a_broken_socket_from_sizes_that_differ() -> None:
    """A4.5: connections that break while the rank goes on are the network's."""
    others = tuple(map(lost_peer, (0, 1, 3)))
    broken = await judged(case(ends=(aborted(2, REFUSES + ACCEPT), *others)))
    assert (broken.cause, broken.kind, broken.ranks) == ("network", "network", (2,))
    assert not broken.nodes, "a socket that its own script closes looks like this, too"
    sizes = await judged(case(ends=(aborted(2, REFUSES + SIZES), *others)))
    assert (sizes.cause, sizes.kind, sizes.ranks) == ("user_code", "size_mismatch", ())


async def test_an_abort_by_gloo_because_a_peer_is_gone_is_a_consequence() -> None:
    """A4.5: the killed rank is the cause, whichever way its peers end."""
    killed = end(3, how="signal", exit_code=None, signal="SIGKILL")
    found = await judged(case(ends=(aborted(2, REFUSES + PEER), lost_peer(0), killed)))
    assert (found.kind, found.ranks) == ("killed", (3,))
    assert not found.others


async def test_ranks_that_all_waited_too_long_have_lost_no_connection() -> None:
    """A watchdog says that it waited, and nothing of whom."""
    text = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 600 s"
    ends = tuple(raised(rank, "torch.distributed.DistBackendError", text) for rank in range(4))
    assert (await judged(case(ends=ends))).is_inconclusive


async def test_a_connection_of_the_script_that_broke_is_its_own_failure() -> None:
    """A7.2: no other rank has ended, and torch reports lost ranks in other words."""
    broken = raised(1, "ConnectionResetError", "[Errno 104] Connection reset by peer")
    found = await judged(case(ends=(broken,)))
    assert (found.cause, found.ranks, found.is_inconclusive) == ("user_code", (1,), False)
    assert "ConnectionResetError" in found.reason
    of_torch = replace(broken, traceback='File "/x/torch/distributed/rendezvous.py", line 1')
    assert (await judged(case(ends=(of_torch,)))).ranks == ()
    root = raised(3, "ValueError", "batch 17 has no labels")
    assert (await judged(case(ends=(broken, root)))).ranks == (3,)


async def test_a_rank_that_lost_a_process_of_its_own_has_lost_no_rank() -> None:
    """A7.2: a data loader's worker was killed; the rank that waits for all others is healthy."""
    broken = raised(2, "ConnectionResetError", "[Errno 104] Connection reset by peer")
    broken = replace(broken, traceback='File "/x/multiprocessing/connection.py", line 395')
    found = await judged(case(ends=(broken, lost_peer(1), lost_peer(3))))
    assert (found.cause, found.ranks) == ("user_code", (2,))
