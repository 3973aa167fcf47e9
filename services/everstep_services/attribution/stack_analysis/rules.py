"""The activity of a thread, by its frames. The rules are data, in `rules.toml`."""

import re
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Literal

import msgspec

from everstep.verdict_causes import VerdictCause
from everstep_services.attribution.stack_analysis.stacks import Frame, Thread

Activity = Literal[
    "collective", "point_to_point", "backward", "setup",
    "data_wait", "data_read", "data_worker", "checkpoint_save", "checkpoint_restore", "storage",
    "network", "import", "compile", "device", "lock", "interpreter_lock", "sleep", "subprocess",
    "native", "user_code", "standing", "exit", "idle", "unknown",
]  # fmt: skip


class Meaning(msgspec.Struct, frozen=True):
    """What an activity implies."""

    words: str
    """What the rank does, after its name."""
    domain: VerdictCause
    """The area of the trouble if this rank holds up the others."""
    certainty: float
    """The confidence that this rank holds up others that wait for it."""
    awaits_others: bool = False


ACTIVITIES: dict[Activity, Meaning] = {
    "collective": Meaning("waits in a collective", "unknown", 0.0, awaits_others=True),
    "point_to_point": Meaning("waits in a transfer", "unknown", 0.0, awaits_others=True),
    "backward": Meaning("stands in the backward pass", "unknown", 0.0, awaits_others=True),
    "setup": Meaning("sets up its process groups", "unknown", 0.0, awaits_others=True),
    "data_wait": Meaning("waits for its data loader", "data", 0.9),
    "data_read": Meaning("reads data", "data", 0.85),
    "data_worker": Meaning("is a worker of a data loader", "data", 0.6),
    "checkpoint_save": Meaning("saves a checkpoint", "storage", 0.85),
    "checkpoint_restore": Meaning("restores a checkpoint", "storage", 0.85),
    "storage": Meaning("waits for storage", "storage", 0.85),
    "network": Meaning("waits for the network", "network", 0.8),
    "import": Meaning("imports a module", "storage", 0.7),
    "compile": Meaning("compiles", "framework", 0.6),
    "device": Meaning("waits for its device", "gpu", 0.6),
    "lock": Meaning("waits for a lock", "user_code", 0.9),
    "interpreter_lock": Meaning("waits for the interpreter's lock", "user_code", 0.9),
    "sleep": Meaning("sleeps", "user_code", 0.9),
    "subprocess": Meaning("waits for a child process", "user_code", 0.9),
    "native": Meaning("holds the interpreter's lock in native code", "user_code", 0.9),
    "user_code": Meaning("is in its own code", "user_code", 0.75),
    "standing": Meaning("stands still in a call", "user_code", 0.85),
    "exit": Meaning("is ending", "user_code", 0.9),
    "idle": Meaning("is idle", "unknown", 0.6),
    "unknown": Meaning("has no frame of Python's: it starts or ends", "unknown", 0.6),
}
_LIBRARY = re.compile(
    r"(?:^|/)(?:site-packages|dist-packages|python\d[\d.]*)/|^<|(?:^|/)trainer_sdk/"
)
_CALLS = {
    "_engine_run_backward": "backward",
    "c10d::ProcessGroupGloo::SendWork::wait": "send",
    "c10d::ProcessGroupGloo::RecvWork::wait": "recv",
}
"""Names of functions, as their users know them."""
_NEVER = re.compile(r"(?!)")


class StackRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The meaning of a kind of frame."""

    activity: Activity
    source: str
    files: tuple[str, ...] = ()
    names: str = ""
    native: bool = False
    is_idle: bool | None = None
    of_threads: bool = False
    is_weak: bool = False
    passes: bool = False


class ThreadState(msgspec.Struct, frozen=True):
    """The activity of a thread, as its frames show it."""

    activity: Activity
    call: str = ""
    """The function that shows it: `all_reduce`."""
    within: Activity | None = None
    """The enclosing activity, such as a save."""
    place: str = ""
    """The innermost call of the user's own code."""


class _File(msgspec.Struct):
    sources: dict[str, str]
    rule: tuple[StackRule, ...]


class StackRules:
    """All rules, ready to use."""

    def __init__(self, rules: Sequence[StackRule], sources: dict[str, str]) -> None:
        self.rules = tuple(rules)
        self.sources = sources
        self._compiled = [(rule, re.compile(rule.names) if rule.names else None) for rule in rules]
        self._matches: dict[tuple[str, str, bool], tuple[StackRule, ...]] = {}

    def state(self, thread: Thread) -> ThreadState:
        """Return the activity of a thread."""
        place = next((frame.place for frame in thread.frames if self._is_users(frame)), "")
        if not thread.frames:
            return ThreadState("unknown")
        strong: list[tuple[StackRule, Frame]] = []
        weak: list[tuple[StackRule, Frame]] = []
        for frame in thread.frames:
            rule = self._rule(frame, thread)
            if rule is not None and not rule.passes:
                (weak if rule.is_weak else strong).append((rule, frame))
        if strong:
            rule, frame = strong[0]
            outer = (other.activity for other, _ in strong if other.activity != rule.activity)
            call = _CALLS.get(frame.function, frame.function)
            return ThreadState(rule.activity, call, next(outer, None), place)
        if weak:
            return ThreadState(weak[0][0].activity, weak[0][1].function, None, place)
        if all(frame.is_native for frame in thread.frames):
            return ThreadState("unknown")
        return ThreadState(_without_rule(thread), self._innermost(thread), None, place)

    def _innermost(self, thread: Thread) -> str:
        """The function that runs, where it is not the user's own."""
        for frame in thread.frames:
            rule = self._rule(frame, thread)
            if not frame.is_native and (rule is None or not rule.passes):
                return "" if self._is_users(frame) else frame.function
        return ""

    def _rule(self, frame: Frame, thread: Thread) -> StackRule | None:
        key = (frame.file, frame.name, frame.is_native)
        rules = self._matches.get(key)
        if rules is None:
            rules = tuple(
                candidate
                for candidate, names in self._compiled
                if _matches(candidate, names, frame)
            )
            if len(self._matches) < 100_000:
                self._matches[key] = rules
        return next((candidate for candidate in rules if _applies(candidate, thread)), None)

    def _is_users(self, frame: Frame) -> bool:
        if frame.is_native or _LIBRARY.search(frame.file):
            return False
        rule = next(
            (candidate for candidate, names in self._compiled if _matches(candidate, names, frame)),
            None,
        )
        return rule is None or not rule.files


def _applies(rule: StackRule, thread: Thread) -> bool:
    if rule.of_threads and thread.is_main:
        return False
    return thread.is_idle is None or rule.is_idle in (None, thread.is_idle)


def _without_rule(thread: Thread) -> Activity:
    if thread.is_idle and thread.has_interpreter:
        return "native"
    return "standing" if thread.is_idle else "user_code"


def _matches(rule: StackRule, names: re.Pattern[str] | None, frame: Frame) -> bool:
    if rule.native != frame.is_native:
        return False
    if rule.native:
        return bool((names or _NEVER).search(frame.name))
    if names is not None and not names.fullmatch(frame.function):
        return False
    path = f"/{frame.file}"
    return not rule.files or any(
        f"/{suffix}" in path if suffix.endswith("/") else path.endswith(f"/{suffix}")
        for suffix in rule.files
    )


@cache
def shipped() -> StackRules:
    """The rules that come with Everstep."""
    text = resources.files(__package__).joinpath("rules.toml").read_bytes()
    file = msgspec.convert(tomllib.loads(text.decode()), _File)
    return StackRules(file.rule, file.sources)
