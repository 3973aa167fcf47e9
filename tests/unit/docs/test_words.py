"""The page of words has each service, phase, tier and scope that people meet."""

from pathlib import Path
from typing import get_args

import pytest

from everstep_services.rendezvous.domain.state import Phase
from tools.check_words import GLOSSARY, ROOT, glossary_terms
from trainer_sdk.checkpoint.restore.choice import Tier

TEXT = (ROOT / GLOSSARY).read_text(encoding="utf-8")
SERVICES = sorted(
    {
        module.parent.name
        for name in ("replica.py", "service.py")
        for module in Path(ROOT / "services/everstep_services").glob(f"*/{name}")
    }
)


def test_there_are_services() -> None:
    assert {"rendezvous", "history", "logins"} <= set(SERVICES)


@pytest.mark.parametrize("name", SERVICES)
def test_each_service_has_a_definition(name: str) -> None:
    terms = {term for _, term in glossary_terms(TEXT)}
    assert name in terms or f"the service `{name}`" in TEXT


@pytest.mark.parametrize("phase", get_args(Phase))
def test_each_phase_of_a_job_has_a_definition(phase: str) -> None:
    assert phase in {term for _, term in glossary_terms(TEXT)}


@pytest.mark.parametrize("tier", get_args(Tier))
def test_each_tier_is_named(tier: str) -> None:
    (row,) = [line for line in TEXT.splitlines() if line.startswith("| tier |")]
    assert f"`{tier}`" in row


@pytest.mark.parametrize("number_and_term", list(glossary_terms(TEXT)), ids=lambda pair: pair[1])
def test_each_word_has_a_meaning(number_and_term: tuple[int, str]) -> None:
    number, _ = number_and_term
    assert len(TEXT.splitlines()[number - 1].split("|")[2].strip()) > 10
