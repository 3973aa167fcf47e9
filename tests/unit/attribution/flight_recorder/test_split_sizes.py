"""Which rank gave all_to_all other sizes, by what the ranks wrote down that lost it."""

import json
from collections.abc import Sequence

import pytest

from everstep.evidence.archive import ArchiveMember, pack
from everstep_services.attribution.flight_recorder.split_sizes import odd_split, split_calls
from tests.unit.attribution.cases import case, end, lost_peer
from tests.unit.attribution.evidence import judged

GROUP = (4, 5, 6, 7)
EVEN, ODD = (4, 4, 4, 4), (3, 3, 3, 7)


def dump(
    sends: Sequence[int], receives: Sequence[int] | None = None, number: int = 9,
    ranks: Sequence[int] = GROUP,
) -> bytes:  # fmt: skip
    sizes = {"ranks": ranks, "sends": sends, "receives": receives or sends}
    entries = [
        {"record_id": 1, "collective_seq_id": number - 1, "profiling_name": "gloo:all_to_all"},
        {"record_id": 3, "collective_seq_id": number, "profiling_name": "gloo:all_to_all"},
        {"record_id": 5, "collective_seq_id": 40, "profiling_name": "gloo:all_reduce"},
    ]
    return json.dumps({"entries": entries, "all_to_all": sizes}).encode()


@pytest.mark.parametrize(
    ("dumps", "refused", "rank"),
    [
        # the last rank was sent more than it expects, and is gone
        ({4: dump(EVEN), 5: dump(ODD), 6: dump(EVEN)}, 7, 5),
        ({4: dump(EVEN), 5: dump(EVEN), 6: dump(EVEN)}, 7, 7),
        ({4: dump(EVEN), 5: dump(ODD), 6: dump(EVEN)}, None, 5),
        # two ranks differ from each other: either may be wrong
        ({4: dump(EVEN), 5: dump(ODD)}, 7, None),
        ({4: dump(EVEN), 5: dump((4, 4, 5, 3), EVEN), 6: dump(EVEN)}, 7, None),
        # all that is known fits, and more than one rank is unknown
        ({4: dump(EVEN), 5: dump(EVEN)}, 7, None),
        ({4: dump(EVEN), 5: dump(EVEN), 6: dump(EVEN)}, None, None),
        ({4: dump(EVEN), 5: dump(EVEN), 6: dump(EVEN)}, 3, None),
        # a rank in another call has other sizes for a reason
        ({4: dump(EVEN), 5: dump(ODD, number=8), 6: dump(EVEN)}, None, None),
        # sizes may differ between pairs, as long as both sides agree
        ({4: dump((1, 2, 3, 4), (1, 5, 6, 7)), 5: dump((5, 1, 2, 3), (2, 1, 8, 9)),
          6: dump((6, 8, 1, 1), (3, 2, 1, 1))}, 7, 7),
        ({0: dump((1, 1), ranks=(0, 1)), 1: dump((2, 2), ranks=(0, 1))}, None, None),
        ({4: dump((4, 4)), 5: b"{", 6: b"", 7: b'{"entries": []}'}, 7, None),
    ],
)  # fmt: skip
def test_the_rank_that_fits_nobody(
    dumps: dict[int, bytes], refused: int | None, rank: int | None
) -> None:
    found = odd_split(split_calls(dumps), {} if refused is None else {refused: (b"28", b"16")})
    assert (found and found[0]) == rank


@pytest.mark.parametrize(
    ("sent", "expects", "rank"),
    [
        (b"16", b"12", 7),  # 4 floats, as others send, and it expects 3
        (b"28", b"16", None),  # another one sent 7, and it expects what the others send
        (b"16", b"8", None),  # 4 of 4 bytes or of 2
        (None, None, None),
    ],
)
def test_two_that_fit_tell_what_a_third_one_should_expect(
    sent: bytes | None, expects: bytes | None, rank: int | None
) -> None:
    calls = split_calls({4: dump(EVEN), 5: dump(EVEN)})
    found = odd_split(calls, {7: (sent, expects)})  # type: ignore[dict-item]  # a bare message
    assert (found and found[0]) == rank


def test_the_words() -> None:
    found = odd_split(split_calls({4: dump(EVEN), 5: dump(ODD), 6: dump(EVEN)}), {})
    assert found is not None
    assert found[1] == (
        "it sends 3 to rank 4, which expects 4, and expects 3 of it, which sends 4; what the "
        "others send and expect fits"
    )


async def test_the_verdict_names_it() -> None:
    text = "op.preamble.length <= op.nbytes. 28 vs 16. Received data size doesn't match"
    lost = tuple(lost_peer(rank) for rank in (4, 5, 6))
    aborted = end(7, how="signal", signal="SIGABRT", first_error=f"what(): {text}")
    sizes = {4: EVEN, 5: ODD, 6: EVEN}
    dumps = [ArchiveMember(rank, "json", dump(of_rank)) for rank, of_rank in sizes.items()]
    of = case(nodes=2, ranks=4, ends=(aborted, *lost))
    found = await judged(of, {"flight_recorder": pack(dumps, {})})
    assert (found.cause, found.ranks, found.nodes) == ("user_code", (5,), ())
    assert "rank 5 gave all_to_all other sizes than the ranks of its group" in found.reason
    assert (await judged(of, {"flight_recorder": pack(dumps[:1], {})})).ranks == ()


@pytest.mark.parametrize("kind", ["flight_recorder", "split_sizes"])
async def test_sizes_that_were_read_once_the_ranks_had_stopped(kind: str) -> None:
    """Recorders of 64 ranks do not answer in the time of a crash."""
    text = "op.preamble.length <= op.nbytes. 16 vs 12. Received data size doesn't match"
    aborted = end(7, how="signal", signal="SIGABRT", first_error=f"what(): {text}")
    dumps = [ArchiveMember(rank, "json", dump(EVEN)) for rank in (4, 5)]
    of = case(nodes=2, ranks=4, ends=(aborted, lost_peer(4), lost_peer(5)))
    found = await judged(of, {kind: pack(dumps, {})})
    assert (found.cause, found.ranks) == ("user_code", (7,))


async def test_two_that_refuse_tell_the_rank_without_any_recorder() -> None:
    text = "what(): op.preamble.length <= op.nbytes. {}. Received data size doesn't match"
    ends = [
        end(rank, how="signal", signal="SIGABRT", first_error=text.format(sizes))
        for rank, sizes in ((5, "16 vs 12"), (7, "28 vs 16"))
    ]
    found = await judged(case(nodes=2, ranks=4, ends=tuple(ends)), {})
    assert (found.cause, found.ranks) == ("user_code", (5,))
