"""The streams of `everstep up`: what its settings say about their retention holds."""

from pathlib import Path

from everstep.bus import BusSettings, connect
from everstep.bus.auth.roles import ADMIN, SERVICE
from everstep.bus.server.dev_server import DevServer, dev_server
from everstep.bus.topology import LOGS_STREAM
from everstep.settings import load
from everstep_services.cli.stack.supervisor import set_up, tuned

DAY_NS = 86_400 * 10**9


async def age_days(server: DevServer, stream: str) -> float:
    async with connect(server.settings(ADMIN), "test") as bus:
        answer = await bus.jetstream.api(f"STREAM.INFO.{stream}", {})
    return float(answer["config"]["max_age"]) / DAY_NS


async def test_each_start_applies_the_settings_of_retention(tmp_path: Path) -> None:
    """Also to streams that an earlier start has made."""
    async with dev_server(tmp_path) as server:
        await set_up(server, BusSettings(facts_days=3, logs_days=2))
        assert await age_days(server, "FACTS") == 3
        assert await age_days(server, LOGS_STREAM) == 2
        await set_up(server, BusSettings(facts_days=4))
        assert await age_days(server, "FACTS") == 4
        assert await age_days(server, LOGS_STREAM) == 7


def test_services_get_the_settings_of_the_bus_that_were_made(tmp_path: Path) -> None:
    """And the login of `everstep up`, whatever the settings name."""
    environ = {
        "EVERSTEP_BUS__REQUEST_WITHIN_S": "9",
        "EVERSTEP_BUS__LOGS_DAYS": "1",
        "EVERSTEP_BUS__URL": "nats://elsewhere:4222",
    }
    loaded = load({"bus": BusSettings}, files=[], environ=environ)
    login = BusSettings(url="nats://127.0.0.1:1", credentials_file=tmp_path / f"{SERVICE}.creds")
    bus = tuned(login, loaded)
    assert (bus.request_within_s, bus.logs_days, bus.facts_days) == (9, 1, 30)
    assert (bus.url, bus.credentials_file) == (login.url, login.credentials_file)
