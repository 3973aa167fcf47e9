"""A rank's images are checked while the training is still being built, not when it waits."""

import threading

from trainer_sdk.checkpoint.restore.choosing import Offer
from trainer_sdk.checkpoint.restore.errors import UnfitError
from trainer_sdk.checkpoint.restore.images import Image
from trainer_sdk.checkpoint.restore.looking import Home, see_images, wait_for_agent

_MOST = 2
"""The newest may not have reached the other nodes: then all go back to the one before."""


class Ahead:
    """Begins as soon as the agent has fetched what it can, in a thread."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._found: dict[Offer, Image] = {}
        self._is_taken = threading.Event()
        self._thread = threading.Thread(target=self._verify, name="verify", daemon=True)
        self._thread.start()

    def take(self) -> dict[Offer, Image]:
        """What was found to be good, and the newest if it is being checked; nothing follows."""
        self._is_taken.set()
        self._thread.join()
        found, self._found = self._found, {}
        return found

    def _verify(self) -> None:
        wait_for_agent(self._home, self._is_taken)
        sight, _ = see_images(self._home)
        newest = sorted(sight.offers, key=lambda one: one.identity.age, reverse=True)
        for offer in newest[:_MOST]:
            if self._is_taken.is_set():
                return
            image = Image(offer.place, offer.identity)
            try:
                image.verify(None if offer is newest[0] else self._is_taken)
            except UnfitError:
                image.close()  # whoever restores finds it again, and says so
            else:
                self._found[offer] = image
