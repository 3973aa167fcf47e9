"""A rank's session: what the training says of itself, and what it is asked to do."""

import os
from _thread import RLock
from time import monotonic

from trainer_sdk import layout
from trainer_sdk.agent_lookup import own_link
from trainer_sdk.bootstrap.agent_link import AgentLink
from trainer_sdk.group_timeout import group_timeout_ns
from trainer_sdk.metrics import ReportedMetrics
from trainer_sdk.pauses import Pause, Pauses
from trainer_sdk.sdk_log import quoted
from trainer_sdk.section_table import SECOND_NS, SectionTable
from trainer_sdk.sections import Section, seconds_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, Literal

    from trainer_sdk.kernels import KernelTrace
    from trainer_sdk.trackers import Tracker

_IN_RING = layout.STEPS_ENTRIES - 1
_MOST_STEPS = 1 << 62
_IN_ENDS = layout.ENDS_ENTRIES - 1
_IN_WARMUP = -1.0
_EACH_STEP = -1
_NO_MORE = float("inf")

_PROGRESS_S = layout.PROGRESS_S
_STEP = layout.STEP
_STEPS = layout.STEPS
_STEPS_AT = layout.STEPS_AT
_STOP = layout.STOP_AFTER
_SAVE = layout.SAVE_AFTER
_ENDS_AT = layout.ENDS_AT
_CPU_TIMED = layout.CPU_TIMED


class Session:
    """What runs in the training process. No call of it waits, and none raises into the training.

    Without an agent each call works all the same, and nobody looks.
    """

    def __init__(self, link: AgentLink) -> None:
        self._link = link
        self._words = link.words
        self._table = SectionTable(link.words)
        self._sections = self._table.sections
        self._metrics = ReportedMetrics(link.words, self._table)
        self._pauses = Pauses(link, self._table)
        self._seconds = seconds_of(link.words)
        self._step = self._steps = 0
        self._longest = 0.0
        self._settled = 0
        """What the agent wants of processor times, once that is done; or there is more to do."""
        self._beats = 0
        self._beat = self._longest_beat = 0.0
        self._listens = self._has_seen_stop = False
        self._has_timed_device = False
        """It was begun; where it then failed, it is not begun again."""
        self._kernels: KernelTrace | None = None
        self._trackers: list[Tracker] = []
        self._table.progress(monotonic())

    @property
    def is_watched(self) -> bool:
        """An agent looks at this rank."""
        return self._link.attached

    @property
    def steps_made(self) -> int:
        """The number of the last step that is finished; 0 before the first."""
        return self._step

    @property
    def should_stop(self) -> bool:
        """The training is asked to save and end: true on every rank after the same step."""
        if not self._listens:
            self._listens = True
            self._words[layout.LISTENS] = 1
        after = self._words[_STOP]
        if not after or self._step < after - 1:
            return False
        if not self._has_seen_stop:
            self._has_seen_stop = True
            self._words[layout.STOP_SEEN_NS] = int(monotonic() * SECOND_NS)
            self._link.say("stopping", f'"step":{self._step}')
        return True

    @property
    def should_save(self) -> bool:
        """The training is asked to save and go on: true on every rank after the same step only."""
        return self._words[_SAVE] == self._step + 1

    def section(self, name: str, kind: str = "") -> Section:
        """A named stretch of the step: `with run.section("forward"):`, or as a decorator.

        `kind` is `plain`, `checkpoint` or `evaluation`; by default the name tells it. The last
        two may take long while other ranks wait.
        """
        try:
            return self._sections[name]
        except (KeyError, TypeError):
            return self._table.section(name, kind)

    def begin(self, name: str, kind: str = "") -> None:
        """Enter a section, where a callback does it and another one leaves it."""
        self.section(name, kind).enter()

    def end(self, name: str) -> None:
        """Leave a section that was begun, and whatever is still open inside it."""
        self._table.end(name)

    def end_all(self) -> None:
        """Leave every section that this thread is in."""
        self._table.leave_all(self._table.lane())

    def step(self, number: int | None = None) -> int:
        """A step is finished; its number: the next one, or the one that is given."""
        now = monotonic()
        table = self._table
        took = now - table.stepped - table.long_s
        if took > self._longest:
            if not table.stepped:
                return self._first_step(number, now)
            self._note_step(took, now, self._steps + 1)
        table.stepped = now
        table.long_s = 0.0
        lane = table.main
        if now - lane.moved > lane.longest_gap and not lane.depth:
            table.note_gap(lane, now)
        lane.moved = now
        self._step = step = self._step + 1 if number is None else self._given(number)
        self._steps = steps = self._steps + 1
        words, seconds = self._words, self._seconds
        seconds[_STEPS_AT + (steps & _IN_RING)] = took
        seconds[_ENDS_AT + (steps & _IN_ENDS)] = seconds[_PROGRESS_S] = now
        words[_STEPS] = steps
        words[_STEP] = step
        if words[_CPU_TIMED] != self._settled:
            self._settle()
        return step

    def start_at(self, step: int, *, total: int | None = None) -> None:
        """The training goes on after this step, as a checkpoint says, up to `total` if known."""
        self._step = self._given(step, self._step)
        if total is not None:
            self._words[layout.TOTAL_STEPS] = self._given(total, 0)

    def heartbeat(self) -> None:
        """There is progress that neither a step nor a section shows."""
        now = monotonic()
        lane = self._table.lane()
        if now - lane.moved > lane.longest_gap and not lane.depth:
            self._table.note_gap(lane, now)
        lane.move(now)
        self._beats += 1
        if now - self._beat > self._longest_beat:
            self._note_beat(now)
        self._beat = now
        self._words[layout.BEATS] = self._beats
        self._seconds[_PROGRESS_S] = now

    def warm_up(self, steps: int) -> None:
        """So many first steps of this round may take as long as the very first one."""
        self._words[layout.WARMUP] = self._given(steps, 0)

    def pause(self, for_s: float | None = None, reason: str = "") -> Pause:
        """Judge nothing until `resume`, the end of `with`, or `for_s` seconds are over."""
        return self._pauses.begin(for_s, reason)

    def resume(self) -> None:
        """Judge again, once every pause is over."""
        self._pauses.end_latest()

    def report(self, name: str, value: float) -> None:
        """Show a number of the training: `loss`, `tokens` … the latest is kept."""
        self._metrics.show(name, value)

    def request(self, kind: 'Literal["exclude", "stop"]', reason: str) -> None:
        """Ask that this node be excluded, or the job be stopped; others decide about it."""
        self._link.say("requested", f'"kind":{quoted(kind)},"reason":{quoted(reason)}')

    def trace_kernels(self, *, every_s: float = 10.0) -> bool:
        """Have the agent learn how long kernels take on this rank's accelerator.

        False where that is not possible: without `cupti-python`, a driver, or beside a profiler.
        """
        from trainer_sdk.kernels import KernelTrace

        if self._kernels is None:
            self._kernels = KernelTrace(self._link.folder, every_s=every_s)
        return self._kernels.start()

    def time_device(self) -> bool:
        """Have sections measure their time on this rank's accelerator, too, by CUDA events.

        Nothing waits for these. False where CUDA is not initialised, and where no agent looks.
        """
        from trainer_sdk.device_timer import device_timer

        table = self._table
        if table.device is None and self._link.attached and not self._has_timed_device:
            try:
                timer = device_timer()
            except Exception as error:  # noqa: BLE001 - a torch that is none
                table.give_up_device(error)
                return False
            self._has_timed_device = timer is not None
            table.time_device(timer)
            self._settled = _EACH_STEP
        return table.device is not None

    def report_to_tensorboard(self, folder: str, *, every_s: float = 10.0) -> bool:
        """Write what is reported, and medians of steps and sections, to TensorBoard, too.

        In `folder/rank-N`. False, after a warning line, where that is not possible.
        """
        from trainer_sdk.trackers import TensorBoard, tracker_of

        rank = self._words[layout.RANK] if self._link.attached else os.environ.get("RANK", "0")  # noqa: TID251
        place = os.path.join(os.fspath(folder), f"rank-{rank}")
        return self._track(tracker_of(lambda: TensorBoard(place), *self._figures(), every_s))

    def report_to_wandb(self, run: "Any", *, every_s: float = 10.0) -> bool:
        """Add the same figures to a run of Weights & Biases, in the rows that the script logs.

        `run` is what `wandb.init()` returns. False, after a warning line, where it is none.
        """
        from trainer_sdk.trackers import WandbRun, tracker_of

        return self._track(tracker_of(lambda: WandbRun(run), *self._figures(), every_s))

    def close(self) -> None:
        """The training is over; what follows is leaving."""
        for tracker in self._trackers:
            tracker.close()
        self._trackers.clear()
        if self._kernels is not None:
            self._kernels.stop()
        self.end_all()
        now = monotonic()
        self._table.progress(now)
        self._seconds[layout.CLOSED_S] = now

    def _figures(self) -> "tuple[Callable[[], memoryview[int]], Callable[[], int]]":
        """What a tracker reads: the page, and the step that it has come to."""
        return lambda: self._words, lambda: self._step

    def _track(self, tracker: "Tracker | None") -> bool:
        if tracker is not None:
            self._trackers.append(tracker)
        return tracker is not None

    def _detach(self) -> None:
        """Write to memory of its own from now on: this process does not speak for the rank."""
        self._link.detach()
        self._words = self._link.words
        self._seconds = seconds_of(self._words)
        self._metrics.detach(self._words)
        self._pauses.detach()
        self._table.detach(self._words)

    def __enter__(self) -> "Session":
        self._table.progress(monotonic())
        return self

    def __exit__(
        self,
        kind: "type[BaseException] | None",
        error: "BaseException | None",
        trace: "TracebackType | None",
    ) -> None:
        self.close()

    def _first_step(self, number: int | None, now: float) -> int:
        """The optimizer may have counted some before it, and has perhaps counted this one."""
        table, words = self._table, self._words
        table.lead()
        table.stepped = now
        table.long_s = 0.0
        self._step = step = self._step + 1 if number is None else self._given(number)
        self._steps = max(1, words[_STEPS])
        words[layout.COUNTED_BY] = layout.BY_SDK
        words[layout.LONGEST_STEP_NS] = 0
        table.progress(now)
        self._seconds[_ENDS_AT + (self._steps & _IN_ENDS)] = now
        words[_STEPS] = self._steps
        words[_STEP] = step
        table.main.move(now)
        self._settle()
        if self._beats:
            self._note_beat(now)
        self._longest, self._longest_beat = _IN_WARMUP, _NO_MORE
        self._note_step(0.0, now, self._steps)
        timeout_ns = group_timeout_ns()
        if timeout_ns is not None:
            words[layout.GROUP_TIMEOUT_NS] = timeout_ns
        if not words[layout.FIRST_STEP_NS]:
            self._link.first_step()
        return step

    def _settle(self) -> None:
        """Measure processor times as the agent wants, and take times from the accelerator."""
        table, wanted = self._table, self._words[_CPU_TIMED]
        if table.is_cpu_timed != bool(wanted):
            table.time_cpu(is_wanted=bool(wanted))
        if table.device is not None:
            try:
                table.device.resolve()
            except Exception as error:  # noqa: BLE001 - no error of a measurement is the training's
                table.give_up_device(error)
        self._settled = wanted if table.device is None else _EACH_STEP

    def _note_step(self, took: float, now: float, steps: int) -> None:
        """Never before has one taken so long; or it is one of those that may take long."""
        words = self._words
        if self._longest != _IN_WARMUP:
            self._longest = took
            words[layout.LONGEST_STEP_NS] = int(took * SECOND_NS)
        elif steps >= (words[layout.WARMUP_GIVEN] or words[layout.WARMUP]):
            self._longest = 0.0
            self._table.begin_learning(now)

    def _note_beat(self, now: float) -> None:
        """The first one, or never before was there none for so long."""
        if not self._seconds[layout.FIRST_BEAT_S]:
            self._seconds[layout.FIRST_BEAT_S] = now
            return
        gap = now - self._table.typical_since(self._beat)
        if gap > self._longest_beat:
            self._longest_beat = self._seconds[layout.LONGEST_BEAT_S] = gap

    def _given(self, number: object, otherwise: int | None = None) -> int:
        try:
            step = int(number)  # type: ignore[call-overload]
        except Exception:  # noqa: BLE001 - whatever it is, it is no number
            step = -1
        if 0 <= step < _MOST_STEPS:
            return int(step)
        self._table.misused(f"{quoted(number)} is no number of a step; steps are counted from 0 up")
        return self._step + 1 if otherwise is None else otherwise


_own: Session | None = None
_opening = RLock()


def session() -> Session:
    """The session of this process, always the same one."""
    global _own  # noqa: PLW0603 - a process has one
    if _own is None:
        with _opening:
            if _own is None:
                _own = Session(own_link(os.environ))  # noqa: TID251 - a script has no settings file of ours
    return _own


def replace_session(other: Session | None) -> Session | None:
    """Make another one the session of this process, for a test; the one that it was."""
    global _own
    before, _own = _own, other
    return before


def _detach_own() -> None:
    """A process that the script has forked is not the rank, and must not speak for it."""
    global _opening  # noqa: PLW0603 - another thread of the rank may have held it
    _opening = RLock()
    if _own is not None:
        _own._detach()  # noqa: SLF001 - of this module


os.register_at_fork(after_in_child=_detach_own)
