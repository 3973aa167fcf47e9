"""Check `kernel`: Xids, hardware errors, and killed processes in the log since the boot."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from everstep.messages import CheckResult
from everstep_services.agent.probes.base import CheckState, Look
from everstep_services.agent.probes.kernel import records
from everstep_services.agent.probes.kernel.records import KernelRead, KernelRecord
from everstep_services.agent.probes.kernel.rules import RULES, KernelRule, may_count
from everstep_services.agent.probes.kernel.xid import XidEvent, XidJudgement, judge, table

_XID = re.compile(
    r"^NVRM: Xid \((?:PCI:)?(?P<gpu>[0-9a-fA-F:.]+)\): (?P<number>\d+)(?:, )?(?P<text>.*)"
)
_UUID = re.compile(r"^NVRM: GPU at (?:PCI:)?(?P<gpu>[0-9a-fA-F:.]+): (?P<uuid>GPU-[0-9a-f-]+)")
_KEPT_EACH = 100
"""The most lines that are noted of one kind about one part."""
_KEPT_KINDS = 64
"""The most kinds that are noted, of Xids and of others each: a part and its trouble."""
_TEXT = 160


class KernelLogProbe:
    """Reads the kernel's log since the boot. Unknown Xids never fail."""

    name = "kernel"
    about = "the kernel's log since the boot: Xids, hardware, file systems, memory, hung tasks"
    beside_training = True

    def __init__(self) -> None:
        table()  # read with the code: an upgrade may change it before the first Xid

    def examine(self, look: Look) -> Sequence[CheckResult]:
        """One result for each trouble of a part, or one `ok`."""
        notes = _notes(look)
        try:
            reading = records.read(look.path("dev/kmsg"), notes["position"])
        except FileNotFoundError:
            return [_result("unsupported", "this kernel or container has no /dev/kmsg")]
        except OSError as error:
            return [_result("unknown", f"{_unreadable(error)}")]
        _take(notes, reading)
        now = _uptime(look, reading)
        results = [*_xids(notes, now, look), *_lines(notes, now, look)]
        if reading.has_more:
            results.append(
                _result("unknown", "it grows faster than it can be read: more next time")
            )
        if results:
            return results
        reason = (
            f"{reading.lost} lines were overwritten before they were read" if reading.lost else ""
        )
        return [_result("ok", reason)]


def _notes(look: Look) -> dict[str, Any]:
    """The findings of earlier looks since this boot."""
    boot = look.path("proc/sys/kernel/random/boot_id")
    boot_id = boot.read_text().strip() if boot.is_file() else ""
    if look.memory.get("boot") != boot_id or "xids" not in look.memory:
        look.memory.clear()
        look.memory.update(boot=boot_id, position=-1, xids={}, lines={}, names={})
    return look.memory


def _unreadable(error: OSError) -> str:
    return (
        f"/dev/kmsg may not be read ({error.strerror}): give this user CAP_SYSLOG, or set "
        "kernel.dmesg_restrict=0"
    )


def _uptime(look: Look, reading: KernelRead) -> float:
    """The present, on the clock of the log."""
    latest = max((record.at for record in reading.records), default=0.0)
    try:
        return max(float(look.path("proc/uptime").read_text().split()[0]), latest)
    except (OSError, ValueError, IndexError):
        return latest


def _take(notes: dict[str, Any], reading: KernelRead) -> None:
    """Keep the lines that count, within a bound; the log itself is not kept."""
    notes["position"] = reading.position
    for record in reading.records:
        _take_record(notes, record)
    for kept in (notes["xids"], notes["lines"], notes["names"]):
        for kind in list(kept)[:-_KEPT_KINDS]:
            del kept[kind]


def _take_record(notes: dict[str, Any], record: KernelRecord) -> None:
    text = record.text
    if text.startswith("NVRM:"):
        if named := _UUID.match(text):
            notes["names"][named["gpu"].lower()] = named["uuid"]
        elif xid := _XID.match(text):
            number, gpu = xid["number"], xid["gpu"].lower()
            _keep(notes["xids"], f"{number} {gpu}", record.at, xid["text"])
        return
    if not may_count(text):
        return
    for rule in RULES:
        if (part := rule.is_over(text)) is not None:
            notes["lines"].pop(f"{rule.name} {part}", None)
        elif (part := rule.part(text)) is not None:
            _keep(notes["lines"], f"{rule.name} {part}", record.at, text)
            return


def _keep(kinds: dict[str, Any], kind: str, at: float, text: str) -> None:
    kept = kinds.pop(kind, [])
    # moved to the end: the kind that was silent for longest is forgotten first
    kinds[kind] = [*kept, [at, text[:_TEXT]]][-_KEPT_EACH:]


def _xids(notes: dict[str, Any], now: float, look: Look) -> Iterator[CheckResult]:
    events = [
        XidEvent(at, gpu, int(number), text)
        for kind, lines in notes["xids"].items()
        for number, gpu in [kind.split(" ", 1)]
        for at, text in lines
    ]
    for judged in judge(events, now, look.settings.kernel_window_s):
        if judged.action != "ignore":
            yield _of_xid(judged, notes["names"].get(judged.gpu, judged.gpu))


def _of_xid(judged: XidJudgement, subject: str) -> CheckResult:
    # a process's own fault says nothing about the node: worth a line, not a warning
    state = {"restart_app": "ok", "report": "warning"}.get(judged.action, "failed")
    failure_class = "" if state == "ok" else judged.action
    return CheckResult(
        check="kernel",
        state=state,
        subject=subject,
        reason=f"Xid {judged.number} on {judged.gpu}: {judged.reason}",
        failure_class=failure_class,
        code=f"XID {judged.number}",
    )


def _lines(notes: dict[str, Any], now: float, look: Look) -> Iterator[CheckResult]:
    rules = {rule.name: rule for rule in RULES}
    for kind, lines in notes["lines"].items():
        name, _, part = kind.partition(" ")
        rule = rules[name]
        is_lasting = rule.failure_class == "reboot"
        window_s = math.inf if is_lasting else look.settings.kernel_window_s
        counting = [line for line in lines if now - line[0] <= window_s]
        if len(counting) >= rule.least:
            yield _of_rule(rule, part, counting, now)


def _of_rule(
    rule: KernelRule, part: str, lines: Sequence[Sequence[Any]], now: float
) -> CheckResult:
    at, text = lines[-1]
    more = " or more" if len(lines) == _KEPT_EACH else ""
    times = f"{len(lines)}{more} times, last " if len(lines) > 1 else ""
    return CheckResult(
        check="kernel",
        state=rule.state,
        subject=part,
        reason=f"{rule.about} ({times}{now - at:.0f} s ago): {text}",
        failure_class=rule.failure_class,
        code=rule.name,
    )


def _result(state: CheckState, reason: str) -> CheckResult:
    return CheckResult(check="kernel", state=state, reason=reason)
