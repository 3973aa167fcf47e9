"""What people do from a page: forms, confirmations, scopes, and values that are refused."""

from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlencode

import pytest

from everstep.messages import ControlDocument, Done, Message, encode
from everstep.subjects import CLUSTER
from tests.integration.history.dashboard.fleet_facts import JOB, node
from tests.integration.history.dashboard.visitors import OURS, FormFields, fleet, key_of
from tests.unit.history.facts import make


async def test_an_action_needs_our_form_the_typed_name_and_the_scope(tmp_path: Path) -> None:
    """CSRF, a wrong confirmation and a token that only reads each end with nothing done (A13.1)."""
    async with fleet(tmp_path) as (api, client):
        page = (await client.get(f"/do/stop?job={JOB}")).text
        form = {"key": key_of(page), "job": JOB, "reason": "a test", "confirmed": JOB}

        async def sent(headers: dict[str, str] = OURS, **more: str) -> tuple[int, str]:
            answer = await client.post("/do/stop", content=urlencode(form | more), headers=headers)
            return answer.status_code, answer.text

        assert (await sent({**OURS, "Origin": "http://evil.test"}))[0] == 403
        assert (await sent({**OURS, "Sec-Fetch-Site": "cross-site"}))[0] == 403
        assert (await sent(key="0" * 32))[0] == 403
        assert (await sent(confirmed="another"))[0] == 422
        status, text = await sent()
        assert status == 403
        assert "needs a token with the scope operate" in text
        assert api.bus is not None


async def test_what_is_asked_on_a_page_goes_the_way_of_rest(tmp_path: Path) -> None:
    """Rendezvous hears who asked and why, and its answer is shown."""
    heard: list[Message] = []

    async def save(question: Message) -> Message:
        heard.append(question)
        return Done(text="step 57 900 is saved")

    async with fleet(tmp_path, "operate") as (api, client):
        page = (await client.get(f"/do/save?job={JOB}")).text
        form = {"key": key_of(page), "job": JOB, "reason": "before the weekend", "confirmed": JOB}
        async with api.bus.answer("rendezvous", {"save": save}):
            answer = await client.post("/do/save", content=urlencode(form), headers=OURS)
        assert answer.status_code == 200, answer.text
        assert "step 57 900 is saved" in answer.text
        (question,) = heard
        assert (question.job, question.reason, question.by, question.origin) == (  # type: ignore[attr-defined]
            JOB, "before the weekend", "a operate", "rest",
        )  # fmt: skip


@pytest.mark.parametrize("hours", ["nan", "inf", "-1", "1e308", "soon"])
async def test_hours_that_make_no_sense_exclude_nothing(tmp_path: Path, hours: str) -> None:
    async with fleet(tmp_path, "operate") as (_, client):
        form = await client.get("/do/exclude?node=gpu-001")
        given = {"node": "gpu-001", "reason": "x", "confirmed": "gpu-001", "hours": hours,
                 "key": key_of(form.text)}  # fmt: skip
        answer = await client.post("/do/exclude", content=urlencode(given), headers=OURS)
        assert answer.status_code == 422
        assert "hours is a number" in answer.text


async def test_a_brake_that_is_on_can_be_released_on_the_first_page(tmp_path: Path) -> None:
    async with fleet(tmp_path, "operate") as (api, client):
        assert "Pull the brake" in (await client.get("/")).text
        braked = ControlDocument(
            settings={}, modes={}, changed_by="ann", reason="a storm", is_braked=True
        )
        await api.bus.documents("CONTROL").put(CLUSTER, encode(braked), revision=None)
        page = (await client.get("/")).text
        assert "Release the brake" in page
        assert "Pull the brake" not in page
        control = (await client.get("/control")).text
        assert "All other switches have their defaults." in control
        assert "Nothing is switched" not in control


@pytest.mark.parametrize(
    ("field", "sentence"),
    [
        ("&for=-5", "the form has no field 'for': leave it out; the fields are key, node, hours"),
        ("&hours=1&hours=0", "the form has the field 'hours' twice: give it once"),
        ("&%1b%5b31m=1", "the form has no field "),
    ],
)
async def test_a_field_that_is_unknown_or_given_twice_excludes_nothing(
    tmp_path: Path, field: str, sentence: str
) -> None:
    """As REST refuses it: a value that is not read would be replaced by the default (A13.1)."""
    async with fleet(tmp_path, "operate") as (_, client):
        form = await client.get("/do/exclude?node=gpu-001")
        given = {"node": "gpu-001", "reason": "x", "confirmed": "gpu-001", "key": key_of(form.text)}
        answer = await client.post("/do/exclude", content=urlencode(given) + field, headers=OURS)
        assert (answer.status_code, answer.headers["content-type"]) == (
            422,
            "text/plain; charset=utf-8",
        )
        assert answer.text.startswith(sentence)
        assert answer.text.count("\n") == 1
        assert "\x1b" not in answer.text


@pytest.mark.parametrize("path", ["/login", "/logout"])
async def test_a_login_and_a_logout_refuse_other_fields_too(tmp_path: Path, path: str) -> None:
    async with fleet(tmp_path) as (_, client):
        answer = await client.post(path, content="as=admin", headers=OURS)
        assert answer.status_code == 422
        assert answer.text.startswith("the form has no field 'as'")
        assert (await client.get("/jobs")).status_code == 200


async def test_a_box_that_is_neither_on_nor_left_out_stops_nothing(tmp_path: Path) -> None:
    """Otherwise the job would be stopped without the save that was asked for."""
    async with fleet(tmp_path, "operate") as (_, client):
        form = await client.get(f"/do/stop?job={JOB}")
        given = {"job": JOB, "reason": "x", "confirmed": JOB, "save_first": "yes",
                 "key": key_of(form.text)}  # fmt: skip
        answer = await client.post("/do/stop", content=urlencode(given), headers=OURS)
        assert answer.status_code == 422
        assert "save_first is on or left out" in answer.text


async def test_an_action_that_is_not_there_is_a_page_that_is_not_there(tmp_path: Path) -> None:
    async with fleet(tmp_path, "operate") as (_, client):
        answer = await client.post("/do/nothing", content="a=b", headers=OURS)
        assert answer.status_code == 404
        assert "There is no such page" in answer.text


AS_THEY_OPEN = [
    (f"stop?job={JOB}", {"save_first": True}),
    (f"restart?job={JOB}", {"save_first": False, "round": 3, "without_nodes": ()}),
    (f"drain?node={node(1)}&job={JOB}", {"node": node(1), "within_s": 60.0}),
    (f"check?node={node(1)}&job={JOB}", {"nodes": (node(1),), "checks": ()}),
    (f"capture?job={JOB}", {"evidence": (), "ranks": (), "within_s": 10.0}),
]
"""What the form of each action asks for, if a person changes nothing in it."""


async def _asked(
    folder: Path, link: str, /, **changes: str
) -> tuple[dict[str, object], FormFields]:
    """What rendezvous hears of a form that a person sends with these changes."""
    heard: list[Message] = []

    async def answer(question: Message) -> Message:
        heard.append(question)
        return Done(text="done")

    verb = link.partition("?")[0]
    async with fleet(folder, "operate") as (api, client):
        form = FormFields((await client.get(f"/do/{link}")).text)
        object_ = form.values["node" if "node" in form.values else "job"]
        given = form.values | {"reason": "a test", "confirmed": object_} | changes
        asked = {"capture": "evidence"}.get(verb, verb)
        async with api.bus.answer("rendezvous", {asked: answer}):
            sent = await client.post(f"/do/{verb}", content=urlencode(given), headers=OURS)
        assert sent.status_code == 200, sent.text
    (question,) = heard
    return {name: getattr(question, name) for name in question.__struct_fields__}, form


@pytest.mark.parametrize(("link", "expected"), AS_THEY_OPEN)
async def test_a_form_that_is_sent_as_it_opens_asks_for_what_it_describes(
    tmp_path: Path, link: str, expected: dict[str, object]
) -> None:
    """A drain and a stop save first, as their pages say; a restart names the round of its page."""
    question, _ = await _asked(tmp_path, link)
    assert {name: question[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("link", "change", "name", "value"),
    [
        (f"drain?node={node(1)}&job={JOB}", {"within_s": "0"}, "within_s", 0.0),
        (f"drain?node={node(1)}&job={JOB}", {"within_s": " "}, "within_s", 60.0),
        (f"restart?job={JOB}&round=2", {"save_first": "on"}, "round", 2),
    ],
)
async def test_a_person_changes_what_a_form_asks_for(
    tmp_path: Path, link: str, change: dict[str, str], name: str, value: object
) -> None:
    question, _ = await _asked(tmp_path, link, **change)
    assert question[name] == value


async def test_a_save_that_a_person_deselects_stays_so_on_the_page_that_asks_again(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path, "operate") as (_, client):
        form = FormFields((await client.get(f"/do/stop?job={JOB}")).text).values
        assert form.pop("save_first") == "on"
        given = form | {"reason": "x", "confirmed": "another"}
        answer = await client.post("/do/stop", content=urlencode(given), headers=OURS)
        assert answer.status_code == 422
        assert "save_first" not in FormFields(answer.text).values


@pytest.mark.parametrize("verb", ["stop", "restart", "save", "capture"])
async def test_a_job_that_is_over_has_no_form(tmp_path: Path, verb: str) -> None:
    async with fleet(tmp_path, "operate") as (_, client):
        page = (await client.get(f"/do/{verb}?job=reward-model-2")).text
        assert "The job is over, and stopped: mia asked: wrong data set" in page
        assert not FormFields(page).values
        page = (await client.get("/do/brake?job=reward-model-2")).text
        assert FormFields(page).values["job"] == "reward-model-2"


async def test_a_node_that_has_left_its_job_has_no_form_for_a_drain(tmp_path: Path) -> None:
    async with fleet(tmp_path, "operate") as (api, client):
        left = make(
            "node_left", job=JOB, node=node(1), reason="ann drains gpu-001", at=datetime.now(UTC)
        )
        await api.add(left)
        page = (await client.get(f"/do/drain?node={node(1)}&job={JOB}")).text
        assert "gpu-001 has left the job: ann drains gpu-001" in page
        assert not FormFields(page).values
        page = (await client.get(f"/do/exclude?node={node(1)}")).text
        assert FormFields(page).values["node"] == node(1)
