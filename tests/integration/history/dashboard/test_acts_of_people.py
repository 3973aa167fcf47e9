"""What the pages of a job and of the fleet tell about what people did."""

import re
from datetime import UTC, datetime
from pathlib import Path

from everstep.subjects import CLUSTER
from everstep_services.history.dashboard.pages.jobs import lost_to_people
from tests.integration.history.dashboard.visitors import fleet
from tests.unit.history.facts import make


async def test_the_page_of_a_job_tells_what_people_did_and_the_steps_lost_by_that(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path) as (api, client):
        now = datetime.now(UTC)
        act = {"job": "drained", "action": "drain_node", "target": "c-n2", "at": now, "round": 1}
        await api.add(
            make("job_started", job="drained", at=now),
            make("round_formed", job="drained", round=1, at=now),
            make("operator_acted", by="ann", outcome="accepted", reason="fan", origin="cli", **act),
            make("operator_acted", by="health", outcome="accepted", reason="ECC",
                 origin="service", **act),
            make("round_ended", job="drained", round=1, cause="operator", last_step=529, at=now),
            make("round_formed", job="drained", round=2, at=now),
            make("progress_made", job="drained", round=2, step=1, is_first=True, lost_steps=529,
                 at=now),
            make("node_included", job=CLUSTER, node="c-n2", by="ann", reason="away3", at=now),
        )  # fmt: skip
        page = (await client.get("/jobs/drained")).text
        front = (await client.get("/")).text
    acts = page.partition('id="acts"')[2].partition("</section>")[0]
    assert re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td>", acts) == [("ann", "drain node c-n2")]
    assert "529 of its 529 lost steps were made again because people ended round 1." in acts
    newest = front.partition('id="newest"')[2].partition("</section>")[0]
    assert "ann: drain node c-n2: fan" in newest
    assert re.search(r"node included</span>.*?ann: away3</a><small>all jobs · c-n2<", newest)
    assert "_cluster" not in newest


def test_steps_are_lost_to_people_where_the_last_round_with_steps_was_ended_by_them() -> None:
    def row(
        number: int, cause: str | None, last: int | None, lost: int | None
    ) -> dict[str, object]:
        return {"round": number, "end_cause": cause, "last_step": last, "lost_steps": lost}

    rounds = [
        row(5, None, 400, 7),
        row(4, "rank_failed", 390, 30),
        row(3, "start_failed", None, None),
        row(2, "operator", 300, 100),
        row(1, "rank_failed", 200, None),
    ]
    assert lost_to_people(rounds) == (30, [2])
