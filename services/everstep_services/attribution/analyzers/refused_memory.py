"""Refusals of memory: what an exception's text proves about them, and what it does not.

The kernel also refuses a size that no host has, and what a limit of the process itself
(`ulimit -v`) does not allow: the text alone does not show that the host has no memory left.
"""

import re

from everstep.messages import RankEnd
from everstep_services.attribution.log_analysis.rules import shipped

RULES = frozenset({"host_memory", "absurd_size"})
"""The rules of log analysis that know such texts."""
MEANS = "memory was refused"
_ASKED_BYTES = re.compile(r"tried to allocate (\d{1,30}) bytes")
_ASKED_UNITS = re.compile(r"[Uu]nable to allocate (\d{1,9}(?:\.\d{1,9})?) ([KMGTPE])iB\b")
_UNITS = {unit: 1 << 10 * (power + 1) for power, unit in enumerate("KMGTPE")}
_NO_HOST_HAS = 1 << 46


def asked_bytes(text: str) -> int:
    """The size that was asked for; 0 if the text does not tell."""
    if match := _ASKED_BYTES.search(text):
        return int(match[1])
    if match := _ASKED_UNITS.search(text):
        return int(float(match[1]) * _UNITS[match[2]])
    return 0


def is_refusal(text: str) -> bool:
    """Whether the text reports that memory was refused."""
    match = shipped().match(text)
    return match is not None and match.rule.id in RULES


def is_absurd(text: str) -> bool:
    """Whether more was asked for than any host has: 64 TiB."""
    return asked_bytes(text) > _NO_HOST_HAS


def text_of(end: RankEnd) -> str:
    """What a rank that has ended says about its failure."""
    return f"{end.error_name}: {end.error_text} {end.first_error}"
