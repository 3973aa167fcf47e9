"""Each contract test runs over what is in memory and over the real thing: buses and storages."""

import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from everstep.bus import connect
from everstep.bus.ports import Bus
from everstep.bus.server.dev_server import DevServer
from tests.contract.azure_server import CONTAINER, PROGRAM, WHY_NOT, azure_server
from tests.contract.google_server import BUCKET as GOOGLE_BUCKET
from tests.contract.google_server import google_server
from tests.contract.s3_server import BUCKET, s3_server
from tests.fakes.bus import MemoryBus, MemoryServer
from trainer_sdk.checkpoint.storage import Storage, storage_for


@pytest.fixture(params=["memory", "nats"])
def server(request: pytest.FixtureRequest) -> DevServer | None:
    """None for the bus in memory. Not async: starting a server would block the loop."""
    return request.getfixturevalue("shared_nats") if request.param == "nats" else None


@pytest.fixture
async def two(server: DevServer | None, tmp_path: Path) -> AsyncIterator[tuple[Bus, Bus]]:
    """Two processes on one bus."""
    if server is None:
        memory = MemoryServer()
        yield MemoryBus(memory), MemoryBus(memory)
        return
    async with AsyncExitStack() as stack:
        settings = server.settings("service")
        one = await stack.enter_async_context(connect(settings, "one", spool=tmp_path / "one"))
        other = await stack.enter_async_context(
            connect(settings, "other", spool=tmp_path / "other")
        )
        yield one, other


@pytest.fixture
def bus(two: tuple[Bus, Bus]) -> Bus:
    return two[0]


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with s3_server(tmp_path_factory.mktemp("s3")) as environment:
        yield environment


@pytest.fixture(scope="session")
def gs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with google_server(tmp_path_factory.mktemp("gs")) as environment:
        yield environment


@pytest.fixture(scope="session")
def az(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    if PROGRAM is None:
        pytest.skip(WHY_NOT)
    with azure_server(tmp_path_factory.mktemp("az")) as environment:
        yield environment


_BUCKETS = {"s3": BUCKET, "gs": GOOGLE_BUCKET, "az": CONTAINER}
SERVED = tuple(_BUCKETS)


@pytest.fixture(params=["folder", "file", "memory", *SERVED])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "folder":
        return str(tmp_path / "kept")
    if request.param == "file":
        return (tmp_path / "kept here").as_uri()
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/kept"
    for name, value in request.getfixturevalue(request.param).items():
        monkeypatch.setenv(name, value)
    return f"{request.param}://{_BUCKETS[request.param]}/{uuid.uuid4().hex}/kept"


@pytest.fixture
def storage(place: str) -> Storage:
    return storage_for(place)
