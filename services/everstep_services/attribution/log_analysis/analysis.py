"""The verdict on what the lines of logs report."""

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from everstep_services.attribution.log_analysis.attempts import Attempt, aligned
from everstep_services.attribution.log_analysis.judgement import Judgement, Timing, with_end
from everstep_services.attribution.log_analysis.line_analysis import LineAnalysis
from everstep_services.attribution.log_analysis.pending_work import PendingWork, mismatch
from everstep_services.attribution.log_analysis.report import EarlierAttempt, Failure, LogReport


class LogAnalysis(LineAnalysis):
    """Takes lines of any number of files, and reports the first failure."""

    def report(self) -> LogReport:
        """Return the first failure of the last attempt, with its evidence."""
        numbers = aligned(list(self._files.values()))
        ordered = sorted(numbers, reverse=True)
        base = LogReport(
            verdict="nothing",
            files=tuple(self.names),
            lines=self.lines,
            ranks=len(self._ids.ranks),
            notes=tuple(self.notes),
            attempts=max(ordered, default=1),
        )
        clocks = self._progress.clocks
        timing = Timing(
            clocks.offsets(), clocks.latest, self._progress.survived, self._caught.places
        )
        report = self._judged(base, numbers[ordered[0]], timing) if ordered else base
        report = with_end(report, self.tails, int(self._year))
        earlier = Timing(clocks.offsets(), None, {})
        before = [self._judged(base, numbers[number], earlier) for number in ordered[1:]]
        return report.without(self.unread).after(
            [
                EarlierAttempt.of(number, judged)
                for number, judged in zip(ordered[1:], before, strict=True)
                if judged.cause is not None
            ]
        )

    def _judged(self, base: LogReport, attempts: Sequence[Attempt], timing: Timing) -> LogReport:
        """The verdict on one attempt, by its parts in all files."""
        failures: dict[tuple[object, ...], Failure] = {}
        cascades: Counter[str] = Counter()
        accused: Counter[int] = Counter()
        enqueued: dict[int, int] = {}
        works: dict[tuple[str, int], PendingWork] = {}
        for attempt in attempts:
            accused += attempt.accused
            works |= attempt.works
            for rank, sequence in attempt.enqueued.items():
                enqueued[rank] = max(sequence, enqueued.get(rank, -1))
            for kept in attempt.kept.values():
                cascades.update(kept.cascades)
                for name, sighting in kept.first().items():
                    failure, last = self.failure_of(sighting), kept.last(name)
                    if last and timing.is_outlived(failure):
                        failure = self.failure_of(last)
                    failure = self._ids.with_rank(failure)
                    of_file = failure.file if failure.rank is None else None
                    key = (name, failure.rank, of_file, failure.member, failure.node)
                    failures.setdefault(key, failure)
        judgement = Judgement(
            [*failures.values()], accused, timing, self._ids.silent(attempts, [*accused])
        )
        base = replace(base, cascades=dict(cascades.most_common()))
        return judgement.report(base, enqueued, mismatch(works))
