"""What one line means by itself, whatever stands before it in its log."""

import re
from collections.abc import Hashable
from typing import Literal

from everstep_services.attribution.log_analysis import clocks, fingerprint
from everstep_services.attribution.log_analysis.attempts import START_WORDS, Role
from everstep_services.attribution.log_analysis.chunks import text_of
from everstep_services.attribution.log_analysis.origins import ANY_FILE, of_line
from everstep_services.attribution.log_analysis.pending_work import work_of
from everstep_services.attribution.log_analysis.rules import ENDS, LogRule, LogRules, Match
from everstep_services.attribution.log_analysis.tracebacks import (
    Traceback,
    TracebackLine,
    links_exceptions,
)

Kind = Literal["nothing", "traceback", "link", "ignored", "rank", "nccl_rank", "failure", "start"]
SUMMARY = re.compile(r"^\s*(?:exitcode|traceback)\s*:.*(?:\(pid: |by PID )(?P<pid>\d+)")
_SUMMARY_RANK = re.compile(r"^\s*rank\s*:\s*(?P<rank>\d+) \(local_rank: (?P<local>\d+)\)")
_IGNORED = "Exception ignored in"
"""The line before a harmless traceback: nobody catches exceptions of Python's finalizers."""
_SUMMARY_TRACEBACK = re.compile(r"^\s*traceback\s*: Traceback")
_NCCL_RANK = re.compile(r"\brank (?P<rank>\d{1,7}) n[Rr]anks \d+")
_BARE = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)): (?P<text>.*)")
_UNSAID = re.compile(r"(?:Error|Exception): *$")
ENQUEUED = re.compile(r"last enqueued (?:NCCL )?work: (-?\d+)")
_GENERAL = LogRule(
    id="python_exception",
    failure_class="python_exception",
    domain="user_code",
    role="root",
    severity=1,
    words=(),
    patterns=(),
    means="the script raised an exception",
    advice="Read the traceback; the same fingerprint again means that a restart will not help.",
    source="python",
)


_OF_GROUPS = ("rank", "peer", "node")
"""The parts of a line that a rule finds, and that failures differ in."""
_ANY_PROCESS = "nccl"
"""Stands for the processes of lines of NCCL: it writes no lines that belong together."""


class ParsedLine:
    """What a line means alone. What it only describes is read where it is reported."""

    __slots__ = (
        "_raised",
        "_rules",
        "is_bare",
        "is_dated",
        "is_enqueued",
        "is_indented",
        "is_shared",
        "is_summary",
        "is_summary_traceback",
        "is_unsaid",
        "kind",
        "local",
        "match",
        "means",
        "name",
        "pid",
        "rank",
        "role",
        "whose",
        "within",
        "work_group",
        "year",
        "year_at",
    )  # fmt: skip

    def __init__(self, rules: LogRules, content: bytes) -> None:
        self._rules = rules
        self._raised: tuple[Match, str, str] | None = None
        line = text_of(content)
        whose, text = of_line(line, ANY_FILE)
        is_of_nccl = bool(whose.pid) and text.startswith(f"{whose.node}:{whose.pid}:")
        self.whose = whose.of_process(_ANY_PROCESS) if is_of_nccl else whose
        self.pid = whose.pid
        self.year, self.year_at = _year_in(content, line)
        self.is_dated = self.year is not None or self.year_at is not None
        self.within = TracebackLine.of(text)
        self.is_shared = False
        """Whether other lines have this meaning, too."""
        self.is_indented = text[:1].isspace()
        self.is_enqueued = False
        """Whether it counts the collectives that a rank has entered."""
        self.is_summary = SUMMARY.match(line) is not None
        self.is_summary_traceback = _SUMMARY_TRACEBACK.match(text) is not None
        self.is_unsaid = _UNSAID.search(line) is not None
        self.is_bare = False
        """Whether it is an exception that no rule knows, without a traceback."""
        self.match: Match | None = None
        self.role: Role = "hint"
        self.name = self.local = ""
        self.rank: int | None = None
        self.work_group: str | None = None
        self.kind: Kind = self._kind(text)
        self.means = self.kind != "nothing" or self.is_enqueued

    def _kind(self, text: str) -> Kind:
        if Traceback.begins(text):
            return "traceback"
        if links_exceptions(text):
            return "link"
        if text.startswith(_IGNORED):
            return "ignored"
        self.is_enqueued = ENQUEUED.search(text) is not None
        kind = self._kind_of_rank(text) or self._kind_of_failure(text)
        if kind is None:
            lower = text.lower()
            kind = "start" if any(word in lower for word in START_WORDS) else "nothing"
        return kind

    def _kind_of_rank(self, text: str) -> Kind | None:
        if summary := _SUMMARY_RANK.match(text):
            self.rank, self.local = int(summary["rank"][:7]), summary["local"]
            return "rank"
        if self.pid and (nccl := _NCCL_RANK.search(text)):
            self.rank = int(nccl["rank"])
            return "nccl_rank"
        return None

    def _kind_of_failure(self, text: str) -> Kind | None:
        if (match := self._rules.match(text)) is not None:
            rule = match.rule
            self.match, self.role = match, rule.in_the_open or rule.role
            self.name = fingerprint.of_rule(rule.failure_class, match.component)
            if rule.id == "nccl_timeout" and (work := work_of(text)):
                self.work_group = work[0]
            return "failure"
        if bare := _BARE.match(text):
            self.is_bare, self.match, self.role = True, Match(_GENERAL, {}), "weak"
            self.name = fingerprint.of_exception(bare["kind"], "", bare["text"])
            return "failure"
        return None

    @property
    def raised(self) -> tuple[Match, str, str]:
        """What the line means where it ends a traceback; the exception and its text."""
        if self._raised is None:
            kind, message = self.within.kind.rpartition(".")[2], self.within.message
            match = self._rules.match(f"{kind}: {message}" if message else kind)
            if match is None or match.rule.failure_class in ENDS:
                match = Match(_GENERAL, {})
            self._raised = match, kind, fingerprint.normalised(message)
        return self._raised

    @property
    def structure(self) -> Hashable:
        """What lines have in common that mean the same."""
        within = self.within
        match, *names = self.raised if within.kind else (None,)
        return (
            self.whose, self.year is None, self.year_at and self.year_at.start, self.is_indented,
            self.is_enqueued, self.is_summary, self.is_summary_traceback, self.is_unsaid,
            self.kind, self.is_bare, self.role, self.name, self.rank, self.local, self.work_group,
            _structure_of(self.match), _structure_of(match), *names, within._replace(message=""),
        )  # fmt: skip


def _structure_of(match: Match | None) -> Hashable:
    if match is None:
        return None
    rule, groups = match.rule, match.groups
    return rule.id, match.component, match.is_of_kernel, *map(groups.get, _OF_GROUPS)


def _year_in(content: bytes, line: str) -> tuple[int | None, slice | None]:
    """The year of a line, or where its digits stand in all lines of its kind."""
    at = clocks.place_of_year(line)
    if at is None:
        return None, None
    begin = len(line[:at].encode())
    place = slice(begin, begin + 4)
    if content[place] != line[at : at + 4].encode() or b"0x" in content[:begin]:
        return clocks.year_of(line), None
    return None, place
