"""Finds what sentences state about ranks, nodes, ends and steps, and which of it is not true."""

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.chaos.truth.outputs import Sentence
from tests.chaos.truth.scene import PLAN, Scene

_NUMBERS = r"(\d+(?:(?:, | and |-)\d+)*)"
_RANKS = rf"\branks?:? {_NUMBERS}"
_MENTION = re.compile(_RANKS)
_SIGNAL = re.compile(r"\bSIG[A-Z]{3,6}\d?\b")
_OF = rf"{_RANKS}(?: \([\w-]+\))?(?:, perhaps because of another rank,)?"
_CODE = re.compile(rf"{_OF}(?: had)? (?:exited with|ended with code|\(exit code) (\d+)")
_ENDED_BY = re.compile(rf"{_OF} (?:was ended by|ended by|\() ?(SIG\w+)")
_AFTER_STEP = re.compile(rf"{_RANKS}\b[^;]*? after step (\d+)")
_PLACE = re.compile(r"\brank (\d+)(?: \(|, node | on |, on )k\d+n(\d+)\b")
_RESTARTS = re.compile(r"\b(\d+) of 10 restarts left")
_LEFT = re.compile(r"(\d) of 3 rounds without known progress left")
_AGAIN = re.compile(
    r"(\d+) steps? (?:again|lost|are made again)|[Ll]ost (\d+) steps?|Steps lost: (\d+)"
)
_BEGAN = re.compile(r"round (\d+) began (?:at|after) step (\d+)")
_PID = re.compile(rf"{_RANKS}\b[^;:]{{0,40}}\b(?:pid|process) (\d+)")
_CONSEQUENCE = re.compile(
    r"only because|perhaps|seems|may |might |inconclusive|lost a(?:nother)? rank|lost a connection"
    r"|not known|waited? |waits |wait for |cannot tell|were stopped|first reported|while others"
)
"""Words of sentences that accuse nobody whom they name."""
_HEDGED_WHOLLY = "the cause may be another one"
_ACCUSES = re.compile("never joined|stopped first|differs? from|left early|had ended")
"""What the grounds of a verdict say of culprits only."""
_ASIDE = re.compile(
    r"^(?:not |perhaps |missing|failed, too|past their limits|its log|-\d\.\d\d "
    r"|(?:log|page|process|flight_recorder|stacks|kernel_log|cgroup|environment) )"
    r"|the limit there is|Stalled rank|lost a rank|waits? |wait for|do other things|reports"
    r"|of rank \d|is over on|\d+ ranks? |evidence_coverage"
    r"|it has less evidence|console .*waits |evidence\.summary|missing|alternatives|<td>|<h3>|<li>"
)
"""Sentences, with their places, that list ranks, or tell what they were seen to do."""
_RAW = re.compile(
    r"(?:\[rank\d+\]: |(?:\w+\.)*\w*Error: ).*?"
    r"(?=; \d+ of \d+|; round|; first reported|; it has less|$)"
)
"""What a rank itself wrote."""
_STOPS = frozenset({"SIGTERM", "SIGKILL", "SIGABRT"})
"""How ranks end that lose another one, or that Everstep stops."""


@dataclass(slots=True)
class Facts:
    """What is known of a case after it ran."""

    scene: Scene
    is_open: bool = False
    """The verdict is inconclusive: whoever reported first is listed, and hedged where it counts."""
    last: dict[int, int] = field(default_factory=dict)
    """The last step of each rank in round 1."""

    def __post_init__(self) -> None:
        self.last = {rank: self.scene.step(rank, 1) for rank in range(self.scene.world)}

    @property
    def farthest(self) -> int:
        """The last step of round 1 that any rank has finished."""
        return max(self.last.values(), default=0)

    @property
    def culprits(self) -> set[int]:
        return set(self.scene.case.truth.ranks)

    @property
    def culprit_nodes(self) -> set[str]:
        truth = self.scene.case.truth
        return {self.scene.name(node) for node in (*truth.nodes, *truth.may_nodes)}

    @property
    def ranks_of_nodes(self) -> set[int]:
        """What is said of a lost node's ranks is true, too."""
        truth = self.scene.case.truth
        return {
            rank for node in (*truth.nodes, *truth.may_nodes) for rank in self.scene.ranks_of(node)
        }

    def codes(self, rank: int) -> set[int]:
        ends = self.scene.case.truth.ends
        own = {end for end in ends if end >= 0}
        return own if self._is_known(rank) else {1, *own}

    def signals(self, rank: int) -> set[str]:
        ends = self.scene.case.truth.ends
        own = {signal.Signals(-end).name for end in ends if end < 0}
        return own if self._is_known(rank) else {*_STOPS, *own}

    def _is_known(self, rank: int) -> bool:
        """Whether a rank ends as the truth tells: of several incidents it may be a victim."""
        truth = self.scene.case.truth
        return rank in self.culprits and bool(truth.ends) and truth.incidents == 1


def untrue(read: Sequence[Sentence], facts: Facts) -> list[str]:
    """The sentences that state what is not so, each once, with the reason."""
    found: dict[str, str] = {}
    for sentence in read:
        for why in _problems(sentence, facts):
            found.setdefault(f"{why} | {sentence.text[:300]}", sentence.place)
    whole = "\n".join(f"{it.place}: {it.text}" for it in read)
    truth = facts.scene.case.truth
    why_text = "\n".join(it.text for it in read if it.place == "why")
    missing = [f"`why` does not say: {it}" for it in truth.says if not re.search(it, why_text)]
    false = [f"it says: {match[0]}" for it in truth.never if (match := re.search(it, whole))]
    return [*(f"{place}: {text}" for text, place in found.items()), *missing, *false]


def _problems(sentence: Sentence, facts: Facts) -> Iterator[str]:
    text = " ".join(sentence.text.split())
    plain = _RAW.sub("…", text)
    if sentence.names_cause:
        yield from _accused(plain, facts)
    elif not facts.is_open and not _is_aside(sentence.place, plain):
        yield from _named(plain, facts)
    for stated in _STATED:
        yield from stated(plain, facts)


def _is_aside(place: str, text: str) -> bool:
    """Whether a sentence only lists ranks, or tells what they were seen to do."""
    if text.startswith("+") or place.endswith("evidence.says"):
        return _ACCUSES.search(text) is None
    return _ASIDE.search(f"{text} {place}: {text}") is not None


def _accused(text: str, facts: Facts) -> Iterator[str]:
    """A sentence that says who caused something names nobody else without a hedge."""
    if _HEDGED_WHOLLY in text:
        return
    for clause in text.split("; "):
        victims = set(_ranks(re.search(r"ranks? \(?([\d, ]+)", clause)))
        is_one = facts.scene.case.truth.incidents == 1
        is_victim = "only because" in clause or "lost another rank" in clause
        if is_one and is_victim and victims & facts.culprits:
            yield f"the culprit {sorted(victims & facts.culprits)} is said to be a victim"
        if not _CONSEQUENCE.search(clause) and not re.match(r"(all ranks of )?round \d", clause):
            yield from _named(clause, facts)


def _named(text: str, facts: Facts) -> Iterator[str]:
    if not (facts.culprits or facts.culprit_nodes) or _CONSEQUENCE.search(text):
        return
    named = {rank for match in _MENTION.finditer(text) for rank in _ranks(match)}
    of_nodes = facts.ranks_of_nodes
    if named - facts.culprits - of_nodes and not named & (facts.culprits | of_nodes):
        yield f"it accuses rank {sorted(named)}"
    names = {facts.scene.name(node) for node in facts.scene.agents}
    nodes = {name for name in names if re.search(rf"\b{name}\b", text)}
    own = facts.culprit_nodes | _nodes_of(facts)
    if nodes and not nodes & own:
        yield f"it accuses node {sorted(nodes)}"


def _nodes_of(facts: Facts) -> set[str]:
    """The nodes of culprits: naming where a rank was accuses no node."""
    each = facts.scene.case.per_node
    return {facts.scene.name(rank // each + 1) for rank in facts.culprits}


def _ranks(match: re.Match[str] | None) -> list[int]:
    if match is None:
        return []
    found: list[int] = []
    for part in re.split(", | and ", match[1]):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1) if low.isdigit() else []
    return found


def _codes(text: str, facts: Facts) -> Iterator[str]:
    for match in _CODE.finditer(text):
        for rank in _ranks(match):
            if int(match[2]) not in facts.codes(rank):
                yield f"rank {rank} did not exit with {match[2]}"


def _signals(text: str, facts: Facts) -> Iterator[str]:
    for match in _ENDED_BY.finditer(text):
        for rank in _ranks(match):
            if match[2] not in facts.signals(rank):
                yield f"rank {rank} was not ended by {match[2]}"
    named = {name for rank in facts.last for name in facts.signals(rank)} | {"SIGSTOP"}
    yield from (f"nothing was ended by {it}" for it in set(_SIGNAL.findall(text)) - named)


def _last_steps(text: str, facts: Facts) -> Iterator[str]:
    for match in _AFTER_STEP.finditer(text):
        for rank in _ranks(match):
            if abs(int(match[2]) - facts.last.get(rank, 0)) > 1:
                yield f"rank {rank} ended after step {facts.last.get(rank, 0)}"


def _progress(text: str, facts: Facts) -> Iterator[str]:
    """Only a script that numbers its steps shows how far a round got."""
    is_numbered = (PLAN | dict(facts.scene.case.plan))["sdk"]
    for match in _LEFT.finditer(text):
        if is_numbered and match[1] != "3" and facts.farthest > 1:
            yield "round 1 did make progress"


def _made_again(text: str, facts: Facts) -> Iterator[str]:
    first = facts.scene.first(2)
    if first is None or facts.scene.case.truth.incidents > 1:
        return
    for match in _AGAIN.finditer(text):
        number = int(next(group for group in match.groups() if group))
        if abs(number - max(facts.farthest - first, 0)) > 1:
            yield f"{facts.farthest - first} steps were made again"
    for match in _BEGAN.finditer(text):
        if match[1] == "2" and int(match[2]) != first:
            yield f"round 2 began after step {first}"


def _pids(text: str, facts: Facts) -> Iterator[str]:
    """A process that is named after a rank is that rank's."""
    for match in _PID.finditer(text):
        for rank in _ranks(match):
            own = {pid for _, pid, *_ in facts.scene.told(rank)}
            if own and int(match[2]) not in own:
                yield f"rank {rank} was never process {match[2]}"


def _places(text: str, facts: Facts) -> Iterator[str]:
    """A rank is on the node that had its slot; only in round 1 is that known before."""
    scene = facts.scene
    for match in _PLACE.finditer(text):
        rank, node = int(match[1]), int(match[2])
        own = rank // scene.case.per_node + 1
        if node != own and scene.case.truth.incidents == 1:
            yield f"rank {rank} was on {scene.name(own)}"


def _restarts(text: str, facts: Facts) -> Iterator[str]:
    for match in _RESTARTS.finditer(text):
        if not 0 < 10 - int(match[1]) <= facts.scene.case.truth.incidents:
            yield f"{facts.scene.case.truth.incidents} restarts were made in all"


_STATED = (_places, _restarts, _codes, _signals, _last_steps, _progress, _made_again, _pids)
