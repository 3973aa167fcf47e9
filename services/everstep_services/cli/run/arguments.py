"""Reads the words after `everstep run` as torchrun would; an error is one line."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from everstep.units import seconds
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.run.nvrx_config import FileError, file_options
from everstep_services.cli.run.options import NVRX, OPTIONS, WORDS_FOR_NONE, RunOption

Value = str | int | float | bool | None

_BY_NAME = {name: option for option in OPTIONS for name in option.names}
_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
_REPEATED = frozenset({"label", "limit"})
_NEAR = 0.75
"""How like a name must be to be suggested; 1 is the same."""
_WARMUP = "warmup="
_NVRX_WARMUP_STEPS = 5
_NOT_SET = "false"


class UsageError(CliError):
    """The command line, or a variable that stands for it, cannot be followed."""

    def __init__(self, text: str) -> None:
        super().__init__(text, Exit.USAGE)


@dataclass(slots=True)
class Given:
    """The given values, by the names of the plan, and the option that gave each."""

    values: dict[str, Value] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """How it was written: `--nnodes` or `PET_NNODES`."""
    repeated: dict[str, list[str]] = field(default_factory=dict)
    """The texts of options that may be given several times, in order."""
    limit_origins: dict[str, str] = field(default_factory=dict)
    """Of texts of --limit that another option has said: which one."""
    script: str | None = None
    arguments: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)

    def text(self, name: str, default: str = "") -> str:
        """A value that is text."""
        value = self.values.get(name)
        return default if value is None else str(value)

    def whole(self, name: str) -> int | None:
        """A value that is a whole number; None when it was not given."""
        value = self.values.get(name)
        return value if isinstance(value, int) else None

    def has(self, name: str) -> bool:
        """Whether a flag is set."""
        return bool(self.values.get(name))

    def wrong(self, name: str, why: str) -> UsageError:
        """The error for a value that was given."""
        return UsageError(f"{self.origins.get(name, name)} {self.values.get(name)!r}: {why}")


def scan(words: Sequence[str], environ: Mapping[str, str]) -> Given:
    """Read variables, then words, which win. Raises `UsageError` at the first thing amiss.

    Everything after the script belongs to it; one `--` may stand before or after the script.
    """
    given = Given()
    aliases: dict[str, RunOption] = {}
    for option in OPTIONS:
        text = environ.get(option.environment) if option.environment else None
        if text:
            _take(given, option, option.environment, _flag(option, text), aliases)
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in {"-", "--"}:
        for option, name, text in _options(rest):
            _take(given, option, name, text, aliases)
    ended = rest[:1] == ["--"]
    rest = rest[1:] if ended else rest
    if rest:
        given.script, *after = rest
        given.arguments = tuple(after[1:] if not ended and after[:1] == ["--"] else after)
    _read_file(given, aliases)
    # Limits last: a section `warmup` has a default number of steps.
    for name, option in sorted(aliases.items(), key=lambda alias: alias[0].endswith(">limit")):
        _follow(given, name, option)
    return given


def _read_file(given: Given, aliases: dict[str, RunOption]) -> None:
    """Take values from the file of NVRx's launcher, where no option gives another."""
    path = given.text("ft_cfg_path")
    if not path or path.lower() in WORDS_FOR_NONE:
        return
    may_lack = given.has("ft_ignore_missing_cfg") or any(
        origin.startswith("--ft-") and name not in {"ft_cfg_path", "ft_ignore_missing_cfg"}
        for name, origin in given.origins.items()
    )
    try:
        entries = file_options(path, may_lack=may_lack)
    except FileError as error:
        raise UsageError(str(error)) from error
    typed = set(given.origins)
    for entry in entries:
        option = _BY_NAME.get(entry.option)
        if option is None:
            names = [each.long[5:] for each in NVRX]
            close = difflib.get_close_matches(entry.option[5:], names, n=1, cutoff=_NEAR)
            hint = f"; did you mean {close[0].replace('-', '_')}?" if close else ""
            given.notes.append(f"{entry.origin} is not used: NVRx has no such key{hint}")
        elif option.to in typed:
            is_off = given.values[option.to] in (*WORDS_FOR_NONE, None)  # as NVRx takes it
            how = "switches it off" if is_off else "was given"
            given.notes.append(f"{entry.origin} is not used: {given.origins[option.to]} {how}")
        else:
            text = entry.text if option.kind != "flag" else _truth(entry.text)
            if text is not _NOT_SET:
                _take(given, option, entry.origin, text, aliases)


def _truth(text: str) -> str | None:
    """The value of a flag in a file; None sets the flag."""
    return None if text.strip().lower() in {"true", "yes", "on", "1"} else _NOT_SET


def _flag(option: RunOption, text: str) -> str | None:
    """The value of a variable; torchrun's flags are numbers there."""
    if option.kind != "flag":
        return text
    if not re.fullmatch(r"\s*\d+\s*", text):
        raise UsageError(f"{option.environment}={text!r}: write 1 for yes or 0 for no")
    return None if int(text) else "0"


def _options(rest: list[str]) -> Iterator[tuple[RunOption, str, str | None]]:
    """The options in the first word, which is taken off, and with it a value that follows."""
    word = rest.pop(0)
    if word.startswith("--"):
        name, equals, text = word.partition("=")
        option = _find(name)
        if option.kind == "flag" and equals:
            raise UsageError(f"{name} takes no value, but got {text!r}")
        if option.kind == "flag":
            yield option, option.long, None
        else:
            yield option, option.long, text if equals else _next(rest, option.long, option)
        return
    letters = word[1:]
    while letters:
        name, letters = f"-{letters[0]}", letters[1:]
        option = _find(name)
        if option.kind == "flag":
            yield option, name, None
            continue
        yield option, name, letters.removeprefix("=") if letters else _next(rest, name, option)
        return


def _next(rest: list[str], name: str, option: RunOption) -> str:
    """The word after an option that takes a value."""
    if not rest:
        raise UsageError(f"{name} needs a value: {name} {option.metavar}")
    word = rest[0]
    if word.startswith("-") and word != "-" and not _NUMBER.fullmatch(word) and " " not in word:
        raise UsageError(
            f"{name} needs a value, but {word} follows; if that is the value, "
            f"write {option.long}={word}"
        )
    return rest.pop(0)


def _find(name: str) -> RunOption:
    """The option of this name, or the only one that begins so; torchrun's come first.

    NVRx's own spellings mix dashes and underscores: `--ft-rank_section_timeouts`.
    """
    typed, name = name, name.replace("_", "-")
    if name in _BY_NAME:
        return _BY_NAME[name]
    near = {option.long: option for spelling, option in _BY_NAME.items()
            if spelling.startswith(name) and name.startswith("--")}  # fmt: skip
    of_torchrun = [option for option in near.values() if option.from_torchrun]
    for among in (of_torchrun, list(near.values())):
        if len(among) == 1:
            return among[0]
    if near:
        raise UsageError(f"{typed} may mean {', '.join(sorted(near))}: write more of it")
    hint = f"did you mean {close}?" if (close := _closest(name)) else "see everstep run --help"
    raise UsageError(f"there is no option {typed}; {hint} (options of a script come after it)")


def _closest(name: str) -> str:
    """The option that was probably meant, perhaps only begun; empty for none."""

    def likeness(spelling: str) -> float:
        begun = difflib.SequenceMatcher(None, name, spelling[: len(name)]).ratio()
        return max(begun - 0.01, difflib.SequenceMatcher(None, name, spelling).ratio())

    best = max((option.long for option in OPTIONS), key=likeness)
    return best if likeness(best) >= 0.7 and name.startswith("--") else ""


def _take(
    given: Given, option: RunOption, name: str, text: str | None, aliases: dict[str, RunOption]
) -> None:
    if option.instead and (text or "").lower() not in option.quiet:
        raise UsageError(f"{name} is not for everstep: {option.instead}")
    if option.note and (text is None or text.lower() not in option.quiet):
        note = f"{name} is not used: {option.note}"
        if note not in given.notes:
            given.notes.append(note)
    if option.to in _REPEATED:
        given.repeated.setdefault(option.to, []).append(text or "")
    if ">" in option.to:
        aliases[option.to] = option
    given.values[option.to] = _converted(option, name, text)
    given.origins[option.to] = name


def _follow(given: Given, name: str, option: RunOption) -> None:
    """Give the value of another launcher's option to ours, unless ours was given."""
    to = name.partition(">")[2]
    value = given.values.pop(name)
    origin = given.origins.pop(name)
    ours = option.help.removeprefix("Taken as ").rstrip(".")
    if to == "limit":
        if value not in WORDS_FOR_NONE and value is not None:
            _follow_limits(given, origin, ours.removeprefix("--limit "), str(value))
        return
    if to in given.values:
        given.notes.append(f"{origin} is not used: {given.origins[to]} was given, too")
        return
    if to == "no_progress_limit" and isinstance(value, int) and value <= 0:
        value = None  # NVRx's way to say none
    elif to == "stop_on_repeat":
        value = value == "no-restart"
    elif value is None:
        return  # `null` is NVRx's way not to give it
    given.values[to], given.origins[to] = value, origin
    given.notes.append(f"{origin} is taken as {ours} {_said(value)}")


def _follow_limits(given: Given, origin: str, name: str, value: str) -> None:
    """NVRx gives its first steps, if they may take long, a section `warmup` and a number."""
    texts = [f"{name}{part}".replace(":", "=") for part in value.split(",")]
    limits = [
        limit for limit in texts if limit.rpartition("=")[2].strip().lower() not in WORDS_FOR_NONE
    ]
    if any(limit.startswith(_WARMUP) for limit in limits):
        limits = [
            f"first-step={limit[7:]}" if limit.startswith(_WARMUP) else limit for limit in limits
        ]
        if given.values.setdefault("warmup_steps", _NVRX_WARMUP_STEPS) == _NVRX_WARMUP_STEPS:
            given.notes.append(f"{origin} warmup is for {_NVRX_WARMUP_STEPS} steps: --warmup-steps")
    given.repeated["limit"] = [*limits, *given.repeated.get("limit", [])]  # ours win
    given.limit_origins.update(dict.fromkeys(limits, origin))
    given.notes += [f"{origin} is taken as --limit {limit}" for limit in limits]


def _said(value: Value) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _converted(option: RunOption, name: str, text: str | None) -> Value:
    if option.kind == "flag":
        return option.sets if text is None else not option.sets
    assert text is not None
    if option.choices and text not in option.choices and not option.note:
        close = difflib.get_close_matches(text, option.choices, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UsageError(f"{name} {text!r}: it is one of {', '.join(option.choices)}{hint}")
    if option.kind == "text" or option.note:
        return text
    if text.strip().lower() in WORDS_FOR_NONE and (option.kind == "limit" or ">" in option.to):
        return None
    value = _number(option, text.strip().lower())
    if value is None:
        raise UsageError(f"{name} {text!r}: {_expected(option)}")
    if option.least is not None and value < option.least:
        raise UsageError(f"{name} {text!r}: it must be at least {option.least:g}")
    return value


def _number(option: RunOption, text: str) -> int | float | None:
    if option.kind == "seconds":
        return seconds(text)
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,15}", text) else None


def _expected(option: RunOption) -> str:
    if option.kind == "seconds":
        return "expected seconds, or a time such as 90s, 10m or 2h"
    return "expected a whole number" + (" or none" if option.kind == "limit" else "")
