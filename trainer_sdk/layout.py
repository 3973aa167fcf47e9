"""Where each field of a page is. Plain numbers: every rank imports this before its script.

A page is a file of fixed size, mapped by a rank and by its agent. Every field is one aligned
64-bit word, written by one plain store: a reader on the same host sees the old value or the new
one, never a mixture, whether the rank holds the GIL, is stopped, or is dead. Fields are only ever
added; another meaning is another magic.

    words 0-63       the fields below; the rest is zero
    words 64-1023    reserved: the stack of open sections and their counters
    words 1024-8191  reserved: rings of recent durations
"""

MAGIC = int.from_bytes(b"EVSPAGE1", "little")
PAGE_BYTES = 65536

MAGIC_AT = 0
PID = 1
ROUND = 2
RANK = 3
STEP = 4  # finished in this round
PROGRESS_NS = 5  # CLOCK_MONOTONIC of the last progress
PHASE = 6
COUNTED_BY = 7
SCRIPT_NS = 8  # CLOCK_MONOTONIC when the user's script began
FIRST_STEP_NS = 9
DROPPED = 10  # datagrams that the agent had no room for

PHASE_STARTING = 1
PHASE_SCRIPT = 2
PHASE_ENDED = 3

BY_NOBODY = 0
BY_OPTIMIZER = 1
BY_SDK = 2

# What a rank finds in its environment.
INSTANCE_VARIABLE = "EVERSTEP_AGENT"
LOCK_VARIABLE = "EVERSTEP_LOCK"
SOCKET_VARIABLE = "EVERSTEP_SOCKET"
PAGE_VARIABLE = "EVERSTEP_PAGE"
FOLDER_VARIABLE = "EVERSTEP_RANK_DIR"
ROUND_VARIABLE = "EVERSTEP_ROUND"

# What it leaves in its runtime directory.
ERROR_FILE = "error.json"
ELASTIC_ERROR_FILE = "torchelastic_error.json"
WORKER_SOCKET = "worker.sock"
FLIGHT_PREFIX = "flight_"

# What an agent and its warden hold together, in the agent's runtime directory.
LOCK_FILE = "lock"
