"""Facts and evidence of runs, kept to be judged again by other rules: that takes no training."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.verdict_runs.scores import Score
from everstep.bus.errors import BlobMissingError
from everstep.messages import BlobRef, Case, CasesDocument, Fact
from everstep.messages.codec import UnknownMessageError, decode
from everstep_services.attribution.analyzers.rank_ends import fingerprints
from everstep_services.attribution.analyzers.runner import BUILT_IN, AnalyzerRunner
from everstep_services.attribution.domain.case_facts import JobCases
from everstep_services.attribution.domain.combiner import CaseJudgement, combine
from everstep_services.attribution.domain.past import PastIncidents
from everstep_services.cli.api.client import Api
from everstep_services.cli.errors import CliError

_WITHIN_S = 60.0


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """One run: its verdict, the facts of its job, and the files of its evidence."""

    score: Score
    facts: tuple[Mapping[str, Any], ...]


def keep(folder: Path, name: str, score: Score, api: Api, job: str) -> None:
    """Write a run to the folder; evidence that is gone is left out."""
    own = folder / name
    own.mkdir(parents=True, exist_ok=True)
    facts = [_whole(one) for one in api.pages("facts", {"job": job}, most=None)]
    for fact in facts:
        if fact["type"].startswith("evidence_collected.") and fact.get("blob"):
            with suppress(CliError):
                path = f"incidents/{fact['incident']}/evidence/{fact['id']}"
                (own / fact["blob"]["id"]).write_bytes(api.content(path))
    (own / "run.json").write_bytes(msgspec.json.encode(Kept(score=score, facts=tuple(facts))))


def _whole(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A fact as it was sent, from what REST shows of it."""
    envelope = {name: row[name] for name in ("id", "job", "at", "source", "round") if name in row}
    return {**envelope, **row["body"], "type": row["body"].get("type") or f"{row['kind']}.v1"}


def judged_again(folder: Path) -> Iterator[Score]:
    """What today's rules say of each run that was kept."""
    for file in sorted(folder.glob("*/run.json")):
        kept = msgspec.json.decode(file.read_bytes(), type=Kept)
        case = _case(kept.facts)
        if case is None:
            yield kept.score
            continue
        judged = asyncio.run(_judged(case, file.parent))
        yield msgspec.structs.replace(
            kept.score, said=judged.cause, kind=judged.kind, ranks=judged.ranks,
            nodes=judged.nodes, confidence=judged.confidence, reason=judged.reason,
            is_inconclusive=judged.is_inconclusive,
        )  # fmt: skip


def _case(facts: Sequence[Mapping[str, Any]]) -> Case | None:
    """The first incident, as attribution would have it."""
    cases: JobCases | None = None
    for row in facts:
        with suppress(UnknownMessageError):
            fact = decode(msgspec.json.encode(row))
            assert isinstance(fact, Fact)
            cases = cases or JobCases(fact.job, CasesDocument())
            cases.take(fact)
    return cases.cases[0] if cases is not None and cases.cases else None


async def _judged(case: Case, folder: Path) -> CaseJudgement:
    async def fetch(ref: BlobRef) -> bytes:
        path = folder / ref.id
        if not path.exists():
            raise BlobMissingError(f"{ref.id} was not kept")
        return await asyncio.to_thread(path.read_bytes)

    history = PastIncidents(CasesDocument())
    names = await asyncio.to_thread(fingerprints, case)
    whole = msgspec.structs.replace(case, past=history.before(case, names))
    heard = await AnalyzerRunner(BUILT_IN).run(whole, fetch, _WITHIN_S)
    return await asyncio.to_thread(combine, whole, heard.claims, heard.missing)
