"""What people do from a page: forms, confirmations, scopes, and values that are refused."""

from pathlib import Path
from urllib.parse import urlencode

import pytest

from everstep.messages import ControlDocument, encode
from everstep.subjects import CLUSTER
from tests.integration.history.dashboard.fleet_facts import JOB
from tests.integration.history.dashboard.visitors import OURS, fleet, key_of


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
    from everstep.messages import Done, Message

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
