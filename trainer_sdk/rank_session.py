"""A rank's session: the training reports its progress, and receives requests to stop or save."""

import os
from _thread import RLock
from time import monotonic

from trainer_sdk import layout
from trainer_sdk.agent_lookup import own_link
from trainer_sdk.bootstrap.agent_link import AgentLink
from trainer_sdk.bootstrap.group_timeout import group_timeout_ns
from trainer_sdk.environment import environ
from trainer_sdk.pauses import Pause, Pauses
from trainer_sdk.sdk_log import quoted
from trainer_sdk.section_table import SECOND_NS, ReportedMetrics, SectionTable
from trainer_sdk.sections import Section, seconds_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, MutableMapping
    from types import TracebackType
    from typing import Any, Literal, TypeVar

    from trainer_sdk.checkpoint.checkpointer import Checkpointer
    from trainer_sdk.device.kernels import KernelTrace
    from trainer_sdk.numerics.numerics import Numerics
    from trainer_sdk.numerics.policy import Action
    from trainer_sdk.survive.share import BatchShare
    from trainer_sdk.trackers import Tracker

    R = TypeVar("R")

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
    """The session of a training. Its calls never wait, and never raise into the training.

    Without an agent the calls work as well, and have no effect.
    """

    def __init__(self, link: AgentLink) -> None:
        self._link = link
        link.has_session = True
        self._words = link.words
        self._table = SectionTable(link.words)
        self._sections = self._table.sections
        self._metrics = ReportedMetrics(link.words, self._table)
        self._pauses = Pauses(link, self._table)
        self._step = 0
        self._begin_counts()
        self._has_timed_device = False
        """Whether timing on the accelerator was ever begun; after a failure it does not restart."""
        self._kernels: KernelTrace | None = None
        self._trackers: list[Tracker] = []
        self._endings: list[Callable[[], object]] = []
        self._table.progress(monotonic())

    def _begin_counts(self) -> None:
        """Begin what is counted in a round."""
        self._seconds = seconds_of(self._words)
        self._steps = 0
        self._longest = 0.0
        self._settled = 0
        """The applied choice of the agent about processor times; `_EACH_STEP` for more work."""
        self._beats = 0
        self._beat = self._longest_beat = 0.0
        self._listens = self._has_seen_stop = False

    @property
    def is_watched(self) -> bool:
        """Whether an agent watches this rank."""
        return self._link.attached

    @property
    def steps_made(self) -> int:
        """The number of the last finished step; 0 before the first."""
        return self._step

    @property
    def should_stop(self) -> bool:
        """Whether the training must save and end; true on all ranks after the same step."""
        if not self._listens:
            self._listens = True
            self._words[layout.LISTENS] = 1
        after = self._words[_STOP]
        if not after or self._step < after - 1:
            return False
        if not self._has_seen_stop:
            self._has_seen_stop = True
            self._words[layout.STOP_SEEN_NS] = int(monotonic() * SECOND_NS)
            self._link.send("stopping", f'"step":{self._step}')
        return True

    @property
    def should_save(self) -> bool:
        """Whether the training must save and go on; true on all ranks after the same step only."""
        return self._words[_SAVE] == self._step + 1

    def section(self, name: str, kind: str = "") -> Section:
        """A named stretch of the step: `with run.section("forward"):`, or as a decorator.

        `kind` is `plain`, `checkpoint` or `evaluation`; by default it follows from the name.
        Sections of the last two kinds may take long while other ranks wait.
        """
        try:
            return self._sections[name]
        except (KeyError, TypeError):
            return self._table.section(name, kind)

    def begin(self, name: str, kind: str = "") -> None:
        """Enter a section; for scripts that enter and leave it in different callbacks."""
        self.section(name, kind).enter()

    def end(self, name: str) -> None:
        """Leave a section that `begin` has entered, and all that are still open inside it."""
        self._table.end(name)

    def end_all(self) -> None:
        """Leave every section that this thread is in."""
        self._table.leave_all(self._table.lane())

    def step(self, number: int | None = None) -> int:
        """Note a finished step; returns its number, which is the given one or the next."""
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
        """Note that the training resumes after this step, and goes up to `total` steps."""
        self._step = self._given(step, self._step)
        self._link.resumed_at = self._step
        self._words[layout.NUMBERED] = 1
        if total is not None:
            self._words[layout.TOTAL_STEPS] = self._given(total, 0)

    def heartbeat(self) -> None:
        """Note progress that neither a step nor a section shows."""
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
        """Allow this number of first steps of the round to take as long as the very first."""
        self._words[layout.WARMUP] = self._given(steps, 0)

    def pause(self, for_s: float | None = None, reason: str = "") -> Pause:
        """Keep the agent from judging this rank until `resume`, the end of `with`, or `for_s`."""
        return self._pauses.begin(for_s, reason)

    def resume(self) -> None:
        """End the latest pause; the agent judges the rank again when no pause is open."""
        self._pauses.end_latest()

    def report(self, name: str, value: float) -> None:
        """Report a metric of the training, as `loss` or `tokens`; its latest value is shown."""
        self._metrics.show(name, value)

    def request(self, kind: 'Literal["exclude", "restart", "stop"]', reason: str) -> None:
        """Request that this node be excluded, another round, or the end of the job.

        The control plane decides.
        """
        self._request(kind, reason)

    def _request(self, kind: str, reason: str, origin: str = "script") -> None:
        body = f'"kind":{quoted(kind)},"reason":{quoted(reason)},"origin":{quoted(origin)}'
        self._link.send("requested", body)

    def trace_kernels(self, *, every_s: float = 10.0) -> bool:
        """Measure for the agent how long kernels take on this rank's accelerator.

        False if that is not possible: without `cupti-python` or a driver, or under a profiler.
        """
        from trainer_sdk.device.kernels import KernelTrace

        if self._kernels is None:
            self._kernels = KernelTrace(self._link.folder, every_s=every_s)
        return self._kernels.start()

    def numerics(  # noqa: PLR0913 - each is a choice of the training
        self,
        state: "MutableMapping[str, Any]",
        batches: "Iterable[Any] | None" = None,
        *,
        mode: 'Literal["disabled", "observe", "validate_results", "report_determinism_stats"]' = (
            "observe"
        ),
        validate_every: int = 0,
        hash_every: int = 100,
        read: 'Literal["late", "now"]' = "late",
        replicas: "Any" = None,
        checkpointer: "Checkpointer | None" = None,
        root: str = "",
        transient: "Action | None" = None,
        persistent: "Action | None" = None,
        unexpected: "Action | None" = None,
        not_reproducible: "Action | None" = None,
        replica: "Action | None" = None,
        refused: 'Literal["observe", "stop"]' = "observe",
        budget: int = 3,
        elsewhere: 'Literal["report", "move"]' = "report",
    ) -> "Numerics":
        """Look at the results of each step, and decide which steps count; all ranks call it.

        `state` is the mapping that is given to `Checkpointer`, `batches` a loader or any iterable.

        `mode`: `disabled`; `observe` only reports; `validate_results` runs a step with an
        unexpected result again, and each `validate_every`-th step; `report_determinism_stats` runs
        each step again, and counts what differs. Each `hash_every` steps the parameters of replicas
        are compared: those of DDP and of DTensors, and else of the process group `replicas`.
        `read="now"` waits for values on a GPU; with `late` the step comes too late to run again.

        What is done about a result of the kind `transient`, `persistent`, `unexpected`,
        `not_reproducible` or `replica`: `observe`, `again` (only `transient`, and its default in
        `validate_results`), `rollback`, `skip`, `exclude` or `stop`; in the whole job `budget`
        times at most. If an action cannot be taken, the training goes on, or ends with
        `refused="stop"`. A way back needs the `checkpointer`, or the folder `root` of the
        checkpoints. With `elsewhere="move"` the ranks continue on other nodes where only these can
        tell.
        """
        choices = dict(locals())
        del choices["self"]
        from trainer_sdk.numerics.numerics import Numerics

        return Numerics(self, **choices)

    def survive(
        self,
        build: "Callable[[], dict[str, Any]]",
        *,
        checkpointer: "Callable[[], Checkpointer] | None" = None,
        place: str = "",
        seed: int = 0,
        park_within_s: float = 2.0,
        backend: str | None = None,
    ) -> "Callable[[Callable[..., R]], Callable[[], R]]":
        """Decorate `train(state, step)`: its process goes on when other ranks have failed.

        `build` makes the state: model, optimizer, position in the data. `train` is called with it
        and the last finished step, at first and again after each change of the group, which is
        made here. See `docs/guides/survive.md` for what both must promise.

        `checkpointer` makes the `Checkpointer`, which `train` gets as a third argument. Equal texts
        `place` mark replicas, if tensors do not tell. `seed` and rank seed each step. A rank that
        does not leave its step for `park_within_s` is started anew.
        """
        choices = dict(locals())
        del choices["self"]
        from trainer_sdk.survive.loop import SurvivalChoices, survive

        return survive(self, SurvivalChoices(**choices))

    def share(
        self,
        global_batch: int,
        *,
        at_most: int | None = None,
        place: tuple[int, int] | None = None,
        is_averaged: bool = True,
    ) -> "BatchShare":
        """Share the batch of each step: the rank gets micro-batches of at most `at_most` samples.

        All ranks together have `global_batch` samples in a step, whatever the number of ranks.
        `place` is the data-parallel rank, and how many there are; by default that of the default
        group. `is_averaged` tells whether gradients are averaged over ranks, as DDP and FSDP do;
        otherwise they are summed.
        """
        from trainer_sdk.survive.share import BatchShare

        return BatchShare.of(global_batch, at_most=at_most, place=place, is_averaged=is_averaged)

    def time_device(self) -> bool:
        """Have sections also measure their time on this rank's accelerator, by CUDA events.

        The training never waits for them. False if CUDA is not initialised, or without an agent.
        """
        from trainer_sdk.device.device_timer import device_timer

        table = self._table
        if table.device is None and self._link.attached and not self._has_timed_device:
            try:
                timer = device_timer()
            except Exception as error:  # noqa: BLE001 - the module `torch` may be anything
                table.give_up_device(error)
                return False
            self._has_timed_device = timer is not None
            table.time_device(timer)
            self._settled = _EACH_STEP
        return table.device is not None

    def report_to_tensorboard(self, folder: str, *, every_s: float = 10.0) -> bool:
        """Write the metrics, and medians of steps and sections, to TensorBoard as well.

        They are in `folder/rank-N`. False, after a warning, if that is not possible.
        """
        from trainer_sdk.trackers import TensorBoard, tracker_of

        rank = self._words[layout.RANK] if self._link.attached else environ.get("RANK", "0")
        place = os.path.join(os.fspath(folder), f"rank-{rank}")
        return self._track(tracker_of(lambda: TensorBoard(place), *self._figures(), every_s))

    def report_to_wandb(self, run: "Any", *, every_s: float = 10.0) -> bool:
        """Add the same figures to a run of Weights & Biases, in the rows that the script logs.

        `run` is the result of `wandb.init()`. False, after a warning, if it is anything else.
        """
        from trainer_sdk.trackers import WandbRun, tracker_of

        return self._track(tracker_of(lambda: WandbRun(run), *self._figures(), every_s))

    def close(self) -> None:
        """Close the session: the training is over, and the process is about to exit."""
        self._seconds[layout.CLOSED_S] = monotonic()  # the endings may wait for other ranks
        endings, self._endings = self._endings, []
        for end in endings if not self._has_seen_stop else ():
            end()
        for tracker in self._trackers:
            tracker.close()
        self._trackers.clear()
        if self._kernels is not None:
            self._kernels.stop()
        self.end_all()
        now = monotonic()
        self._table.progress(now)
        self._seconds[layout.CLOSED_S] = now

    def _figures(self) -> "tuple[Callable[[], memoryview[int]], Callable[[], int], str]":
        """The sources of a tracker: the page, the number of the last step, and a file of rank 0."""
        folder = self._link.folder if self._link.attached and not self._words[layout.RANK] else ""
        spreads = os.path.join(folder, layout.SPREADS_FILE) if folder else ""
        return lambda: self._words, lambda: self._step, spreads

    def _track(self, tracker: "Tracker | None") -> bool:
        if tracker is not None:
            self._trackers.append(tracker)
        return tracker is not None

    def _mark(self, name: str, step: int) -> None:
        """Mark a step in the trackers, as that of a roll-back."""
        for tracker in self._trackers:
            tracker.mark(name, step)

    def _tear(self) -> None:
        """Note that the state begins to become that of another step: a hook for `survive`."""

    def _at_close(self, ending: "Callable[[], object]") -> None:
        """Call this at the good end of a training that was not asked to stop."""
        self._endings.append(ending)

    def _begin_round(self, environ: "Mapping[str, str]") -> None:
        """Go on in another round, with its page; KeyError, OSError or ValueError if that fails."""
        self.end_all()
        self._link.begin_round(environ)
        self._words = self._link.words
        self._begin_counts()
        self._pauses.begin_round()
        self._metrics.begin_round(self._words)
        self._table.begin_round(self._words)
        if self._table.device is not None:
            self._settled = _EACH_STEP
        self._table.progress(monotonic())
        self._link.up()

    def _detach(self) -> None:
        """Write to private memory from now on: this process is not the rank."""
        self._endings.clear()
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
        if kind is not None:
            self._endings.clear()
        self.close()

    def _first_step(self, number: int | None, now: float) -> int:
        """Note the first step; the optimizer may have counted steps before, and this one."""
        table, words = self._table, self._words
        table.lead()
        table.stepped = now
        table.long_s = 0.0
        self._step = step = self._step + 1 if number is None else self._given(number)
        if number is not None:
            words[layout.NUMBERED] = 1
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
        """Apply the agent's choice about processor times, and read times from the accelerator."""
        table, wanted = self._table, self._words[_CPU_TIMED]
        if table.is_cpu_timed != bool(wanted):
            table.time_cpu(is_wanted=bool(wanted))
        if table.device is not None:
            try:
                table.device.resolve()
            except Exception as error:  # noqa: BLE001 - a failed measurement must not fail the training
                table.give_up_device(error)
        self._settled = wanted if table.device is None else _EACH_STEP

    def _note_step(self, took: float, now: float, steps: int) -> None:
        """Note a step that is the longest so far, or that belongs to the warmup."""
        words = self._words
        if self._longest != _IN_WARMUP:
            self._longest = took
            words[layout.LONGEST_STEP_NS] = int(took * SECOND_NS)
        elif steps >= (words[layout.WARMUP_GIVEN] or words[layout.WARMUP]):
            self._longest = 0.0
            self._table.begin_learning(now)

    def _note_beat(self, now: float) -> None:
        """Note the first heartbeat, or the longest time so far between two."""
        if not self._seconds[layout.FIRST_BEAT_S]:
            self._seconds[layout.FIRST_BEAT_S] = now
            return
        gap = now - self._table.typical_since(self._beat)
        if gap > self._longest_beat:
            self._longest_beat = self._seconds[layout.LONGEST_BEAT_S] = gap

    def _given(self, number: object, otherwise: int | None = None) -> int:
        try:
            step = int(number)  # type: ignore[call-overload]
        except Exception:  # noqa: BLE001 - it is not a number
            step = -1
        if 0 <= step < _MOST_STEPS:
            return int(step)
        self._table.misused(
            f"{quoted(number)} is not the number of a step, which is an integer from 0 up"
        )
        return self._step + 1 if otherwise is None else otherwise


_own: Session | None = None
_opening = RLock()


def session() -> Session:
    """The session of this process, always the same object."""
    global _own  # noqa: PLW0603 - a process has a single session
    if _own is None:
        with _opening:
            if _own is None:
                _own = Session(own_link(environ))
    return _own


def replace_session(other: Session | None) -> Session | None:
    """Replace the session of this process, for a test; returns the former session."""
    global _own
    former, _own = _own, other
    return former


def _detach_own() -> None:
    """Detach the session in a process that the script has forked: it is not the rank."""
    global _opening  # noqa: PLW0603 - another thread of the rank may have held it
    _opening = RLock()
    if _own is not None:
        _own._detach()  # noqa: SLF001 - a class of this module


os.register_at_fork(after_in_child=_detach_own)
