"""A rank's newest image is checked while the training is still being built, not when it waits."""

import threading

from trainer_sdk.checkpoint.restore.choosing import Offer
from trainer_sdk.checkpoint.restore.errors import UnfitError
from trainer_sdk.checkpoint.restore.images import Image
from trainer_sdk.checkpoint.restore.looking import Home, see_images


class Ahead:
    """Begins at once, in a thread."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._found: dict[Offer, Image] = {}
        self._thread = threading.Thread(target=self._verify, name="verify", daemon=True)
        self._thread.start()

    def take(self) -> dict[Offer, Image]:
        """What was found to be good; from now on it is the caller's."""
        self._thread.join()
        found, self._found = self._found, {}
        return found

    def _verify(self) -> None:
        sight, _ = see_images(self._home)
        newest = max(
            sight.offers, key=lambda one: (one.identity.round, one.identity.step), default=None
        )
        if newest is None:
            return
        image = Image(newest.place, newest.identity)
        try:
            image.verify()
        except UnfitError:
            image.close()  # whoever restores finds it again, and says so
        else:
            self._found[newest] = image
