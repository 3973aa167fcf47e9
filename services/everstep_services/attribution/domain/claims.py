"""What an analyzer says about an incident: one cause, about whom, how strongly, from what."""

from typing import Literal, get_args

import msgspec

from everstep.messages import BlobRef
from everstep.verdict_causes import VERDICT_CAUSES, VerdictCause

Role = Literal["root", "place", "consequence"]
"""`root` names a cause. `place` names the ranks where it is, and leaves open why. `consequence`
names ranks that failed because of others: these are not culprits."""

MOST_SAID = 600
GENERAL = "python_exception"
"""The kind of a claim that knows only that an exception ended the script."""
NODE_LOST = "node_lost"
SUSPECTED = "suspected"
"""The kind of health's claims that a node has failed often: they are of other times."""
WARDEN_ENDED = "warden_ended"
"""The parent of all ranks of a node is gone, and they ended with it: no rank is a culprit."""
WITHOUT_CULPRIT = frozenset({"size_mismatch", "wrong_size"})
"""Kinds of claims that name no rank: a rank was sent more than it expects, and either it or its
peer may be the one that differs from all others.
"""


_TELL_LITTLE = ("error:", "signal:", "unknown:", "hang:", "scheduler:", "network:")
"""Exit codes, signals and places: unrelated failures have them in common."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One statement of one analyzer."""

    cause: VerdictCause
    kind: str
    """Finer than the cause: `python_exception`, `never_joined`."""
    says: str
    """The claim in words for people, with ranks and numbers."""
    strength: float
    """0 to 1: how often such a claim is right, as the analyzer estimates."""
    role: Role = "root"
    is_against: bool = False
    """It speaks against this cause, for these ranks and nodes."""
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    """Nodes that the evidence accuses: never merely the nodes that the ranks run on."""
    is_transient: bool | None = None
    """Whether the same run may succeed next time; None if unknown."""
    fingerprint: str = ""
    """The name of the failure, without its numbers and paths."""
    fact: str | None = None
    """The fact that it comes from."""
    blob: BlobRef | None = None
    """The blob that it comes from."""
    analyzer: str = ""
    """The analyzer that made the claim; set by the examiner."""


def cause_of(text: str) -> VerdictCause:
    """The cause class with this name, in any spelling; `unknown` for any other word."""
    name = text.strip().lower().replace(" ", "_").replace("-", "_")
    return next((cause for cause in VERDICT_CAUSES if cause == name), "unknown")


def fingerprint_in(job: str, name: str) -> str:
    """The name of a failure that tells little: it is the same failure in the same job only."""
    is_own = name.startswith("observed:") or (":" in name and not name.startswith(_TELL_LITTLE))
    return name if is_own else f"{name}@{job}"


def is_sound(claim: Claim) -> bool:
    """Whether its values can be weighed: an analyzer may be a plug-in by anybody."""
    return (
        claim.cause in VERDICT_CAUSES
        and 0.0 <= claim.strength <= 1.0
        and claim.role in get_args(Role)
        and all(type(rank) is int and 0 <= rank < 2**53 for rank in claim.ranks)
        and all(type(node) is str for node in claim.nodes)
    )
