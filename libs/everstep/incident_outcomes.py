"""How an incident can end: the one list of outcomes, for senders and for people who filter.

The words are those of `incident_closed.outcome`, which stay open on the wire.
"""

from typing import Literal, get_args

IncidentOutcome = Literal["recovered", "stopped", "failed", "preempted", "merged"]
"""`merged` into another incident; each other word is the fate of the training."""

IncidentFate = Literal["recovered", "repeated", "stopped", "failed", "preempted", "merged"]
"""As people read it: `repeated` is a recovery after which the same failure ended the next round,
and a verdict says that it will come again."""

INCIDENT_FATES: tuple[IncidentFate, ...] = get_args(IncidentFate)
