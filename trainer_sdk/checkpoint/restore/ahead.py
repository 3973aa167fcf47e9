"""A rank's images are checked while the training is still being built, or waits for other ranks."""

import threading

from trainer_sdk.checkpoint.restore.choice import Offer
from trainer_sdk.checkpoint.restore.discovery import Home, see_images, wait_for_agent
from trainer_sdk.checkpoint.restore.errors import UnfitError
from trainer_sdk.checkpoint.restore.image import Image

_MOST = 2
"""The newest may not have reached the other nodes: then all go back to the one before."""


class Ahead:
    """From when the agent has fetched what it can until the choice is made, in a thread."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._found: dict[Offer, Image] = {}
        self._checking: Offer | None = None
        self._news = threading.Condition()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._verify, name="verify", daemon=True)
        self._thread.start()

    def image(self, offer: Offer) -> Image | None:
        """The one that was chosen, if it was found to be good; from now on it is the caller's.

        If it is just being checked, that is waited for; nothing else is checked any more.
        """
        with self._news:
            if self._checking != offer:
                self._is_over.set()
            self._news.wait_for(lambda: self._checking != offer)
            self._is_over.set()
            return self._found.pop(offer, None)

    def close(self) -> None:
        """Let go of what nobody has taken."""
        self._is_over.set()
        self._thread.join()
        for image in self._found.values():
            image.close()
        self._found.clear()

    def _verify(self) -> None:
        wait_for_agent(self._home, self._is_over)
        sight, _ = see_images(self._home)
        newest = sorted(sight.offers, key=lambda one: one.identity.age, reverse=True)
        for offer in newest[:_MOST]:
            with self._news:
                if self._is_over.is_set():
                    return
                self._checking = offer
            try:
                self._check(offer)
            finally:  # whatever it is, whoever restores waits for it
                with self._news:
                    self._checking = None
                    self._news.notify_all()

    def _check(self, offer: Offer) -> None:
        image = Image(offer.place, offer.identity)
        try:
            image.verify(self._is_over)
        except UnfitError:
            image.close()  # whoever restores finds it again, and says so
        else:
            self._found[offer] = image
