"""Which images are checked before anybody restores, by real files."""

import threading
from pathlib import Path

import pytest

from tests.unit.restored_states import state
from tests.unit.saved_states import Place
from trainer_sdk.checkpoint.manifest import INDEX, ImageIndex, decode
from trainer_sdk.checkpoint.restore.ahead import Ahead
from trainer_sdk.checkpoint.restore.errors import UnfitError
from trainer_sdk.checkpoint.restore.images import Image
from trainer_sdk.checkpoint.restore.looking import OFFER


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def steps(ahead: Ahead) -> list[int]:
    ahead._thread.join()
    found = ahead.take()
    for image in found.values():
        image.close()
    return [one.identity.step for one in found]


def test_the_two_newest_are_checked(place: Place) -> None:
    for step in (10, 20, 30):
        place.keep(step, 0, state(step))
    assert steps(Ahead(place.home(0))) == [30, 20]


def test_what_is_not_what_was_saved_is_not_given_and_the_next_one_is(place: Place) -> None:
    place.keep(10, 0, state(10))
    image = place.keep(20, 0, state(20)) / "image"
    image.write_bytes(bytes(len(image.read_bytes())))
    assert steps(Ahead(place.home(0))) == [10]


def test_what_the_agent_fetches_meanwhile_is_checked_as_soon_as_it_is_there(place: Place) -> None:
    place.keep(10, 0, state(10))
    ahead = Ahead(place.home(0, agent_within_s=30))
    place.keep(20, 0, state(20), held=True)
    (place.images(0) / OFFER).write_text('{"round":2,"complete":true}')
    assert steps(ahead) == [20, 10]


def test_who_takes_before_the_agent_has_fetched_does_not_wait_for_it_here(place: Place) -> None:
    place.keep(10, 0, state(10))
    assert Ahead(place.home(0, agent_within_s=1e6)).take() == {}


def test_an_image_that_nobody_waits_for_is_left(place: Place) -> None:
    folder = place.keep(10, 0, state(10))
    index = decode((folder / INDEX).read_bytes(), ImageIndex, "")
    image, is_over = Image(str(folder), index.identity), threading.Event()
    image.verify(is_over)
    image.close()
    is_over.set()
    with pytest.raises(UnfitError, match="nobody"):
        image.verify(is_over)
