"""Whether a node takes part in a job, as history last heard: the one list of these states."""

from typing import Literal, get_args

NodePresence = Literal["joined", "left", "lost"]
NODE_PRESENCES: tuple[NodePresence, ...] = get_args(NodePresence)
