"""The facts that an agent records: what became of its ranks."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from everstep.ids import new_id
from everstep.messages import (
    BlobRef,
    EvidenceCollected,
    ProgressMade,
    RankExited,
    RanksStopped,
    RankStarted,
    StartRanks,
)
from everstep_services.agent.failures import Exit


class Records:
    """Makes facts in the name of one agent."""

    def __init__(self, job: str, node: str) -> None:
        self._job = job
        self._node = node

    def rank_started(
        self, order: StartRanks, rank: int, *, pid: int, start: str, start_s: float, log: str
    ) -> RankStarted:
        return RankStarted(
            **self._about(order, rank), pid=pid, start=start, start_s=start_s, log=log
        )

    def rank_exited(  # noqa: PLR0913  what is known of an end
        self,
        fact_id: str,
        order: StartRanks,
        rank: int,
        pid: int,
        ending: Exit,
        *,
        step: int | None,
        first_error: str = "",
        log: BlobRef | None = None,
        incident: str | None = None,
    ) -> RankExited:
        about = self._about(order, rank) | {"id": fact_id}
        return RankExited(
            **about,
            pid=pid,
            how=ending.how,
            lasted_s=ending.lasted_s,
            exit_code=ending.code,
            signal=ending.signal,
            error=ending.error,
            first_error=first_error,
            log=log,
            core_dumped=ending.core_dumped,
            step=step,
            incident=incident,
        )

    def ranks_stopped(
        self,
        order: StartRanks,
        ranks: tuple[int, ...],
        killed: tuple[int, ...],
        *,
        stop_s: float,
    ) -> RanksStopped:
        return RanksStopped(
            **self._of(order.round),
            node=self._node,
            slot=order.slot,
            ranks=ranks,
            killed=killed,
            stop_s=stop_s,
        )

    def progress_made(
        self, order: StartRanks, step: int, *, is_first: bool, steps: int, steps_s: float
    ) -> ProgressMade:
        return ProgressMade(
            **self._of(order.round),
            step=step,
            node=self._node,
            is_first=is_first,
            steps=steps,
            steps_s=steps_s,
        )

    def evidence(  # noqa: PLR0913  a piece of evidence, or why there is none
        self,
        round: int,
        incident: str,
        evidence: str,
        *,
        rank: int | None,
        blob: BlobRef | None,
        summary: str = "",
        missing: str = "",
        took_s: float = 0.0,
    ) -> EvidenceCollected:
        return EvidenceCollected(
            **self._of(round),
            incident=incident,
            node=self._node,
            evidence=evidence,
            rank=rank,
            blob=blob,
            summary=summary,
            missing=missing,
            took_s=took_s,
        )

    def _about(self, order: StartRanks, rank: int) -> dict[str, Any]:
        place = {"slot": order.slot, "rank": rank, "local_rank": rank - order.first_rank}
        return {**self._of(order.round), "node": self._node, **place}

    def _of(self, round: int) -> Mapping[str, Any]:
        return {
            "id": new_id(),
            "job": self._job,
            "at": datetime.now(UTC),
            "source": f"agent/{self._node}",
            "round": round,
        }
