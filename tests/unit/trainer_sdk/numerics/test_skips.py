"""The acts of a job: recorded before anybody acts, and read by later rounds."""

from pathlib import Path

import pytest
from msgspec import structs

from tests.unit.trainer_sdk.checkpoint.saved_states import together
from trainer_sdk.checkpoint.image_folder import NUMERICS
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.storage import Storage, storage_for
from trainer_sdk.checkpoint.storage.checkpoints import stored_checkpoints
from trainer_sdk.checkpoint.storage.leftovers import leftovers
from trainer_sdk.numerics.rollback import record
from trainer_sdk.numerics.skips import ActsError, KeptResult, KeptStep, Skips

SKIP = record("c1", "skip", 10, "it is nan", before_step=8, samples=(70, 100))
BACK = record("c2", "rollback", 20, "spike", before_step=19, samples=(190, 200))


@pytest.fixture(params=["folder", "objects"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    is_folder = request.param == "folder"
    return storage_for(str(tmp_path) if is_folder else f"memory://{tmp_path.name}/root")


def alone(storage: Storage | None) -> Skips:
    return Skips(storage, RankGroup(None))


def test_an_act_is_recorded_once_and_read_by_the_next_round(storage: Storage) -> None:
    assert alone(storage).acts == ()
    first = alone(storage)
    assert (first.add(SKIP), first.add(SKIP), first.add(BACK)) == ("", "", "")
    assert first.spans == ((70, 100),)
    later = alone(storage)
    assert later.acts == first.acts == later.unfinished == (SKIP, BACK)
    later.quarantined()
    assert alone(storage).unfinished == ()
    assert alone(storage).spans == ((70, 100),)


def test_a_move_keeps_its_results_until_they_are_compared(storage: Storage) -> None:
    result = KeptResult(node="n", device="", inputs="i", loss=1, norm=None, hashes=(1, 1 << 62))
    kept = KeptStep(round=1, signal="nan", value=-1, moved_at=9, results=(result,))
    skips = alone(storage)
    assert skips.moved is None
    skips.add(move := structs.replace(record("c1", "move", 10, "nan"), kept=kept))
    assert (skips.add(BACK), skips.add(SKIP)) == ("", ""), "another act of the same case"
    later = alone(storage)
    assert later.moved == move
    later.quarantined()
    later.compared()
    last = alone(storage)
    assert (last.moved, last.unfinished) == (None, ())
    assert [act.action for act in last.acts] == ["move", "rollback", "skip"]


def test_all_ranks_know_what_rank_0_has_read(storage: Storage) -> None:
    alone(storage).add(SKIP)

    def of(group: RankGroup) -> tuple[object, ...]:
        skips = Skips(None if group.rank else storage, group)
        return skips.spans, skips.add(BACK), len(skips.acts)

    assert together(3, of) == [(((70, 100),), "", 2)] * 3
    assert alone(storage).acts == (SKIP, BACK)


def test_an_act_that_cannot_be_recorded_is_refused_on_all_ranks(tmp_path: Path) -> None:
    place = tmp_path / "root"

    def of(group: RankGroup) -> tuple[str, int]:
        skips = Skips(storage_for(str(place)), group)
        if not group.rank:
            place.write_text("")
        why = skips.add(SKIP)
        return why, len(skips.acts)

    [first, other] = together(2, of)
    assert first == other
    assert first[1] == 0
    assert f"{place}/{NUMERICS} cannot be written" in first[0]


@pytest.mark.parametrize(
    "octets", [b"", b"{}", b'{"acts":[],"hash":"0","version":1}', b"\xff", b'{"acts":[],"ha']
)
def test_a_damaged_file_is_one_error_on_all_ranks(storage: Storage, octets: bytes) -> None:
    storage.put(NUMERICS, (octets,))
    with pytest.raises(ActsError, match="is not what was written .*remove it to train on all data"):
        together(2, lambda group: Skips(storage, group))


def test_a_change_of_one_number_is_noticed(storage: Storage) -> None:
    alone(storage).add(SKIP)
    storage.put(NUMERICS, (storage.read(NUMERICS).replace(b"[70,100]", b"[70,900]"),))
    with pytest.raises(ActsError, match="its hash is another"):
        alone(storage)


def test_a_file_of_a_newer_release_is_named(storage: Storage) -> None:
    alone(storage).add(SKIP)
    storage.put(NUMERICS, (storage.read(NUMERICS).replace(b'"version":1', b'"version":2'),))
    with pytest.raises(ActsError, match="is of a newer release"):
        alone(storage)


def test_nothing_that_lists_checkpoints_trips_over_the_file(storage: Storage) -> None:
    alone(storage).add(SKIP)
    assert stored_checkpoints(storage) == []
    assert leftovers(storage, after_s=0.0) == []
    assert storage.folders() == []


def test_without_a_place_acts_last_as_long_as_the_process() -> None:
    skips = alone(None)
    assert skips.add(SKIP) == ""
    assert skips.spans == ((70, 100),)
