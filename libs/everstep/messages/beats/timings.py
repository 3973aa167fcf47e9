"""Where the time of a node's ranks went, window by window, and when they entered collectives."""

from everstep.messages.base import Count, Int, Message, Name, Part
from everstep.messages.beats.sketch import Sketch


class SectionTiming(Part, frozen=True, kw_only=True):
    """How long one section took on one rank, over one window."""

    section: str
    """The section's name; empty for the whole step."""
    wall: Sketch
    """The time from entry to exit. It includes waiting for other ranks, so it cannot name a slow
    rank."""
    cpu: Sketch | None = None
    """Processor time of the thread that ran the section, where that is measured."""
    device: Sketch | None = None
    """Time on the accelerator by its events, where that is measured."""


class CollectiveEntries(Part, frozen=True, kw_only=True):
    """When one rank entered successive collectives of one process group.

    These are the latest collectives of the window. Instants are microseconds after the rank's
    `entries_from_s`, by the clock of its node.
    """

    group: str
    """The name of the process group, by its number or description in torch."""
    first_sequence: Int
    """The number of the first collective within its group; the others are numbered from there."""
    entered_us: tuple[Int, ...]
    """When the rank entered each collective."""
    ops: tuple[str, ...] = ()
    """The operations, each once, with the size of its input: `all_reduce 4096`."""
    op: tuple[Int, ...] = ()
    """For each collective: its operation, as an index into `ops`."""
    section: tuple[Int, ...] = ()
    """For each collective: the innermost section in which the rank entered it, as an index into the
    rank's `sections`; -1 for none. Empty where no sections are known."""
    lasted_us: tuple[Int, ...] = ()
    """How long each collective ran on the device, including waits for others: -1 while that is not
    known, empty where it is not recorded."""
    members: tuple[Count, ...] = ()
    """The ranks of the group; empty where the recorder does not name them."""
    are_transfers: bool = False
    """The entries are sends and receives between single ranks of the group. They are numbered by
    each rank for itself, so the numbers do not tell which send belongs to which receive."""


class HostUse(Part, frozen=True, kw_only=True):
    """What the operating system reports about one rank's process, over one window.

    A value that is not known is None.
    """

    cpu_s: float | None = None
    """Processor time of all threads of the process."""
    main_cpu_s: float | None = None
    """Processor time of the main thread."""
    runnable_s: float | None = None
    """How long the main thread was ready to run, but waited for a processor."""
    involuntary_switches: Int | None = None
    """How often the kernel interrupted a thread of the process to run another one."""
    major_faults: Int | None = None
    """How often the process waited for memory from a disk."""
    cpu_pressure_s: float | None = None
    """How long some task of the process's cgroup waited for a processor."""
    memory_pressure_s: float | None = None
    """How long some task of the process's cgroup waited for memory."""
    io_pressure_s: float | None = None
    """How long some task of the process's cgroup waited for a disk."""
    throttled_s: float | None = None
    """How long the quota of the cgroup kept its tasks from running."""
    workers: Int | None = None
    """How many child processes the process has, such as data workers."""
    workers_cpu_s: float | None = None
    """Processor time of these child processes."""
    retransmits: Int | None = None
    """Segments that the connections of the process sent again."""
    round_trip_s: float | None = None
    """The median of the smoothed round trips of the connections that sent the most in the window; a
    connection that only receives measures none."""
    unsent_bytes: Int | None = None
    """Data that waited in the connections of the process to be sent, when the window ended."""


class DeviceUse(Part, frozen=True, kw_only=True):
    """What the driver reports about one rank's accelerator at the end of a window."""

    clock_mhz: Int | None = None
    """The clock rate of the accelerator's processors."""
    clock_most_mhz: Int | None = None
    """The highest clock rate of the accelerator."""
    power_watts: float | None = None
    """The power that the accelerator draws."""
    temperature_celsius: float | None = None
    """The temperature of the accelerator."""
    throttled_by: tuple[str, ...] = ()
    """Why the clock rate is limited, except by idling: `sw_power_cap`, `hw_slowdown` …"""


class KernelTiming(Part, frozen=True, kw_only=True):
    """How long one kernel took on one rank's accelerator, over one window."""

    kernel: str
    """The kernel's name with the sizes of block and grid, shortened to 128 characters."""
    count: Count
    """How often the kernel ran."""
    median_s: float
    """The median of the durations; of an even number, the mean of the middle two."""
    average_s: float
    """The mean of the durations."""


class RankTiming(Part, frozen=True, kw_only=True):
    """Where the time of one rank went, over one window."""

    rank: Count
    """The rank's number in the world."""
    steps: Count = 0
    """The number of steps that the rank finished in the window."""
    window_s: float = 0.0
    """How long these steps took."""
    role: str = ""
    """The rank's role group, where the script or the launcher declares one."""
    sections: tuple[SectionTiming, ...] = ()
    """The whole step first, then each section that ended in the window."""
    entries_from_s: float = 0.0
    """The time from which `entered_us` counts, in seconds since 1970 by the node's clock."""
    collectives: tuple[CollectiveEntries, ...] = ()
    """The latest collectives that the rank entered in the window, by process group."""
    host: HostUse | None = None
    """What the operating system reports about the rank's process."""
    device: DeviceUse | None = None
    """What the driver of the rank's accelerator reports."""
    kernels: tuple[KernelTiming, ...] = ()
    """The kernels that took the most time, where they are traced."""
    gap: str = ""
    """Why nothing is known of the rank, or less than usual: `recorder silent`, `page unreadable`
    …"""


class ClockOffset(Part, frozen=True, kw_only=True):
    """How far a node's clock is ahead of another clock."""

    clock: Name
    """The other clock: that of the replica of straggler that was asked."""
    offset_s: float
    """The node's clock minus the other clock."""
    error_s: float
    """The largest error of the offset: half of the round trip."""


class NodeTimings(Message, frozen=True, kw_only=True, tag="node_timings.v1"):
    """Where the time of a node's ranks went; the node's agent sends this once a window.

    Timings may be lost: a missing window is a gap. The size depends on ranks and sections, not
    on the number of steps.
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
    """How many nodes the round has: a window is complete when all of them have sent their part."""
    world: Count
    """How many ranks the round has."""
    first_step: Count
    """The first step of the window, as counted from 1 in this round."""
    last_step: Count
    """The last step of the window. Windows of several nodes with the same steps are one window."""
    window_s: float
    """The duration of the window."""
    is_by_time: bool = False
    """No SDK counts steps: a step is a second since 1970, by the node's clock."""
    clocks: tuple[ClockOffset, ...] = ()
    """How far the node's clock is ahead of others, where that could be measured."""
    host_steal_s: float | None = None
    """Processor time that the hypervisor of the host gave to other machines, over the window."""
    link_errors: tuple[tuple[str, Int], ...] = ()
    """The error counters of network devices that changed in the window: `eth0 rx_dropped` …"""
    ranks: tuple[RankTiming, ...] = ()
    """All ranks of the node."""
