"""How each fact changes the cases of a job. Pure, and bounded for any input."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from msgspec.structs import replace

from everstep.incident_causes import BY_MONITOR, NUMERICS
from everstep.messages import (
    Case,
    CasesDocument,
    CheckpointFailed,
    EvidenceCollected,
    EvidencePiece,
    Fact,
    FaultInjected,
    IncidentClosed,
    IncidentExtended,
    IncidentOpened,
    JobEnded,
    LocatedStall,
    NodeLeft,
    NodeLost,
    NodeReturned,
    NodeSign,
    NumericsJudged,
    OperatorActed,
    OutsideAct,
    PreemptionNoticed,
    ProgressMade,
    RankExited,
    RankRecovered,
    RanksStopped,
    RankStalled,
    RestoreFailed,
    RoundFormed,
    SaveFailure,
    SlowRankSign,
    StallLocated,
    StragglerCleared,
    StragglerFound,
    VerdictCorrected,
    VerdictReached,
)
from everstep.observe.printable import beginning
from everstep_services.attribution.domain.case_parts import (
    SHORT_MOST,
    TEXT_MOST,
    ended_again,
    is_about,
    lost_together,
    names_node,
    node_sign,
    rank_end,
    stall_of,
    with_part,
    without_loss,
)
from everstep_services.attribution.domain.case_queue import kept, shortened

_ENDS_MOST = 2048
_WHOLE_ENDS_MOST = 64
"""The most ends that are kept with their tracebacks."""
_PIECES_MOST = 512
_SIGNS_MOST = 64
_RESULTS_MOST = 8
_SLOW_MOST = 64
_ENDS_RANKS = frozenset({"stop_job", "restart_job", "drain_node", "interrupt"})
_OURSELVES = "attribution"
"""The name under which the policy asks: it acts because of a verdict, not from outside."""
_CAPTURE = "capture"
"""The prefix of the ids of captures, which are not incidents."""
_LEFT_BADLY = frozenset({"preempted", "drained", "excluded", "operator", "failed"})


class JobCases:
    """The cases of one job."""

    def __init__(self, job: str, document: CasesDocument) -> None:
        self.job = job
        self._document = document

    @property
    def document(self) -> CasesDocument:
        """The document as it is now."""
        return self._document

    @property
    def cases(self) -> tuple[Case, ...]:
        """The newest incidents, the oldest first."""
        return tuple(case for case in self._document.cases if case.incident)

    def case(self, incident: str) -> Case | None:
        """One incident, if it is remembered."""
        return next((case for case in self.cases if case.incident == incident), None)

    def take(self, fact: Fact) -> str | None:
        """Add a fact. Returns the incident whose case has changed, if there is one."""
        added = self.TAKEN.get(type(fact))
        return None if added is None else added(self, fact)

    def put(self, case: Case) -> None:
        """Put a case in the place of the one with its incident."""
        cases = [other for other in self._document.cases if other.incident != case.incident]
        self._document = replace(self._document, cases=(*kept(cases), case))

    def amend(self, case: Case) -> None:
        """Replace a case, and keep its place among the others."""
        cases = (
            case if other.incident == case.incident else other for other in self._document.cases
        )
        self._document = replace(self._document, cases=tuple(cases))

    def make_room(self) -> bool:
        """Make the document smaller; False if that is impossible."""
        before = self._document.cases
        self._document = replace(self._document, cases=shortened(before))
        return self._document.cases != before

    # --- what a fact changes ---

    def _formed(self, fact: RoundFormed) -> None:
        doc = self._document
        if fact.round < doc.round:
            return
        kept = tuple(case for case in doc.cases if case.incident)  # its round led to no incident
        slow = doc.slow if fact.round == doc.round else ()
        self._document = replace(
            doc, cases=kept, members=fact.members, round=fact.round,
            world_size=fact.world_size, slow=slow, ended_at=None,
        )  # fmt: skip

    def _opened(self, fact: IncidentOpened) -> str:
        before = self.case(fact.incident)
        case = before or self._adopted(fact)
        self.put(
            replace(
                case,
                trigger=fact.trigger,
                reason=beginning(fact.reason, TEXT_MOST),
                error_name=fact.error_name[:SHORT_MOST],
                trigger_fact=fact.trigger_fact,
                node=fact.node,
                rank=fact.rank,
                step=fact.step if fact.step is not None else self._document.step,
                phase=fact.phase,
                section=fact.section,
                opened_at=fact.at,
                slow=self._document.slow,
                is_of_agent=fact.trigger == NUMERICS and fact.source != "rendezvous",
                results=case.results or self._last_result(fact),
            )
        )
        return fact.incident

    def _last_result(self, fact: IncidentOpened) -> tuple[NumericsJudged, ...]:
        """The judgement that made ranks end their round: it has an incident of its own."""
        if fact.trigger != NUMERICS or fact.source != "rendezvous":
            return ()
        of_round = [result for case in self.cases for result in case.results]
        return tuple(result for result in of_round if result.round == fact.round)[-1:]

    def _adopted(self, fact: IncidentOpened) -> Case:
        """The case of a newly opened incident, with the reports of its round that came before."""
        round_ = self._document.round if fact.round is None else fact.round
        waiting = next((case for case in self._document.cases if not case.incident), None)
        if waiting is not None and waiting.round == round_:
            kept = tuple(case for case in self._document.cases if case.incident)
            self._document = replace(self._document, cases=kept)
            return self._with_early_ends(replace(waiting, incident=fact.incident))
        return self._with_early_ends(self._blank(fact.incident, round_))

    def _with_early_ends(self, case: Case) -> Case:
        """The case with the ends of its round that came while an earlier incident was still open.

        A rank may fail again before its restart counts as a recovery.
        """
        for earlier in self.cases:
            early = tuple(end for end in earlier.ends if end.round == case.round)
            if early and earlier.incident and earlier.round < case.round:
                case = replace(case, ends=(*case.ends, *early))
                left = tuple(end for end in earlier.ends if end.round != case.round)
                self.amend(replace(earlier, ends=left))
        return case

    def _blank(self, incident: str, round_: int) -> Case:
        doc = self._document
        is_known = round_ == doc.round
        return Case(
            job=self.job,
            incident=incident,
            round=round_,
            members=doc.members if is_known else (),
            world_size=doc.world_size if is_known else 0,
        )

    def _extended(self, fact: IncidentExtended) -> str | None:
        """Note the nodes that were lost together: health is silent about those replaced at once."""
        case = self.case(fact.incident)
        signs = () if case is None else lost_together(fact, case.nodes)
        if case is None or not signs:
            return None
        return self._changed(replace(case, nodes=(*case.nodes, *signs)[:_SIGNS_MOST]))

    def _closed(self, fact: IncidentClosed) -> str:
        round_ = self._document.round if fact.round is None else fact.round
        case = self.case(fact.incident) or self._blank(fact.incident, round_)
        case = replace(case, outcome=fact.outcome)
        if fact.trigger:
            case = replace(
                case, trigger=fact.trigger, reason=beginning(fact.cause, TEXT_MOST),
                trigger_fact=fact.trigger_fact, node=fact.node, rank=fact.rank,
            )  # fmt: skip
        return self._keep(case)

    def _keep(self, case: Case) -> str:
        if self.case(case.incident) is None:
            self.put(case)
        else:
            self.amend(case)
        return case.incident

    def _exited(self, fact: RankExited) -> str | None:
        case = self._of(fact.round, fact.incident)
        if fact.how == "done":
            return self._done(case, fact)
        case = ended_again(case, fact.round)
        if any(end.rank == fact.rank and end.round == fact.round for end in case.ends):
            return None
        if len(case.ends) >= _ENDS_MOST:
            return self._changed(replace(case, more_ends=case.more_ends + 1))
        end = rank_end(fact, is_whole=len(case.ends) < _WHOLE_ENDS_MOST)
        return self._changed(replace(case, ends=(*case.ends, end)))

    def _done(self, case: Case, fact: RankExited) -> str | None:
        """Note a rank that has finished while others continue."""
        if any(report.rank == fact.rank and report.round == fact.round for report in case.done):
            return None
        if len(case.done) >= _SIGNS_MOST:
            return self._changed(replace(case, more_done=case.more_done + 1))
        return self._changed(replace(case, done=(*case.done, rank_end(fact, is_whole=False))))

    def _stalled(self, fact: RankStalled) -> str | None:
        case = self._of_round(fact.round)
        stall = stall_of(fact)
        if not fact.is_fatal:
            warned = with_part(case.warned_stalls, stall, _SIGNS_MOST)
            return self._changed(replace(case, warned_stalls=warned))
        return self._changed(replace(case, stalls=with_part(case.stalls, stall, _ENDS_MOST)))

    def _moves_again(self, fact: RankRecovered) -> None:
        """Forget a stall that was over before any incident; an incident keeps its stalls.

        A rank that its monitor has freed restarts with all others: an incident of that follows.
        """
        case = next((case for case in self._document.cases if not case.incident), None)
        if case is None:
            return
        before = (case.warned_stalls, case.stalls)
        warned, stalls = (
            tuple(it for it in of if it.fact != fact.stall or it.signal == BY_MONITOR)
            for of in before
        )
        if (warned, stalls) != before:
            self._changed(replace(case, warned_stalls=warned, stalls=stalls))

    def _located(self, fact: StallLocated) -> str | None:
        located = LocatedStall(
            fact=fact.id,
            first_ranks=fact.first_ranks[:_PIECES_MOST],
            reason=beginning(fact.reason, TEXT_MOST),
            waiting_ranks=fact.waiting_ranks,
            section=fact.section,
            is_certain=fact.is_certain,
        )
        return self._changed(replace(self._of_round(fact.round), located=located))

    def _evidence(self, fact: EvidenceCollected) -> str | None:
        case = self.case(fact.incident) or self._waiting(fact)
        if case is None or (fact.blob is not None and fact.blob.job != fact.job):
            return None
        piece = EvidencePiece(
            evidence=fact.evidence,
            node=fact.node,
            fact=fact.id,
            rank=fact.rank,
            blob=fact.blob,
            summary=beginning(fact.summary, TEXT_MOST),
            missing=beginning(fact.missing, SHORT_MOST),
        )
        evidence = with_part(case.evidence, piece, _PIECES_MOST)
        return self._changed(replace(case, evidence=evidence))

    def _waiting(self, fact: EvidenceCollected) -> Case | None:
        """The case of an incident that will be opened; None for a capture, and for old ones."""
        if fact.round is None or fact.round != self._document.round:
            return None
        case = self._of(fact.round, None)
        return None if case.incident or fact.incident.startswith(_CAPTURE) else case

    def _stopped(self, fact: RanksStopped) -> str | None:
        case = ended_again(self._of(fact.round, None), fact.round)
        if fact.node in case.stopped or fact.round < case.last_round:
            return None
        return self._changed(replace(case, stopped=(*case.stopped, fact.node)))

    def _lost(self, fact: NodeLost) -> str | None:
        if fact.is_replaced:  # the incident of the round has the reason already
            return None
        cause = "paused" if fact.is_warden_alive else ""
        sign = node_sign(fact, fact.node, "lost", fact.reason, cause=cause)
        return self._sign(fact, replace(sign, silence_s=fact.silence_s))

    def _returned(self, fact: NodeReturned) -> str | None:
        sign = node_sign(fact, fact.node, "returned", fact.reason, cause=fact.how)
        return self._sign(fact, sign, is_late=True)

    def _left(self, fact: NodeLeft) -> str | None:
        if fact.cause not in _LEFT_BADLY:
            return None
        if fact.cause == "drained" and fact.slot is None:
            return None  # a spare that leaves ends no ranks
        return self._sign(fact, node_sign(fact, fact.node, "left", fact.reason, cause=fact.cause))

    def _sign(self, fact: Fact, sign: NodeSign, *, is_late: bool = False) -> str | None:
        """Add a sign to the incident of its round; a sign of an end does not begin a case."""
        if is_late:
            case = next(
                (case for case in reversed(self.cases) if names_node(case.nodes, sign.node)), None
            )
            if case is None:
                return None
        else:
            case = self._of(self._document.round if fact.round is None else fact.round, None)
        nodes = case.nodes if sign.sign != "lost" else without_loss(case.nodes, sign)
        return self._changed(replace(case, nodes=with_part(nodes, sign, _SIGNS_MOST)))

    def _noticed(self, fact: PreemptionNoticed) -> str | None:
        act = OutsideAct(
            act="preempted", by=fact.origin, reason=beginning(fact.reason, SHORT_MOST),
            fact=fact.id, node=None if fact.is_whole_job else fact.node, at=fact.at,
        )  # fmt: skip
        return self._from_outside(fact, act)

    def _operated(self, fact: OperatorActed) -> str | None:
        is_ours = fact.by == _OURSELVES or fact.origin == NUMERICS
        if fact.outcome != "accepted" or fact.action not in _ENDS_RANKS or is_ours:
            return None
        if fact.action == "drain_node" and not self._has_ranks(fact.target):
            return None  # a spare that leaves ends no ranks
        act = OutsideAct(
            act=fact.action, by=fact.by, reason=beginning(fact.reason, SHORT_MOST), fact=fact.id,
            node=fact.target or None, at=fact.at,
        )  # fmt: skip
        return self._from_outside(fact, act)

    def _has_ranks(self, node: str) -> bool:
        return any(member.node == node for member in self._document.members)

    def _injected(self, fact: FaultInjected) -> str | None:
        act = OutsideAct(
            act="injected", by=fact.by, reason=fact.fault[:SHORT_MOST], fact=fact.id,
            node=fact.node, rank=fact.rank, at=fact.at, lasts_s=fact.lasts_s,
        )  # fmt: skip
        return self._from_outside(fact, act)

    def _from_outside(self, fact: Fact, act: OutsideAct) -> str | None:
        case = self._of(self._document.round if fact.round is None else fact.round, None)
        return self._changed(replace(case, outside=with_part(case.outside, act, _SIGNS_MOST)))

    def _result_judged(self, fact: NumericsJudged) -> str | None:
        if any(result.id == fact.id for case in self._document.cases for result in case.results):
            return None
        short = replace(
            fact, reason=beginning(fact.reason, TEXT_MOST), ranks=fact.ranks[:_SIGNS_MOST]
        )
        changed, incident = None, None
        if fact.moved_from is None:
            case = self._of(fact.round, fact.incident)
            incident = case.incident
            changed = self._changed(replace(case, results=(*case.results, short)[-_RESULTS_MOST:]))
        ended = [it for it in self.cases if it.trigger == NUMERICS and not it.is_of_agent]
        of_round = next((it for it in reversed(ended) if is_about(it, fact)), None)
        if of_round is None or of_round.incident == incident:
            return changed
        return self._changed(replace(of_round, results=(short,)))

    def _save_failed(self, fact: CheckpointFailed) -> str | None:
        return self._saves(fact, fact.stage, node=fact.node, rank=fact.rank)

    def _restore_failed(self, fact: RestoreFailed) -> str | None:
        return self._saves(fact, "restore")

    def _saves(
        self, fact: CheckpointFailed | RestoreFailed, stage: str, **where: Any
    ) -> str | None:
        failure = SaveFailure(
            fact=fact.id,
            stage=stage,
            reason=beginning(fact.reason, SHORT_MOST),
            at=fact.at,
            **where,
        )
        case = self._of_round(fact.round)
        return self._changed(replace(case, saves=with_part(case.saves, failure, _SIGNS_MOST)))

    def _slow(self, fact: StragglerFound) -> None:
        sign = SlowRankSign(
            rank=fact.rank, node=fact.node, cause=fact.cause, fact=fact.id,
            reason=beginning(fact.reason, SHORT_MOST), confidence=fact.confidence,
        )  # fmt: skip
        slow = [straggler for straggler in self._document.slow if straggler.rank != fact.rank]
        self._document = replace(self._document, slow=tuple([*slow, sign][-_SLOW_MOST:]))

    def _fast(self, fact: StragglerCleared) -> None:
        slow = tuple(
            straggler for straggler in self._document.slow if straggler.fact != fact.finding
        )
        self._document = replace(self._document, slow=slow)

    def _progress(self, fact: ProgressMade) -> None:
        self._document = replace(self._document, step=fact.step)

    def _job_ended(self, fact: JobEnded) -> None:
        self._document = replace(self._document, ended_at=fact.at)

    def _judged(self, fact: VerdictReached) -> None:
        """A verdict of another replica, or one that was made again from the stream."""
        case = self.case(fact.incident)
        held = None if case is None else case.verdict
        if case is not None and (held is None or held.revision < fact.revision):
            self.amend(replace(case, verdict=fact))

    def _corrected(self, fact: VerdictCorrected) -> None:
        case = self.case(fact.incident)
        if case is not None and (case.correction is None or case.correction.at < fact.at):
            self.amend(replace(case, correction=fact))

    # --- where it belongs ---

    def _of(self, round_: int, incident: str | None) -> Case:
        """The case of a fact: its incident's, its round's, or one that waits for an incident.

        A fact that names an unknown incident belongs to none of the others: a round may have
        several, such as a stall that was over and a failure since. So a fact that names none does
        not belong to an incident that is over, if the training recovered without another round.
        """
        named = None if incident is None else self.case(incident)
        if named is not None:
            return named
        for case in reversed(self._document.cases):
            if case.incident and (incident is not None or self._is_over(case)):
                continue
            is_going_on = case.incident and not case.outcome and case.round <= round_
            if case.round == round_ or is_going_on:
                return case
        return self._blank("", round_)

    def _of_round(self, round_: int) -> Case:
        """The case of a fact that explains nothing of an earlier round.

        An earlier incident may still be open: of several senders, the later fact may come first.
        """
        case = self._of(round_, None)
        return case if case.round == round_ else self._blank("", round_)

    def _is_over(self, case: Case) -> bool:
        """Whether an incident ended no round, or its training recovered in the same round."""
        is_back = case.outcome == "recovered" and case.round >= self._document.round
        return is_back or case.is_of_agent

    def _changed(self, case: Case) -> str | None:
        if case.incident:
            self.amend(case)
            return case.incident
        before = [case for case in self._document.cases if case.incident]
        self._document = replace(self._document, cases=(*kept(before), case))
        return None

    TAKEN: ClassVar[Mapping[type[Fact], Callable[[Any, Any], str | None]]] = {
        CheckpointFailed: _save_failed,
        EvidenceCollected: _evidence,
        FaultInjected: _injected,
        IncidentClosed: _closed,
        IncidentExtended: _extended,
        IncidentOpened: _opened,
        JobEnded: _job_ended,
        NodeLeft: _left,
        NodeLost: _lost,
        NodeReturned: _returned,
        NumericsJudged: _result_judged,
        OperatorActed: _operated,
        PreemptionNoticed: _noticed,
        ProgressMade: _progress,
        RankExited: _exited,
        RankRecovered: _moves_again,
        RankStalled: _stalled,
        RanksStopped: _stopped,
        RestoreFailed: _restore_failed,
        RoundFormed: _formed,
        StallLocated: _located,
        StragglerCleared: _fast,
        StragglerFound: _slow,
        VerdictCorrected: _corrected,
        VerdictReached: _judged,
    }


READ: tuple[type[Fact], ...] = tuple(JobCases.TAKEN)
"""The kinds of facts of jobs that change cases."""
