"""Which document each bucket of the bus holds."""

from dataclasses import dataclass

from everstep.messages.base import DocumentBody
from everstep.messages.documents.cases import CasesDocument
from everstep.messages.documents.checkpoints import CheckpointsDocument
from everstep.messages.documents.health import ControlDocument, LimitsDocument, NodesDocument
from everstep.messages.documents.rounds import RoundDocument
from everstep.messages.documents.stragglers import StragglersDocument


@dataclass(frozen=True, slots=True)
class BucketContents:
    """A bucket, what its keys are, and what each holds."""

    name: str
    key: str
    holds: type[DocumentBody]


BUCKETS = (
    BucketContents("ROUNDS", "<job>", RoundDocument),
    BucketContents("LIMITS", "<job>", LimitsDocument),
    BucketContents("STRAGGLERS", "<job>", StragglersDocument),
    BucketContents("CONTROL", "<job> or _cluster", ControlDocument),
    BucketContents("NODES", "_cluster", NodesDocument),
    BucketContents("CHECKPOINTS", "<job> or _cluster", CheckpointsDocument),
    BucketContents("CASES", "<job> or _cluster", CasesDocument),
)
"""Every bucket of documents on the bus."""
