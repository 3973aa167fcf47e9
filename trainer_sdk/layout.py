"""The place of each field in a page. Plain numbers, as every rank imports this before its script.

A page is a file of fixed size, mapped by a rank and by its agent. Every field is one aligned
64-bit word, written by one plain store: a reader on the same host sees the old value or the new
one, never a mixture, whether the rank holds the GIL, is stopped, or is dead. A field is an integer,
or a double if its name ends with `_S`: seconds, which Python handles faster than large integers.
Releases only add fields; a field with a changed meaning needs a new magic.

    words 0-31       the rank's own fields below; the rest is zero
    words 32-63      fields that the agent writes for the rank
    words 64-351     8 lanes: for each thread, its open sections, and since when
    words 352-863    64 sections: their counts and longest times
    words 864-1007   24 reported values
    words 1008-1023  more fields of the rank
    words 1024-5119  64 rings of the latest 64 durations of each section, doubles
    words 5120-5631  64 names of sections
    words 5632-6143  a ring of the latest 512 durations of steps, doubles; without long phases
    words 6144-7167  64 rings of the latest 16 instants at which each section ended, doubles; the
                     first ring is that of steps
    words 7168-7679  64 rings of the latest 8 processor times of threads in each section, doubles;
                     every fifth end has one
    words 7680-8191  64 rings of the latest 8 times of each section on the accelerator, doubles
"""

MAGIC = int.from_bytes(b"EVSPAGE1", "little")
PAGE_BYTES = 65536

MAGIC_AT = 0
PID = 1
ROUND = 2
RANK = 3
STEP = 4  # the last finished step: in this round, or as the script counts
PROGRESS_NS = 5  # CLOCK_MONOTONIC of the last step of the optimizer or change of the phase
PHASE = 6
COUNTED_BY = 7
SCRIPT_NS = 8  # CLOCK_MONOTONIC when the user's script began
FIRST_STEP_NS = 9
DROPPED = 10  # datagrams that could not be sent
BEATS = 11  # the number of heartbeats
PAUSED = 12  # the number of open pauses
PAUSED_UNTIL_NS = 13  # when they end by themselves; 0 for never
STEPS = 14  # the number of steps finished in this round
LONGEST_STEP_NS = 15  # after the first step, without time in long phases
SECTIONS = 16  # the number of names in use
VALUES = 17  # the number of values in use
MISUSES = 18  # invalid calls: an end without a beginning, too many names
TOTAL_STEPS = 19  # the last step of the training, if the script has reported it
STOP_SEEN_NS = 20  # when the script first saw that it should stop
GROUP_TIMEOUT_NS = 21  # of the default process group
PROGRESS_S = 22  # CLOCK_MONOTONIC of the last step, heartbeat, or end of a pause or long phase
LISTENS = 23  # 1 once the script has asked whether it should stop
COMPILING_NS = 24  # CLOCK_MONOTONIC when torch began to compile; 0 when it does not
COMPILED_NS = 25  # when it last ended; written before COMPILING_NS becomes 0
FIRST_BEAT_S = 26  # CLOCK_MONOTONIC of the first heartbeat
LONGEST_BEAT_S = 27  # between two heartbeats, or between the last of them and the first step
WARMUP = 28  # the number of first steps that may take long, as the script says
CLOSED_S = 29  # CLOCK_MONOTONIC when the session was closed; later progress reopens it
EXIT_CODE = 30  # 1 + the exit code of the script; 0: unknown; written before the phase
DEFERRED = 31  # a bit for each signal whose default action is deferred

STOP_AFTER = 32  # 1 + the step after which the script should stop; 0 for none
SAVE_AFTER = 33  # 1 + the step after which it should save and go on; 0 for none
WARMUP_GIVEN = 34  # the number of first steps that may take long, by the settings; 0: not set
CPU_TIMED = 35  # 1 if sections should measure the processor time of their thread, too

LANES_AT = 64
LANES = 8
LANE_WORDS = 36
LANE_THREAD = 0  # as the kernel numbers it; 0 for a free lane
LANE_MOVED_S = 1  # the last heartbeat, or end of a section that is too deep to be shown
LANE_FRAMES = 2  # doubles; open sections: when each was entered, and its number times FRAME_STEP;
# then an entry of number 0: when the last section was left
FRAME_STEP = float(1 << 28)  # longer than any host is up, and exact to microseconds
DEEPEST = 16  # deeper sections are timed, but not shown

SECTIONS_AT = 352
SECTIONS_MOST = 64
SECTION_WORDS = 8
SECTION_COUNT = 0  # how often the section has ended
SECTION_LONGEST_S = 1  # since the first step of the round
SECTION_KIND = 2
SECTION_BEFORE = 3  # how often it had ended when the first step of the round was finished
SECTION_CPU_COUNT = 4  # the number of its processor times that were written
SECTION_DEVICE_COUNT = 5  # the number of its times on the accelerator that were written

VALUES_AT = 864
VALUES_MOST = 24
VALUE_WORDS = 6  # 4 for the name, then the value as a double, then when
VALUE_NAME_BYTES = 32

NUMBERED = 1008  # 1 once the script has given the number of a step, or of the one it resumes after
SURVIVES = 1009  # 1 while this process survives rounds, 2 if a node may be lost with its ranks

RINGS_AT = 1024
RING_ENTRIES = 64

NAMES_AT = 5120
NAME_WORDS = 8
NAME_BYTES = 64

STEPS_AT = 5632
STEPS_ENTRIES = 512

ENDS_AT = 6144
ENDS_ENTRIES = 16
CPU_AT = 7168
CPU_ENTRIES = 8
DEVICE_AT = 7680
DEVICE_ENTRIES = 8

OUTSIDE = 0  # the first section: the time outside all others
OTHERS = SECTIONS_MOST - 1  # the last section: all names beyond the limit

KIND_PLAIN = 0
KIND_CHECKPOINT = 1
KIND_EVALUATION = 2

PHASE_STARTING = 1
PHASE_SCRIPT = 2
PHASE_ENDED = 3

BY_NOBODY = 0
BY_OPTIMIZER = 1
BY_SDK = 2

# Environment variables of a rank.
INSTANCE_VARIABLE = "EVERSTEP_AGENT"
IMAGES_VARIABLE = "EVERSTEP_IMAGES"  # the folder of images on this node
IMAGES_MOST_VARIABLE = "EVERSTEP_IMAGES_MOST"  # the most bytes that images of this rank may take
FRESH_VARIABLE = "EVERSTEP_ALLOW_FRESH_START"  # 1 where a training may begin from scratch
INJECTION_VARIABLE = "EVERSTEP_INJECTION"  # 1 where faults may be injected
LIMITS_VARIABLE = "EVERSTEP_LIMITS"  # the limits that were set by hand, as JSON: name to seconds
STAND_IN_VARIABLE = "EVERSTEP_STAND_IN"  # `missing` or `always`: `nvidia_resiliency_ext` is ours
CPUS_VARIABLE = "EVERSTEP_CPUS"  # the CPUs that a rank is bound to: `0-3,8`
MEMORY_NODES_VARIABLE = "EVERSTEP_MEMORY_NODES"  # the NUMA nodes whose memory it prefers
STRICT_VARIABLE = "EVERSTEP_MEMORY_STRICT"  # `1`: it takes memory from these nodes only
LOCK_VARIABLE = "EVERSTEP_LOCK"
SOCKET_VARIABLE = "EVERSTEP_SOCKET"
SURVIVE_VARIABLE = "EVERSTEP_SURVIVE"  # the socket of the warden, which parks ranks that survive
PAGE_VARIABLE = "EVERSTEP_PAGE"
FOLDER_VARIABLE = "EVERSTEP_RANK_DIR"
ROUND_VARIABLE = "EVERSTEP_ROUND"

# Files and sockets in a rank's runtime directory.
ERROR_FILE = "error.json"
ELASTIC_ERROR_FILE = "torchelastic_error.json"
STACKS_FILE = "stacks"  # of its threads, as faulthandler prints them, when its warden ended it
LAST_SIGNAL = 16  # SIGSTKFLT, which no kernel sends: the rank writes that file, and ends by it
WORKER_SOCKET = "worker.sock"
INJECTION_SOCKET = "injection.sock"
KERNELS_FILE = "kernels.json"
SPREADS_FILE = "spreads.json"
FLIGHT_PREFIX = "flight_"

# The lock of an agent and its warden, in the agent's runtime directory.
LOCK_FILE = "lock"
