"""The document of a job in `STRAGGLERS`: its slow ranks, and the switches of their detection."""

from everstep.messages.base import Count, DocumentBody, Name, Part, Time


class KnownStraggler(Part, frozen=True, kw_only=True):
    """A slow rank that was found, and not cleared yet."""

    finding: Name
    """The id of the `straggler_found`."""
    round: Count
    """The round."""
    rank: Count
    """The rank."""
    node: Name
    """The node of the rank."""
    slot: Count
    """The node's slot."""
    found_at: Time
    """When the rank was found to be slow."""
    last_step: Count = 0
    """The last step of the window in which it was found."""
    cause: Name
    """As in `straggler_found`."""
    reason: str
    """As in `straggler_found`."""
    lost_s: float = 0.0
    """How much time the job loses by the rank in a step."""
    slower_ratio: float = 0.0
    """How much longer the rank needs than the median of its role group: 0.1 for 10 %."""
    slowdown_ratio: float | None = None
    """How much faster the whole job would be without the rank's delay: 0.12 for 12 %."""
    confidence: float | None = None
    """As in `straggler_found`."""
    lost_so_far_s: float = 0.0
    """The time that the job lost by the rank, up to `counted_step`: the sum over the windows."""
    counted_step: Count = 0
    """The last step that is counted in `lost_so_far_s`; 0 where an older release found it."""
    acted: tuple[str, ...] = ()
    """The decisions of the policy about the rank, as in `straggler_acted`: `stop`, `exclude`."""


class StragglersDocument(DocumentBody, frozen=True, kw_only=True, tag="stragglers_document.v1"):
    """Which ranks of a job are slow, and how agents measure; straggler writes it.

    Key: the job. Agents follow it for `is_on`, `window_steps` and `is_cpu_timed`.
    """

    job: Name
    """The job."""
    is_on: bool
    """Agents send timings."""
    window_steps: Count
    """The number of steps of a window; windows begin after multiples of it."""
    is_cpu_timed: bool = True
    """The SDK measures the processor time of sections, too."""
    round: Count | None = None
    """The round that `found` is about."""
    found: tuple[KnownStraggler, ...] = ()
    """The slow ranks, by rank; at most 1,000."""
    shifted_step: Count = 0
    """The step of the latest `step_time_shifted` of the round; 0 for none."""
    reason: str = ""
    """Why the document was written last."""
    outbox: tuple[str, ...] = ()
    """Facts that are decided and may not be recorded yet, as JSON."""
