"""Steps of a training without torch, said on the rank's page as the SDK will say them."""

import os
import time

from trainer_sdk import layout
from trainer_sdk.bootstrap.link import Link


class Steps:
    """Counts steps, from a first one on that may lie within the training."""

    def __init__(self, first: int = 0) -> None:
        self._link = Link(os.environ)
        self._link.words[layout.PHASE] = layout.PHASE_SCRIPT
        self._link.words[layout.COUNTED_BY] = layout.BY_SDK
        self._began = False
        self.made = first

    def made_one(self) -> None:
        self.made += 1
        self._link.words[layout.STEP] = self.made
        self._link.words[layout.PROGRESS_NS] = time.monotonic_ns()
        if not self._began:
            self._began = True
            self._link.first_step()
