"""When a verdict is revised, and what a correction by a person keeps of the verdict before."""

from msgspec.structs import replace

from everstep import ids
from everstep.messages import CorrectVerdict
from everstep.verdict_causes import VerdictCause
from everstep_services.attribution.domain.combiner import CaseJudgement, combine
from everstep_services.attribution.domain.verdicts import (
    NOT_EXPLAINED,
    VerdictContext,
    concluded,
    corrected,
)
from tests.unit.attribution.cases import NOON, case, claim

NOW = VerdictContext(NOON, ids.new_id)


def correction(cause: VerdictCause) -> CorrectVerdict:
    return CorrectVerdict(
        job="j", incident="i", by="ada", cause=cause, reason=f"it was {cause}", culprit_ranks=(1,)
    )


def test_a_withdrawn_correction_is_no_alternative() -> None:
    """Only the verdict that evidence gave stays beside the last correction."""
    of_evidence = concluded(case(), combine(case(), [claim("gpu", ranks=(0,))], ()), NOW)
    assert of_evidence is not None
    known = replace(case(), verdict=of_evidence)
    _, first = corrected(known, correction("network"), NOW)
    _, second = corrected(replace(known, verdict=first), correction("storage"), NOW)
    for held in (first, second):
        (other,) = held.alternatives
        assert (other.cause, other.confidence) == ("gpu", of_evidence.confidence)
        assert other.reason.endswith("; a person has corrected it")
    _, again = corrected(replace(known, verdict=second), correction("storage"), NOW)
    assert again.alternatives == second.alternatives


def test_a_statement_that_later_evidence_no_longer_supports_is_taken_back() -> None:
    """The cause, the culprit and the confidence may stay."""
    early = ("rank 1 stands elsewhere", "rank 2 left no stack")

    def judged(*says: str) -> CaseJudgement:
        return combine(case(), [claim(says=text) for text in says], ())

    first = concluded(case(), judged(*early), NOW)
    assert first is not None
    known = replace(case(), verdict=first)
    assert concluded(known, judged(*early), NOW) is None
    revised = concluded(known, judged("rank 1 stands elsewhere", "rank 2 waits"), NOW)
    assert revised is not None
    assert {item.says for item in revised.evidence} == {"rank 1 stands elsewhere", "rank 2 waits"}


def test_what_was_missing_and_has_come_is_not_missing_any_more() -> None:
    """What one revision alone says, as of its explanation, makes no other revision."""
    claims = [claim(says="rank 1 stands elsewhere")]
    lacks = ("analyzer stacks was not done after 3 s", "log of n1: not armed")
    first = concluded(case(), combine(case(), claims, lacks), NOW)
    assert first is not None
    told = replace(first, missing=(f"{NOT_EXPLAINED}: HTTP Error 500", *first.missing))
    known = replace(case(), verdict=told)
    assert concluded(known, combine(case(), claims, lacks), NOW) is None
    revised = concluded(known, combine(case(), claims, lacks[1:]), NOW)
    assert revised is not None
    assert revised.missing == lacks[1:]
