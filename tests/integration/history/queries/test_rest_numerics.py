"""REST answers: results that cannot be right, and how far results are deterministic."""

from typing import Any

import httpx2

from everstep.messages import ComparedResult, Fact
from tests.integration.conftest import Api
from tests.integration.history.test_rest_incidents import problem
from tests.integration.history.test_rest_lists import every_item, get
from tests.unit.history.facts import make


def case_facts(case: str, **judged: Any) -> list[Fact]:
    """A spike at step 41 that rank 3 of n3 computes each time, and a roll-back because of it."""
    of: dict[str, Any] = {"job": "j", "round": 2, "case": case, "step": 41, "incident": "i"}
    verdict = {
        "signal": "loss_spike", "kind": "persistent", "ranks": (3,), "node": "n3",
        "reason": "rank 3 gives 9.5 three times", "first": 9.5, "again": (9.5, None),
        "elsewhere": 2.5, "elsewhere_by": 0, "group": "layers.7",
        "samples_from": 640, "samples_to": 656, **judged,
    }  # fmt: skip
    return [
        make("numerics_suspected", **of, signal="loss_spike", value=9.5, low=1.0, high=3.0,
             ranks=(), rank=None, moved_at=40),
        make("numerics_judged", **of, **verdict),
        make("numerics_acted", **of, action="skip", outcome="done", to_step=39,
             samples_from=624, samples_to=656, reason="as the policy for persistent results says"),
        make("numerics_acted", **of, action="exclude", outcome="observed", to_step=None,
             samples_from=None, samples_to=None, reason="the policy is observe"),
    ]  # fmt: skip


def counted(number: int, *names: str, **varying: tuple[int, float]) -> Fact:
    """Each of nine results of a round was compared; two differ, or as many as given."""
    given = {**dict.fromkeys(names, (2, 0.5)), **varying}
    results = [
        ComparedResult(name=name, compared=9, different=different, largest=largest)
        for name, (different, largest) in given.items()
    ]
    return make("numerics_counted", job="j", round=number, steps=9, again=9, results=tuple(results))


async def test_a_case_has_its_sign_its_judgement_and_what_followed(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    facts = case_facts("aa")
    await api.add(make("round_formed", job="j", round=2), *facts)
    (shown,) = (await get(reader, "jobs/j/numerics"))["items"]
    assert (shown["case"], shown["step"], shown["signal"], shown["kind"], shown["incident"]) == (
        "aa", 41, "loss_spike", "persistent", "i",
    )  # fmt: skip
    suspected, judged = shown["suspected"], shown["judged"]
    assert suspected["reason"] == "at step 41 the loss left its band: 9.5, expected 1 to 3"
    assert (suspected["moved_at"], suspected["ranks"], suspected["high"]) == (40, [], 3.0)
    assert (judged["ranks"], judged["node"], judged["group"]) == ([3], "n3", "layers.7")
    assert (judged["first"], judged["again"], judged["elsewhere"]) == (9.5, [9.5, None], 2.5)
    acts = [(act["action"], act["outcome"], act["to_step"]) for act in shown["acts"]]
    assert shown["story"][0] == "At step 41 the loss left its band: 9.5, expected 1 to 3"
    assert acts == [("skip", "done", 39), ("exclude", "observed", None)]


async def test_cases_are_listed_newest_first_in_pages_and_filtered(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    transient = case_facts("bb", kind="transient")
    only_suspected = case_facts("cc")[:1]
    await api.add(make("round_formed", job="j", round=2), *case_facts("aa"), *transient,
                  *only_suspected)  # fmt: skip
    cases = await every_item(reader, "jobs/j/numerics", limit=1)
    assert [case["case"] for case in cases] == ["cc", "bb", "aa"]
    assert [len(case["acts"]) for case in cases] == [0, 2, 2]
    assert cases[0]["judged"] is None
    (found,) = await every_item(reader, "jobs/j/numerics", kind=["transient"])
    assert found["case"] == "bb"
    assert await every_item(reader, "jobs/j/numerics", round=1) == []
    assert (await problem(reader, "jobs/nobody/numerics"))[:2] == (404, "not_found")
    assert (await problem(reader, "jobs/j/numerics", kind="odd"))[0] == 422


async def test_determinism_is_counted_by_round_and_result(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    await api.add(make("round_formed", job="j", round=2), counted(1, "loss"),
                  counted(2, "loss", "layers.7"))  # fmt: skip
    rows = await every_item(reader, "jobs/j/numerics/determinism", limit=1)
    assert [(row["round"], row["name"]) for row in rows] == [
        (2, "loss"), (2, "layers.7"), (1, "loss"),
    ]  # fmt: skip
    assert (rows[0]["compared"], rows[0]["different"], rows[0]["largest"]) == (9, 2, 0.5)
    assert len(await every_item(reader, "jobs/j/numerics/determinism", round=1)) == 1
