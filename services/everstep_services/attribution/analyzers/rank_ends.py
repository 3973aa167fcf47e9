"""What the end of a rank shows by its own record: its failure, and whether it followed another."""

import re
import signal
from collections import defaultdict

from everstep.messages import Case, ErrorRecord, RankEnd
from everstep.observe.printable import beginning, printable
from everstep.observe.redaction import redact
from everstep_services.agent.core.exit import RankExit
from everstep_services.attribution.log_analysis import fingerprint
from everstep_services.attribution.log_analysis.rules import Match, shipped

QUOTED = 240
CONNECTION_ERRORS = frozenset(
    {"BrokenPipeError", "ConnectionAbortedError", "ConnectionRefusedError", "ConnectionResetError"}
)
_LOST_WORKER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? [^)]{1,200}\) "
    r"(?:is killed by signal: (?P<how>[\w -]{1,40})|exited unexpectedly(?! with))"
)
_NUMBERS = {signal.strsignal(number): number.name for number in signal.Signals}
WORKER_KILLED = "worker_killed"
"""Memory was short, somebody sent the signal, or native code failed."""
_UNCAUGHT = "terminate called"
"""Native code aborts a process with these words and the text of its error."""
_GUESSES = frozenset({"aborted", "torn_write"})
"""Rules that only guess: the record of an end tells more than the last line of its log."""


def fingerprints(case: Case) -> dict[str, list[int]]:
    """The failures of the incident's first round, with their ranks; without consequences."""
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for end in first_ends(case):
        if not is_consequence(end):
            ranks_of[fingerprint_of(end)].append(end.rank)
    return dict(ranks_of)


def first_ends(case: Case) -> list[RankEnd]:
    """The ends of the round in which the incident began; else of the last round before it.

    What failed in a later round explains nothing of an earlier one, with this exception: where the
    same failure ended several later rounds, that failure keeps the training from coming back,
    whatever ended the first round: the first of those rounds.
    """
    rounds = {end.round for end in case.ends if end.round <= case.round}
    first = max(rounds, default=case.round)
    rounds_of: dict[str, set[int]] = defaultdict(set)
    for end in case.ends:
        if end.how == "error" and not is_consequence(end):
            rounds_of[fingerprint_of(end)].add(end.round)
    again = [min(own) for own in rounds_of.values() if first not in own and len(own) > 1]
    judged = min(again, default=first)
    return [end for end in case.ends if end.round == judged]


def interrupted_alone(case: Case) -> set[int]:
    """Ranks that raised KeyboardInterrupt, if most did not: who cancels a job interrupts all."""
    ranks = {end.rank for end in first_ends(case) if end.error_name == "KeyboardInterrupt"}
    return ranks if 2 * len(ranks) < case.world_size and not case.outside else set()


def is_consequence(end: RankEnd) -> bool:
    """Whether, by its own words, it ended because another rank was gone."""
    if end.error_name in CONNECTION_ERRORS and "/multiprocessing/" in end.traceback:
        return False  # it has lost a process of its own, such as a worker of its data loader
    if worker_ended_by(end):
        return False
    match = match_of(end)
    if match is not None and match.rule.role == "root" and end.first_error.startswith(_UNCAUGHT):
        return False
    return as_exit(end).is_secondary or (match is not None and match.rule.role == "cascade")


def worker_ended_by(end: RankEnd) -> str:
    """What ended a worker of its data loader, as `ended_worker_by`."""
    return ended_worker_by(f"{end.error_text} {end.first_error} {end.traceback}")


def ended_worker_by(text: str) -> str:
    """The signal that ended a worker of the data loader, as torch reports it.

    `unseen` if torch has only found that the worker was gone; empty if it reports neither.
    """
    lost = list(_LOST_WORKER.finditer(text))
    how = next((match["how"].strip() for match in lost if match["how"]), "")
    return _NUMBERS.get(how, how) or ("unseen" if lost else "")


def kind_of_lost_worker(name: str) -> str:
    """The kind of such an end; its cause is unknown: data alone lets no signal end a worker."""
    return "segfault" if name == "SIGSEGV" else WORKER_KILLED


def is_timeout(end: RankEnd) -> bool:
    """Whether it gave up waiting in a collective, which needs no end of another rank."""
    match = match_of(end)
    return match is not None and match.rule.failure_class == "collective_timeout"


def has_torn(case: Case) -> bool:
    """Whether a rank was gone before others waited in vain: what these do explains nothing."""
    return not all(map(is_timeout, first_ends(case)))


def fingerprint_of(end: RankEnd) -> str:
    """The name of the failure, without its numbers and paths."""
    if end.error_name:
        function = end.place.rpartition(" in ")[2] if " in " in end.place else ""
        return redact(fingerprint.of_exception(end.error_name, function, headline(end)))
    return f"{end.how}:{end.signal or end.exit_code}"


def as_exit(end: RankEnd) -> RankExit:
    error = ErrorRecord(name=end.error_name, text=end.error_text) if end.error_name else None
    is_memory = end.how == "out_of_memory"
    return RankExit(
        code=end.exit_code, signal=end.signal, error=error, memory="rank" if is_memory else ""
    )


def match_of(end: RankEnd) -> Match | None:
    text = headline(end, with_name=True) if end.error_name else end.first_error
    return match_in(text) if text else None


def match_in(text: str) -> Match | None:
    match = shipped().match(text)
    if match is None or match.is_of_kernel:  # a rank wrote it: the kernel's own log tells more
        return None
    return None if match.rule.id in _GUESSES else match


def headline(end: RankEnd, *, with_name: bool = False) -> str:
    text = end.error_text.strip().partition("\n")[0][:1000]
    name = end.error_name.rpartition(".")[2]
    return f"{name}: {text}" if with_name and text else text or name


def clean(text: str, most: int = QUOTED) -> str:
    return printable(redact(beginning(text.strip().partition("\n")[0], most)))
