"""Which images are verified before the restore, with real files."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.unit.trainer_sdk.checkpoint.restored_states import state
from tests.unit.trainer_sdk.checkpoint.saved_states import Place
from tests.waiting import until
from trainer_sdk.checkpoint.manifest import INDEX, ImageIndex, decode
from trainer_sdk.checkpoint.restore.choice import StateOffer
from trainer_sdk.checkpoint.restore.discovery import OFFER, EarlyVerification, see_images
from trainer_sdk.checkpoint.restore.errors import UnfitError
from trainer_sdk.checkpoint.restore.stored_image import StoredImage


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def steps(ahead: EarlyVerification) -> list[int]:
    ahead._thread.join()
    found = [one.identity.step for one in ahead._found]
    ahead.close()
    return found


def offer(place: Place, step: int) -> StateOffer:
    return next(one for one in see_images(place.home(0))[0].offers if one.identity.step == step)


def test_the_two_newest_are_checked(place: Place) -> None:
    for step in (10, 20, 30):
        place.keep(step, 0, state(step))
    assert steps(EarlyVerification(place.home(0))) == [30, 20]


def test_a_damaged_image_is_not_returned_and_the_next_one_is(place: Place) -> None:
    place.keep(10, 0, state(10))
    image = place.keep(20, 0, state(20)) / "image"
    image.write_bytes(bytes(len(image.read_bytes())))
    assert steps(EarlyVerification(place.home(0))) == [10]


def test_images_that_the_agent_fetches_are_verified_at_once(place: Place) -> None:
    place.keep(10, 0, state(10))
    ahead = EarlyVerification(place.home(0, agent_within_s=30))
    place.keep(20, 0, state(20), held=True)
    (place.images(0) / OFFER).write_text('{"round":2,"complete":true}')
    assert steps(ahead) == [20, 10]


def test_a_restore_without_images_does_not_wait_for_the_agent(place: Place) -> None:
    ahead = EarlyVerification(place.home(0, agent_within_s=1e6))
    ahead.close()
    assert not ahead._thread.is_alive()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator["Slow"]:
    found = Slow()
    plain = StoredImage.verify

    def verify(self: StoredImage, is_over: threading.Event | None = None) -> None:
        found.begun.set()
        found.may_end.wait(30)
        plain(self, is_over)

    monkeypatch.setattr(StoredImage, "verify", verify)
    yield found
    found.may_end.set()


class Slow:
    """Verifications that last until the test releases them."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()


def test_the_choice_waits_for_its_image_while_it_is_verified(place: Place, slow: Slow) -> None:
    place.keep(10, 0, state(10))
    place.keep(20, 0, state(20))
    ahead = EarlyVerification(place.home(0))
    slow.begun.wait(30)
    with ThreadPoolExecutor() as parallel:
        chosen = parallel.submit(ahead.image, offer(place, 20))
        until(lambda: ahead._news._waiters, "it is waited for")  # type: ignore[attr-defined]
        slow.may_end.set()
        image = chosen.result(30)
    assert image is not None
    image.close()
    ahead.close()


def test_the_choice_does_not_wait_for_other_images(place: Place, slow: Slow) -> None:
    place.keep(10, 0, state(10))
    place.keep(20, 0, state(20))
    ahead = EarlyVerification(place.home(0))
    slow.begun.wait(30)
    assert ahead.image(offer(place, 10)) is None
    slow.may_end.set()
    assert steps(ahead) == [], "nor is it checked to the end"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_early_verification_that_fails_does_not_block_the_restore(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(*_: object) -> None:
        raise RuntimeError("out of threads")

    monkeypatch.setattr(StoredImage, "verify", verify)
    place.keep(10, 0, state(10))
    ahead = EarlyVerification(place.home(0))
    ahead._thread.join()
    with ThreadPoolExecutor() as parallel:
        assert parallel.submit(ahead.image, offer(place, 10)).result(30) is None
    ahead.close()


def test_the_verification_ends_when_another_image_is_chosen(place: Place) -> None:
    folder = place.keep(10, 0, state(10))
    index = decode((folder / INDEX).read_bytes(), ImageIndex, "")
    image, is_over = StoredImage(str(folder), index.identity), threading.Event()
    image.verify(is_over)
    image.close()
    is_over.set()
    with pytest.raises(UnfitError, match="before it was verified"):
        image.verify(is_over)
