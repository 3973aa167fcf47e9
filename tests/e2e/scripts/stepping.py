"""Steps of a training without torch, said on a rank's page as the SDK or an optimizer does."""

import os
import time

from trainer_sdk import layout, session
from trainer_sdk.bootstrap.agent_link import AgentLink


class Steps:
    """Counts steps, from a first one on that may lie within the training."""

    def __init__(self, first: int = 0) -> None:
        self._run = session()
        self._run.start_at(first)

    @property
    def made(self) -> int:
        return self._run.steps_made

    def made_one(self) -> None:
        self._run.step()


class OptimizerSteps:
    """The same of a script that does not know the SDK."""

    def __init__(self, first: int = 0) -> None:
        self._link = AgentLink(os.environ)
        self._link.words[layout.PHASE] = layout.PHASE_SCRIPT
        self._link.words[layout.COUNTED_BY] = layout.BY_OPTIMIZER
        self.made = first

    def made_one(self) -> None:
        self.made += 1
        words = self._link.words
        words[layout.STEP] = self.made
        words[layout.STEPS] += 1
        words[layout.PROGRESS_NS] = time.monotonic_ns()
        if words[layout.STEPS] == 1:
            self._link.first_step()
