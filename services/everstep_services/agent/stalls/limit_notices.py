"""Tells people which limits are in force, and where the wrong one would end a wait first."""

from dataclasses import replace
from typing import Protocol

from everstep_services.agent.stalls.limits import Limits
from everstep_services.agent.stalls.limits_table import Others, misorders, table

_SAID_ONCE = "how long a rank may go without progress; what is learned takes the place of defaults"


class Say(Protocol):
    """Puts a line before people."""

    def __call__(self, text: str, *, is_warning: bool = False) -> None: ...


class Announcer:
    """One agent's: the table once, and each pair of limits in the wrong order once."""

    def __init__(self, limits: Limits, others: Others, say: Say) -> None:
        self.speaks = False
        """One node of a job speaks for all."""
        self._limits = limits
        self._others = others
        self._say = say
        self._has_shown = False
        self._said: set[str] = set()

    def show(self) -> None:
        """Ranks are being started."""
        if self.speaks and not self._has_shown:
            self._has_shown = True
            self._say(_SAID_ONCE)
            for line in table(self._limits, self._others):
                self._say(line)
        self.compare()

    def group_waits(self, timeout_s: float) -> None:
        """A rank has shown how long its process group waits; 0 if it has none."""
        if timeout_s:
            self._others = replace(self._others, group_timeout_s=timeout_s)
            self.compare()

    def compare(self) -> None:
        """A limit may have changed."""
        if not self.speaks:
            return
        for found in misorders(self._limits, self._others):
            if found.about not in self._said:
                self._said.add(found.about)
                self._say(found.text, is_warning=found.is_warning)
