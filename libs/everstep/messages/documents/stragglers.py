"""The document of a job in `STRAGGLERS`: its slow ranks, and the switches of their detection."""

from everstep.messages.base import Count, DocumentBody, Name, Part, Time


class KnownStraggler(Part, frozen=True, kw_only=True):
    """A slow rank that was found, and not cleared yet."""

    finding: Name
    """The id of its `straggler_found`."""
    round: Count
    """The round."""
    rank: Count
    """The rank."""
    node: Name
    """Its node."""
    slot: Count
    """The node's slot."""
    found_at: Time
    """When it was found."""
    last_step: Count = 0
    """The end of the window in which it was found."""
    cause: Name
    """As in `straggler_found`."""
    reason: str
    """As in `straggler_found`."""
    lost_s: float = 0.0
    """What the job loses by it in a step."""
    slower_ratio: float = 0.0
    """How much longer it needs than the median of its role group: 0.1 for 10 %."""
    slowdown_ratio: float | None = None
    """How much faster the whole job would be without it: 0.12 for 12 %."""
    confidence: float | None = None
    """As in `straggler_found`."""
    lost_so_far_s: float = 0.0
    """What the job lost by it, up to `counted_step`: the sum over windows of what each cost."""
    counted_step: Count = 0
    """The last step that is counted in `lost_so_far_s`; 0 where an older release found it."""
    acted: tuple[str, ...] = ()
    """The decisions of the policy about it, as in `straggler_acted`: `stop`, `exclude`."""


class StragglersDocument(DocumentBody, frozen=True, kw_only=True, tag="stragglers_document.v1"):
    """Which ranks of a job are slow, and how agents measure; straggler writes it.

    Key: the job. Agents follow it for `is_on`, `window_steps` and `is_cpu_timed`.
    """

    job: Name
    """The job."""
    is_on: bool
    """Agents send timings."""
    window_steps: Count
    """Steps of one window: windows begin after multiples of this number."""
    is_cpu_timed: bool = True
    """The SDK measures the processor time of sections, too."""
    round: Count | None = None
    """The round that `found` is about."""
    found: tuple[KnownStraggler, ...] = ()
    """The slow ranks, by rank; at most 1,000."""
    shifted_step: Count = 0
    """The step of the latest `step_time_shifted` of the round; 0 for none."""
    reason: str = ""
    """Why it was written last."""
    outbox: tuple[str, ...] = ()
    """Facts that are decided and may not be recorded yet, as JSON."""
