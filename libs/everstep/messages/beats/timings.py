"""Where the time of a node's ranks went, window by window, and when they entered collectives."""

from everstep.messages.base import Count, Int, Message, Name, Part
from everstep.messages.beats.sketch import Sketch


class SectionTiming(Part, frozen=True, kw_only=True):
    """How long one section took on one rank, over one window."""

    section: str
    """The section's name; empty for the whole step."""
    wall: Sketch
    """From entry to exit. Waiting for other ranks included, so it cannot name a slow one."""
    cpu: Sketch | None = None
    """Processor time of the thread that ran it, where that is measured."""
    device: Sketch | None = None
    """Time on the accelerator by its events, where that is measured."""


class CollectiveEntries(Part, frozen=True, kw_only=True):
    """When one rank entered some collectives of one process group, one after the other.

    A sample: the latest of the window. Instants are microseconds after the `entries_from_s` of
    the rank, by the clock of its node.
    """

    group: str
    """The process group's name, as torch numbers or describes it."""
    first_sequence: Int
    """The number of the first one within its group; those that follow have the numbers that
    follow."""
    entered_us: tuple[Int, ...]
    """When each was entered."""
    ops: tuple[str, ...] = ()
    """The operations among them, each once, with the size of their input: `all_reduce 4096`."""
    op: tuple[Int, ...] = ()
    """Which of `ops` each one is."""
    section: tuple[Int, ...] = ()
    """The innermost section that each was entered in, as an index into the rank's `sections`;
    -1 for none. Empty where no sections are known."""
    lasted_us: tuple[Int, ...] = ()
    """How long each ran on the device, waiting for others included: -1 while that is not known,
    empty where it is not recorded."""
    members: tuple[Count, ...] = ()
    """The ranks of the group, where the recorder says; empty where it does not."""
    are_transfers: bool = False
    """These are sends to, and receives from, single ranks of the group. Their numbers are the
    rank's own: they tell nothing of whose send is whose receive."""


class HostUse(Part, frozen=True, kw_only=True):
    """What the operating system says of one rank's process, over one window.

    None where it does not say.
    """

    cpu_s: float | None = None
    """Processor time of all of its threads."""
    main_cpu_s: float | None = None
    """Processor time of its main thread."""
    runnable_s: float | None = None
    """How long its main thread was ready to run, and waited for a processor."""
    involuntary_switches: Int | None = None
    """How often a thread of its was taken off its processor."""
    major_faults: Int | None = None
    """How often it waited for memory from a disk."""
    cpu_pressure_s: float | None = None
    """How long some task of its cgroup waited for a processor."""
    memory_pressure_s: float | None = None
    """How long some task of its cgroup waited for memory."""
    io_pressure_s: float | None = None
    """How long some task of its cgroup waited for a disk."""
    throttled_s: float | None = None
    """How long its cgroup was kept from its processors by its quota."""
    workers: Int | None = None
    """How many processes it has started, such as data workers."""
    workers_cpu_s: float | None = None
    """Their processor time."""
    retransmits: Int | None = None
    """Segments that its connections sent again."""
    round_trip_s: float | None = None
    """The median of the smoothed round trips of those of its connections that sent the most in the
    window; a connection that only receives measures none."""
    unsent_bytes: Int | None = None
    """What waited in its connections to be sent, when the window ended."""


class DeviceUse(Part, frozen=True, kw_only=True):
    """What the driver says of one rank's accelerator at the end of a window."""

    clock_mhz: Int | None = None
    """The clock of its processors."""
    clock_most_mhz: Int | None = None
    """The highest that it can have."""
    power_watts: float | None = None
    """What it draws."""
    temperature_celsius: float | None = None
    """How hot it is."""
    throttled_by: tuple[str, ...] = ()
    """Why its clock is held down, idling not counted: `sw_power_cap`, `hw_slowdown` …"""


class KernelTiming(Part, frozen=True, kw_only=True):
    """How long one kernel took on one rank's accelerator, over one window."""

    kernel: str
    """Its name with the sizes of block and grid, shortened to 128 characters."""
    count: Count
    """How often it ran."""
    median_s: float
    """The median of its durations, the mean of both middle ones."""
    average_s: float
    """Their mean."""


class RankTiming(Part, frozen=True, kw_only=True):
    """Where the time of one rank went, over one window."""

    rank: Count
    """Its global rank."""
    steps: Count = 0
    """Steps that it finished in the window."""
    window_s: float = 0.0
    """How long they took it."""
    role: str = ""
    """Its role group, where the script or the launcher declares one."""
    sections: tuple[SectionTiming, ...] = ()
    """The whole step first, then each section that ended in the window."""
    entries_from_s: float = 0.0
    """Seconds since 1970 by the node's clock: what `entered_us` are counted from."""
    collectives: tuple[CollectiveEntries, ...] = ()
    """The latest collectives that it entered in the window, by process group."""
    host: HostUse | None = None
    """What the operating system says."""
    device: DeviceUse | None = None
    """What the driver of its accelerator says."""
    kernels: tuple[KernelTiming, ...] = ()
    """The kernels that took the most time, where they are traced."""
    gap: str = ""
    """Why nothing is known of it, or less than usual: `recorder silent`, `page unreadable` …"""


class ClockOffset(Part, frozen=True, kw_only=True):
    """How far a node's clock is ahead of another one."""

    clock: Name
    """The other one: the replica of straggler that was asked."""
    offset_s: float
    """This node's clock minus the other one."""
    error_s: float
    """It is off by that at most: half of the round trip."""


class NodeTimings(Message, frozen=True, kw_only=True, tag="node_timings.v1"):
    """Where the time of a node's ranks went; its agent sends it once a window.

    Losable: a missing window is a gap. Size is by rank and section, whatever the number of
    steps.
    """

    job: Name
    """The job."""
    node: Name
    """The node."""
    round: Count
    """The round."""
    slot: Count
    """The node's slot."""
    slots: Count
    """How many nodes the round has: a window is complete when all have sent theirs."""
    world: Count
    """How many ranks the round has."""
    first_step: Count
    """The first step of the window, as counted from 1 in this round."""
    last_step: Count
    """The last one. Nodes' windows of the same steps are one window."""
    window_s: float
    """How long it was."""
    is_by_time: bool = False
    """Nobody counts steps: a step is a second since 1970, by the node's clock."""
    clocks: tuple[ClockOffset, ...] = ()
    """How far its clock is ahead, where it could be measured."""
    host_steal_s: float | None = None
    """Processor time that the host's hypervisor gave to others, over the window."""
    link_errors: tuple[tuple[str, Int], ...] = ()
    """What network devices counted over the window, where it is not zero: `eth0 rx_dropped` …"""
    ranks: tuple[RankTiming, ...] = ()
    """All ranks of the node."""
