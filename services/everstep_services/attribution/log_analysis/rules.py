"""The rules: what lines of logs mean. They are data, in `rules.toml`."""

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Literal

import msgspec

from everstep.verdict_causes import VerdictCause
from everstep_services.agent.probes.kernel import xid
from everstep_services.attribution.log_analysis.attempts import START_WORDS, Role
from everstep_services.attribution.log_analysis.tracebacks import CHAIN_WORDS

_COUNTED_WORDS = ("xid", "last enqueued", "(local_rank:", "nranks")
"""Words of lines whose numbers matter."""
CONTEXT_WORDS = (
    "traceback (most recent", "error:", "exception:", "exception ignored in", *CHAIN_WORDS,
    *_COUNTED_WORDS, *START_WORDS,
)  # fmt: skip
_OF_PROGRAMS = re.compile(
    r"^(?:\[[^\]]{0,80}\]:?\s*)*(?:Assertion|Attribute|Index|Key|Name|Type|UnboundLocal|Value"
    r"|ZeroDivision)Error:"
)
"""Exceptions of Python itself and of scripts: hardware and schedulers raise others."""
_OUTSIDE: frozenset[VerdictCause] = frozenset({"gpu", "host", "network", "scheduler"})
_XID = re.compile(r"NVRM: Xid \((?P<part>[^)]*)\): (?P<number>\d{1,4})\b(?P<text>.*)")
_XIDS: Mapping[str, tuple[str, VerdictCause, int]] = {
    "application": ("cuda_error", "user_code", 2),
    "driver": ("gpu_fault", "gpu", 3),
    "memory": ("gpu_ecc", "gpu", 3),
    "hardware": ("gpu_fault", "gpu", 3),
    "nvlink": ("nvlink", "gpu", 3),
    "firmware": ("gpu_fault", "gpu", 3),
}
_HARDWARE = frozenset({"nvlink", "gpu_ecc", "gpu_fault", "host_hardware"})
"""Classes that are believed only in the form in which a driver or a library writes them."""
_KERNEL_HEAD = re.compile(
    r"(?:(?:\[[^\]]{0,80}\]:?|<\d{1,3}>|\{\d{1,6}\}|(?:[\w.-]{1,80} )?kernel:|\d[\d:.,TZ+-]{0,40}"
    r"|(?:stdout|stderr) [FP]) ?)*+"
)
"""The text before a line of a driver: times, and the origin of the line."""
_DRIVER_HEAD = re.compile(
    r"(?:NVRM: .*|nvidia-\w+: |amdgpu\b.*|mce: |EDAC \w+: .*|Uhhuh\. "
    r"|[\w-]+ [0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d: (?:AER: )?"  # a driver and its device
    r"|[A-Za-z_][\w.]*(?:Error|Exception): .*|.*what\(\): .*|CUDA error: "
    r"|[\w.-]+:\d+:\d+ \[\d+\] .*NCCL WARN .*)?"
)
"""The text before it in a line that a driver, CUDA, torch or NCCL writes."""
_GLOG = re.compile(r"\[[EWF]\d{4} [^\]]{1,200}\] .*(?:CUDA error|[Cc]uda failure)\b.*")
"""torch's own log, which reports what ended a process group."""
_OF_DRIVER = re.compile(
    r"^(?:(?:\[ *\d+\.\d+\]|<\d{1,3}>|(?:[\w.-]{1,80} )?kernel:) ?)+"
    r"|^(?:NVRM: |nvidia-\w+: |amdgpu\b|mce: |EDAC |Uhhuh\. "
    r"|[\w-]+ [0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d: )"
)
"""The begin of a line that only the kernel or a driver writes, whatever it reports."""
ENDS = frozenset({"exited", "aborted"})
"""Classes of a launcher's line that only says that a process ended."""
_MOST_SHAPES = 20_000
_CONSTANT = re.compile(r"CUDA_ERROR_[A-Z_]+|cudaError[A-Z]\w+")
"""The name of an error in CUDA's headers, which no sentence has by chance."""
_PREVIOUS_XID = re.compile(r"(?i)\b(?:previous|earlier) xid:? (\d{1,4})\b")
_DIGITS = str.maketrans("", "", "0123456789")
_NEEDS_NUMBERS = re.compile(r"\\d|\d")
_OF_ANY_DIGITS = re.compile(r"\\d|\{[\d,]+\}|0-9")
"""The parts of patterns in which digits stand for any digits."""
_CERTAIN = re.compile(rf"({_OF_ANY_DIGITS.pattern})|\[[\d-]+\]|\d")
"""These, and digits that stand for themselves."""
_GROUP = re.compile(r"\(\?P<\w+>|(?<!\\)\((?!\?)")
_UNLESS = re.compile(r"\(\?<?!(?:[^()\\]|\\.)*\)")
"""What must not stand there: without it, a pattern matches more."""


class LogRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The meaning of a kind of line."""

    id: str
    failure_class: str = msgspec.field(name="class")
    domain: VerdictCause
    role: Role
    words: tuple[str, ...]
    patterns: tuple[str, ...] = ()
    means: str
    advice: str
    source: str
    severity: Literal[1, 2, 3] = 1
    also: tuple[str, ...] = ()
    """Further sources."""
    writer: Literal["kernel", "any"] = "any"
    """The only program that writes such lines; `kernel` includes drivers."""
    kernel_patterns: tuple[str, ...] = ()
    """Patterns of lines that only the kernel writes, where `writer` is `any`."""
    in_the_open: Role | None = None
    """Its role outside of a traceback; None if that is the same."""


class Match(msgspec.Struct, frozen=True):
    """A line that means something."""

    rule: LogRule
    groups: Mapping[str, str]
    component: str = ""
    is_of_kernel: bool = False
    """Whether only the kernel or a driver writes such a line."""


class _File(msgspec.Struct):
    sources: dict[str, str]
    rule: tuple[LogRule, ...]


class LogRules:
    """All rules, ready to use."""

    def __init__(self, rules: Sequence[LogRule], sources: Mapping[str, str]) -> None:
        self.rules = tuple(rules)
        self.sources = sources
        self.words = {word for rule in rules for word in rule.words} | set(CONTEXT_WORDS)
        self._compiled: dict[int, tuple[Sequence[re.Pattern[str]], Sequence[re.Pattern[str]]]] = {}
        """The patterns of rules whose words were seen: first those of lines of the kernel."""
        self._numeric = {
            number
            for number, rule in enumerate(rules)
            if any(map(_NEEDS_NUMBERS.search, (*rule.patterns, *rule.kernel_patterns)))
        }
        self._certain: dict[int, Sequence[re.Pattern[str]]] = {}
        self._of_words: dict[str, list[int]] = {}
        for number, rule in enumerate(rules):
            for word in rule.words:
                self._of_words.setdefault(word.translate(_DIGITS), []).append(number)
        self._of_shapes: dict[str, tuple[int, ...]] = {}
        """The numbers of the rules whose words texts have that differ in digits only."""

    def match(self, text: str) -> Match | None:
        """The meaning of a line, by the first rule that matches it.

        An exception of the script's own may quote a line that would mean something else.
        """
        match = self._match(text)
        if match is not None and match.rule.domain in _OUTSIDE and _OF_PROGRAMS.match(text):
            return None
        return match

    def _match(self, text: str) -> Match | None:
        lower = text.lower()
        if "xid" in lower and (hit := _XID.search(text)):
            return _of_xid(hit) if _KERNEL_HEAD.fullmatch(text, 0, hit.start()) else None
        for number in self._with_words(lower):
            rule, (of_kernel, patterns) = self.rules[number], self._patterns(number)
            for pattern in (*of_kernel, *patterns):
                hit = pattern.search(text)
                if hit and _is_in_form(rule, hit):
                    groups = {key: value for key, value in hit.groupdict().items() if value}
                    is_of_kernel = (
                        rule.writer == "kernel"
                        or pattern in of_kernel
                        or _OF_DRIVER.match(text) is not None
                    )
                    return Match(rule, groups, rule.id, is_of_kernel)
        return None

    def _patterns(self, number: int) -> tuple[Sequence[re.Pattern[str]], Sequence[re.Pattern[str]]]:
        patterns = self._compiled.get(number)
        if patterns is None:
            rule = self.rules[number]
            kernel, others = (
                tuple(map(re.compile, them)) for them in (rule.kernel_patterns, rule.patterns)
            )
            patterns = self._compiled[number] = kernel, others
        return patterns

    def _with_words(self, lower: str) -> tuple[int, ...]:
        """The numbers of the rules that have a word in the text, in their order."""
        shape = lower.translate(_DIGITS)
        numbers = self._of_shapes.get(shape)
        if numbers is None:
            if len(self._of_shapes) >= _MOST_SHAPES:
                self._of_shapes.clear()
            numbers = tuple(
                sorted(
                    {
                        number
                        for word, numbers in self._of_words.items()
                        if word in shape
                        for number in numbers
                    }
                )
            )
            self._of_shapes[shape] = numbers
        return numbers

    def is_settled(self, text: str) -> bool:
        """Whether a line with other digits would mean as little as this one."""
        lower = text.lower()
        if any(word in lower for word in _COUNTED_WORDS):
            return False
        return self._numeric.isdisjoint(self._with_words(lower))

    def compared_digits(self, text: str) -> Collection[int] | None:
        """The places of digits that a rule may compare with certain ones; None if all of them."""
        lower = text.lower()
        if "xid" in lower:
            return None
        places: set[int] = set()
        for number in self._with_words(lower):
            rule = self.rules[number]
            if number not in self._certain:
                patterns = (*rule.patterns, *rule.kernel_patterns)
                self._certain[number] = tuple(_of_certain_digits(patterns))
            for pattern in self._certain[number]:
                match = pattern.search(text)
                while match is not None:
                    if not pattern.groups:
                        return None
                    places.update(map(match.start, range(1, pattern.groups + 1)))
                    match = pattern.search(text, match.start() + 1)
        return places - {-1}


def _of_certain_digits(patterns: Sequence[str]) -> Iterator[re.Pattern[str]]:
    """The patterns that look for certain digits, made to match any: groups have their places.

    Without groups, the places may be anywhere.
    """
    for pattern in patterns:
        if not re.search(r"\d", _OF_ANY_DIGITS.sub("", pattern)):
            continue
        plain = _GROUP.sub("(?:", _UNLESS.sub("", pattern))
        is_clear = not re.search(r"\(\?<?[!=]|\.[*+]", plain)
        in_groups = _CERTAIN.sub(lambda part: part[1] or r"(\d)", plain)
        yield re.compile(in_groups if is_clear else in_groups.replace(r"(\d)", r"\d"))


def _is_in_form(rule: LogRule, match: re.Match[str]) -> bool:
    """Whether a line reports a failure of hardware, and does not only mention one."""
    if rule.failure_class not in _HARDWARE or _CONSTANT.fullmatch(match[0]):
        return True
    text, end = match.string, match.start()
    if _GLOG.match(text):
        return True
    head = _KERNEL_HEAD.match(text, 0, end)
    begin = head.end() if head else 0
    return _DRIVER_HEAD.fullmatch(text, begin, end) is not None


@cache
def shipped() -> LogRules:
    """The rules that come with Everstep."""
    text = resources.files(__package__).joinpath("rules.toml").read_bytes()
    file = msgspec.convert(tomllib.loads(text.decode()), _File)
    return LogRules(file.rule, file.sources)


def _of_xid(hit: re.Match[str]) -> Match | None:
    """The meaning of an Xid in the table of the node checks; None for a remark of the driver."""
    previous = _PREVIOUS_XID.search(hit["text"])
    number = int(previous[1] if previous else hit["number"])
    row = xid.table().rows.get(number)
    if row is not None and (row.kind not in _XIDS or (row.unless and row.unless in hit["text"])):
        return None
    failure_class, domain, severity = _XIDS[row.kind] if row else ("gpu_fault", "gpu", 2)
    rule = LogRule(
        id=f"xid_{number}",
        failure_class=failure_class,
        domain=domain,
        role="root",
        severity=severity,  # type: ignore[arg-type]
        words=("xid",),
        patterns=(),
        means=f"Xid {number}: {row.name if row else 'not in the table'}",
        advice=row.note if row else "Look it up in NVIDIA's catalog.",
        source="nvidia",
    )
    groups = {"part": hit["part"]}
    if pid := re.search(r"\bpid=(\d+)", hit["text"]):
        groups["pid"] = pid[1]
    return Match(rule, groups, f"xid_{number}", is_of_kernel=True)
