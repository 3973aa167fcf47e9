"""Which document each bucket of the bus holds."""

from dataclasses import dataclass

from everstep.messages.base import DocumentBody
from everstep.messages.documents.cases import CasesDocument
from everstep.messages.documents.checkpoints import CheckpointsDocument
from everstep.messages.documents.health import ControlDocument, LimitsDocument, NodesDocument
from everstep.messages.documents.rounds import RoundDocument
from everstep.messages.documents.stragglers import StragglersDocument


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket, what its keys are, and what each holds."""

    name: str
    key: str
    holds: type[DocumentBody]


BUCKETS = (
    Bucket("ROUNDS", "<job>", RoundDocument),
    Bucket("LIMITS", "<job>", LimitsDocument),
    Bucket("STRAGGLERS", "<job>", StragglersDocument),
    Bucket("CONTROL", "<job> or _cluster", ControlDocument),
    Bucket("NODES", "_cluster", NodesDocument),
    Bucket("CHECKPOINTS", "<job> or _cluster", CheckpointsDocument),
    Bucket("CASES", "<job> or _cluster", CasesDocument),
)
"""Every bucket of documents on the bus."""
