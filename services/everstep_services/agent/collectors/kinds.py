"""The kinds of evidence that an agent collects; `log` and `exception` come with a rank's end."""

from typing import Literal, get_args

Kind = Literal[
    "page", "process", "flight_recorder", "stacks", "kernel_log", "gpu", "cgroup", "environment"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
