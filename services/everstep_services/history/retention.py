"""Removes old jobs: in the replica that writes the record, one after another, each as a unit.

    old and not kept ─▶ audit fact on the bus ─▶ the job is in no list ─▶ pages of rows ─▶
    output and evidence on the bus ─▶ done

A removal that was begun is finished by whichever replica writes next.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta

import msgspec

from everstep.bus.errors import BusError
from everstep.bus.input_failures import InputFailures
from everstep.bus.ports import Blobs, Bus
from everstep.bus.topology import CHECKPOINTS
from everstep.clock import Clock
from everstep.messages import CheckpointsDocument, Fact, OperatorActed
from everstep.store.errors import StoreError
from everstep.store.job_removal import JobRemovals, OldJob, Removal
from everstep.store.times import to_us
from everstep.subjects import CLUSTER
from everstep_services.history.settings import HistorySettings

log = logging.getLogger(__name__)


_SMALLEST, _LARGEST = 100, 2000
_TOO_LONG_S, _SHORT_S = 0.03, 0.01
_REST_AT_LEAST_S = 0.01


def reason_to_keep(
    labels: Mapping[str, str],
    *,
    wanted: Collection[str],
    is_corrected: bool,
    pinned_steps: Collection[int],
) -> str:
    """Why an old job stays; empty for one that goes. `wanted` has labels as `name=value`."""
    kept_by = [f"{name}={value}" for name, value in labels.items() if f"{name}={value}" in wanted]
    if kept_by:
        return f"it has the label {kept_by[0]}"
    if pinned_steps:
        return f"its checkpoint of step {max(pinned_steps)} is pinned"
    if is_corrected:
        return "a person has named the cause of one of its incidents"
    return ""


@dataclass(slots=True)
class PagePace:
    """Pages that hold the writer's lock for some ten milliseconds, and as much time for others."""

    rows: int = 200

    def rest_s(self, took_s: float) -> float:
        """How long others go first; the next page has another size if this one was too slow."""
        if took_s > _TOO_LONG_S:
            self.rows = max(_SMALLEST, self.rows // 2)
        elif took_s < _SHORT_S:
            self.rows = min(_LARGEST, self.rows * 2)
        return max(_REST_AT_LEAST_S, took_s)


_LOOK_EVERY_S = 600.0
_AGAIN_AFTER_S = 30.0
_AT_ONCE = 50
_INDEXES = msgspec.json.Decoder(CheckpointsDocument)
_LABELS = msgspec.json.Decoder(dict[str, str])


class JobRetention:
    """Removes jobs whose last fact is older than `history.keep_jobs_days`."""

    def __init__(
        self,
        settings: HistorySettings,
        removals: JobRemovals,
        bus: Bus,
        clock: Clock,
        record: Callable[[Fact], Awaitable[None]],
        derive: Callable[..., str],
    ) -> None:
        self._settings = settings
        self._derive = derive
        self._removals = removals
        self._bus = bus
        self._clock = clock
        self._record = record
        self._input_failures = InputFailures("retention")
        self._counts = {"jobs_total": 0, "facts_total": 0, "rows_total": 0, "pages_total": 0}
        self._slowest_s = 0.0
        self._kept = 0
        self._is_failing = False

    def statistics(self) -> dict[str, float]:
        """For `/metrics`."""
        return {
            **{name: float(count) for name, count in self._counts.items()},
            "kept": float(self._kept),
            "slowest_page_seconds": self._slowest_s,
            "input_failures_total": float(self._input_failures.failures),
        }

    async def remove_for_ever(self, *, is_mine: Callable[[], bool]) -> None:
        """Look for old jobs every ten minutes, while this replica writes the record."""
        while True:
            wait_s = _LOOK_EVERY_S
            if not is_mine() or not await self._removed():
                wait_s = _AGAIN_AFTER_S
            await self._clock.sleep(wait_s)

    async def remove_old(self) -> int:
        """Finish what was begun, then remove every old job that nothing keeps; how many went."""
        removed = 0
        for job in await self._removals.unfinished():
            await self._remove(Removal(job))
            removed += 1
        days = self._settings.keep_jobs_days
        if not days:  # jobs are kept for ever
            return removed
        before_us = to_us(self._clock.wall() - timedelta(days=days))
        after_us, kept = 0, 0
        while True:
            jobs = await self._removals.old_jobs(before_us, most=_AT_ONCE, after_us=after_us)
            for old in jobs:
                after_us = old.updated_us
                reason = await self._reason_to_keep(old)
                if reason:
                    kept += 1
                    log.debug("old_job_stays job=%s reason=%s", old.job, reason)
                    continue
                await self._record(self._audit(old, days))
                begun = await self._removals.begin(old.job, to_us(self._clock.wall()))
                await self._remove(begun)
                removed += 1
            if len(jobs) < _AT_ONCE:
                self._kept = kept
                return removed

    async def _removed(self) -> bool:
        """Whether all of it could be done; False when it must be tried again soon."""
        try:
            await self.remove_old()
        except (BusError, StoreError, TimeoutError) as error:
            if not self._is_failing:
                log.warning("old_jobs_wait error=%s", str(error) or type(error).__name__)
            self._is_failing = True
            return False
        except Exception as error:  # noqa: BLE001  the API and the projector go on
            self._input_failures.note("a removal", error)
            return False
        self._is_failing = False
        return True

    async def _remove(self, removal: Removal) -> None:
        pace, is_more = PagePace(), True
        while is_more:
            began = self._clock.now()
            is_more = await self._removals.remove_some(removal, pace.rows)
            took_s = self._clock.now() - began
            self._slowest_s = max(self._slowest_s, took_s)
            self._counts["pages_total"] += is_more
            await self._clock.sleep(pace.rest_s(took_s))
        await self._bus.rank_logs.remove(removal.job)
        await self._bus.blobs.remove(removal.job)
        await self._removals.finish(removal.job)
        self._counts["jobs_total"] += 1
        self._counts["facts_total"] += removal.facts
        self._counts["rows_total"] += removal.rows
        log.info("job_removed job=%s facts=%d rows=%d", removal.job, removal.facts, removal.rows)

    async def _reason_to_keep(self, old: OldJob) -> str:
        return reason_to_keep(
            _labels(old.labels),
            wanted=self._settings.keep_labels,
            is_corrected=old.is_corrected,
            pinned_steps=await self._pinned(old.job),
        )

    async def _pinned(self, job: str) -> list[int]:
        document = await self._bus.documents(CHECKPOINTS).get(job)
        if document.data is None:
            return []
        try:
            index = _INDEXES.decode(document.data)
        except (msgspec.DecodeError, ValueError):
            return [0]  # of a newer release: what it keeps is not ours to remove
        return [checkpoint.step for checkpoint in index.checkpoints if checkpoint.pinned_by]

    def _audit(self, old: OldJob, days: int) -> OperatorActed:
        return OperatorActed(
            id=self._derive("remove_job", old.job, str(old.last_n)), job=CLUSTER,
            at=self._clock.wall(), source="history", by="history", action="remove_job",
            target=old.job, outcome="accepted",
            reason=f"its last fact is older than history.keep_jobs_days = {days}",
        )  # fmt: skip


def _labels(text: str | None) -> Mapping[str, str]:
    try:
        return {} if text is None else _LABELS.decode(text)
    except (msgspec.DecodeError, ValueError):
        return {}


_ASK_EVERY_S = 60.0
_WITHIN_S = 1.0


class EvidenceRetention:
    """Asks once a minute at most, and remembers the answer while the bus is away."""

    def __init__(self, blobs: Blobs, clock: Clock) -> None:
        self._blobs = blobs
        self._clock = clock
        self._asked_at: float | None = None
        self._keeps_s: float | None = None

    async def keeps_s(self) -> float | None:
        """None for ever, and where no server has been asked yet."""
        now = self._clock.now()
        if self._asked_at is None or now - self._asked_at >= _ASK_EVERY_S:
            try:
                async with asyncio.timeout(_WITHIN_S):
                    self._keeps_s = await self._blobs.keeps_s()
            except (BusError, TimeoutError) as error:
                log.debug("retention_not_known error=%s", error)
            self._asked_at = now
        return self._keeps_s
