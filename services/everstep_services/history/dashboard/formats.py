"""How pages write numbers, times and words. Every text from outside passes `shown`."""

from collections.abc import Mapping, Sequence
from datetime import MAXYEAR, MINYEAR, UTC, datetime
from typing import Any

from markupsafe import Markup, escape

from everstep.observe.printable import beginning, printable

_CUT_AT = 20_000
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STEPS = ((86_400 * 2, 86_400, "d"), (5_400, 3_600, "h"), (90, 60, "min"), (0, 1, "s"))
_UNITS_OF_TIME = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))
_SENTENCE = 80
"""A text that may be as long is a sentence; a shorter one is a name."""
NOTHING = "—"

_WORDS: Mapping[str, str] = {
    "ok ●": "running done recovered healthy joined pass passed ok cleared armed verified confirmed "
    "completed finished good serving",
    "info ◐": "starting forming waiting restarting learning pinned standby warm started scheduled "
    "observed asked stopping",
    "warn ▲": "stalled suspect warn warning paused degraded braked open inconclusive draining "
    "merged quarantined excluded refused repeated",
    "bad ■": "failed lost fail unhealthy missing off critical gave_up error exited",
}
TONES: Mapping[str, tuple[str, str]] = {
    word: (tone[:-2], tone[-1]) for tone, words in _WORDS.items() for word in words.split()
}
"""Word → tone and mark. A tone has one colour, and a mark that needs no colour."""


def shown(value: Any) -> Any:
    """Text without control characters, and not longer than a page can bear."""
    if value is None:
        return NOTHING
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    if len(value) > _CUT_AT:
        value = f"{value[:_CUT_AT]} … ({len(value) - _CUT_AT} characters more)"
    return printable(value)


def clip(value: str | None, most: int = 160) -> str:
    """The beginning of a long text, and the end of a sentence: it often tells what was decided."""
    if not value:
        return NOTHING
    if len(value) <= most:
        return value
    end = most // 3 if most >= _SENTENCE else 0
    _, mark, last = value.rpartition("; ")
    tail = f"; {last}" if mark else value[len(value) - end :].partition(" ")[2]
    if len(tail) > end:  # a part of a clause may say the contrary of the whole
        tail = ""
    room = most - len(tail)
    whole = value.rfind("; ", 0, room - 1) if end else 0
    if whole >= room // 3:
        return f"{value[:whole]}; …{tail.removeprefix(';')}"
    return f"{beginning(value, room)}{tail}"


def moment(text: str | datetime | None) -> datetime | None:
    """A time as REST writes it; None also for one at the ends of time, where no sum is a time."""
    if isinstance(text, datetime):
        return text
    if not text:
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    if not MINYEAR < time.year < MAXYEAR:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def when(text: str | datetime | None, now: datetime) -> Markup:
    """How long ago, with the exact time on hover."""
    at = moment(text)
    if at is None:
        return Markup(NOTHING)  # noqa: S704  our own
    exact = at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        at.astimezone(UTC).isoformat(), exact, relative((now - at).total_seconds())
    )


def is_excluded(node: Mapping[str, Any], now: datetime) -> bool:
    """Whether a node is excluded, and its exclusion has not ended."""
    end = moment(node["excluded_until_at"])
    return bool(node["is_excluded"]) and (end is None or end > now)


def day_time(at: datetime) -> str:
    """A day and a time, to the minute."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def clock_time(text: str | datetime | None) -> str:
    """The time of day of a line of a log, to the millisecond."""
    at = moment(text)
    return NOTHING if at is None else f"{at.astimezone(UTC):%H:%M:%S.%f}"[:-3]


def relative(age_s: float) -> str:
    """An age in words; what is to come has `in` before it."""
    if abs(age_s) < 2:
        return "now"
    text = coarse(abs(age_s))
    return f"{text} ago" if age_s > 0 else f"in {text}"


def coarse(seconds: float) -> str:
    """A span in one unit, for what does not matter to the second."""
    for least, unit_s, name in _STEPS:
        if seconds >= least:
            return f"{seconds / unit_s:.0f} {name}"
    return "0 s"


def duration(seconds: float | None) -> str:
    """A span in two units at most."""
    if seconds is None:
        return NOTHING
    if seconds < 60:
        return _short(seconds)
    whole = round(seconds)
    for unit_s, name, lower_s, lower in _UNITS_OF_TIME:
        if whole >= unit_s:
            rest = whole % unit_s // lower_s
            return f"{whole // unit_s} {name}" + (f" {rest} {lower}" if rest else "")
    return f"{whole} s"


def _short(seconds: float) -> str:
    if seconds <= 0:
        return "0"
    if seconds < 0.0009995:
        return f"{_three(seconds * 1e6)} µs"
    return f"{_three(seconds * 1000)} ms" if seconds < 0.9995 else f"{_three(seconds)} s"


def _three(value: float) -> str:
    """Three digits, and all of those before the point: never `1e+03`."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def size(count: float | None) -> str:
    """Bytes, in binary units."""
    if count is None:
        return NOTHING
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 else f"{_three(value)} {_UNITS[unit]}"


def number(value: float | None) -> str:
    """With thin spaces between thousands."""
    if value is None:
        return NOTHING
    if isinstance(value, int) or 1e5 <= abs(value) < 1e15:
        text = f"{value:,.0f}"
    else:
        text = f"{value:,.6g}"
    return text.replace(",", "\u202f")


def gist(fact: Mapping[str, Any]) -> str:
    """What a fact says, in one line."""
    body = fact["body"]
    step, each_s, tier = body.get("step"), body.get("step_p50_s"), body.get("tier")
    if fact["kind"] in {"progress_made", "checkpoint_committed"} and isinstance(step, int):
        text = f"step {number(step)}"
        if isinstance(each_s, int | float) and each_s:
            text += f", {duration(each_s)} a step"
        return f"{text} is saved in the tier {tier}" if isinstance(tier, str) else text
    if fact["kind"] == "rank_exited":
        end = body.get("signal") or f"exit code {body.get('exit_code')}"
        return f"rank {body.get('rank')} ended: {end}"
    if fact["kind"] == "node_check_finished":
        health = {True: "healthy", False: "unhealthy"}.get(body.get("is_healthy"), "not known")
        return f"{words(body.get('occasion'))}: {health}"
    if fact["kind"] == "heat_map_drawn":
        return f"the own times of ranks in the last {len(body.get('windows', ()))} windows"
    text = body.get("reason") or body.get("summary") or body.get("state") or body.get("signal")
    if fact["kind"] == "operator_acted":
        refused = "" if body.get("outcome") == "accepted" else f", {words(body.get('outcome'))}"
        text = f"{act(body)}{refused}: {text}"
    if text and body.get("by"):
        return f"{body['by']}: {text}"
    about = [f"{name} {body[name]}" for name in ("rank", "round") if body.get(name) is not None]
    return str(text or ", ".join(about))


def act(body: Mapping[str, Any]) -> str:
    """What a person asked for, and of what."""
    return " ".join(filter(None, (words(body.get("action")), body.get("target"))))


def percent(ratio: float | None) -> str:
    """A ratio, in hundredths."""
    if ratio is None:
        return NOTHING
    if 0 < abs(ratio) < 0.0005:
        return "<\u202f0.1\u202f%"
    return f"{_three(ratio * 100)}\u202f%" if abs(ratio) >= 0.01 else f"{ratio * 100:.1f}\u202f%"


def judged(name: str | None, confidence: float | None = None) -> Markup:
    """A cause with the confidence in it; nobody can be sure of a cause that is not known."""
    if name == "unknown":
        return Markup("not known")
    sure = "" if confidence is None else Markup(" <small>{}</small>").format(percent(confidence))
    return Markup("{}{}").format(shown(words(name)), sure)


def words(name: str | None) -> str:
    """A name from the wire, as people write it."""
    return NOTHING if not name else name.replace("_", " ")


def ranks(numbers: Sequence[int] | None, most: int = 12) -> str:
    """Ranks as ranges: `0–3, 7`."""
    if not numbers:
        return NOTHING
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(first) if first == last else f"{first}–{last}" for first, last in runs[:most]]
    return ", ".join(texts) + (f", and {len(runs) - most} more" if len(runs) > most else "")


def tone(word: str | None) -> str:
    """The tone of a state: `ok`, `info`, `warn`, `bad` or `idle`."""
    return TONES.get(word or "", ("idle", "○"))[0]


def chip(word: str | None, text: str | None = None) -> Markup:
    """A state with its colour and its mark."""
    name, mark = TONES.get(word or "", ("idle", "○"))
    label = shown(text or words(word))
    return Markup('<span class="chip {}"><span aria-hidden="true">{}</span>{}</span>').format(
        name, mark, escape(label)
    )
