"""What people install: the wheel and the sdist, and each extra in an environment of its own."""

import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from functools import cache
from pathlib import Path

import pytest

from tools import dist

ROOT = Path(__file__).parents[3]
PACKAGES = {
    "everstep": ROOT / "libs" / "everstep",
    "everstep_services": ROOT / "services" / "everstep_services",
    "trainer_sdk": ROOT / "trainer_sdk",
}


@dataclass(frozen=True)
class Built:
    wheel: Path
    sdist: Path


def build(source: Path, into: Path, *targets: str) -> None:
    """With the backend itself: no isolated environment, so no download."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(into)]
    for target in targets:
        command += ["-t", target]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder, "sdist", "wheel")
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    return Built(wheel, sdist)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata(wheel: Path) -> Message:
    (text,) = [data for name, data in contents(wheel).items() if name.endswith("/METADATA")]
    return Parser().parsestr(text.decode())


@cache
def declared() -> dict[str, list[str]]:
    """The extras of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    return extras


def resolved(extra: str) -> set[str]:
    """What an extra requires, the extras that it names included."""
    found: set[str] = set()
    for requirement in declared()[extra]:
        own = re.fullmatch(r"everstep\[(.+)\]", requirement)
        if own is None:
            found.add(requirement)
        else:
            found.update(*(resolved(name) for name in own[1].split(",")))
    return found


# ---- the files


def test_the_wheel_installs_our_three_packages_and_nothing_else(built: Built) -> None:
    (record,) = [data for name, data in contents(built.wheel).items() if name.endswith("/RECORD")]
    recorded = [line.rpartition(",")[0].rpartition(",")[0] for line in record.decode().splitlines()]
    tops = {name.partition("/")[0] for name in recorded}
    (about,) = [name for name in tops if name.endswith(".dist-info")]
    assert tops == {*PACKAGES, about}
    assert set(recorded) == set(contents(built.wheel))


def test_the_wheel_has_every_file_of_the_packages(built: Built) -> None:
    wanted = {
        f"{name}/{path.relative_to(folder)}"
        for name, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    runbooks = (ROOT / "docs" / "runbooks").iterdir()  # pages of the dashboard
    wanted |= {f"everstep_services/runbooks/{path.name}" for path in runbooks}
    found = {name for name in contents(built.wheel) if ".dist-info/" not in name}
    assert found == wanted


@pytest.mark.parametrize(
    "name",
    [
        *(f"{package}/py.typed" for package in PACKAGES),
        "everstep/store/migrations/env.py",
        "everstep/store/migrations/script.py.mako",
        "everstep/store/migrations/alembic.ini",
        "everstep/store/migrations/versions/0001_the_log.py",
    ],
)
def test_the_wheel_has_what_is_easily_forgotten(built: Built, name: str) -> None:
    assert name in contents(built.wheel)


def test_the_wheel_runs_everywhere(built: Built) -> None:
    """The wheel holds Python alone, for every platform (A1.1)."""
    assert built.wheel.name.endswith("-py3-none-any.whl")


def test_the_commands_are_everstep_and_the_launcher_of_nvrx(built: Built) -> None:
    (text,) = [v for k, v in contents(built.wheel).items() if k.endswith("/entry_points.txt")]
    assert "everstep = everstep_services.cli.__main__:main" in text.decode()
    assert "ft_launcher = everstep_services.cli.__main__:ft_launcher" in text.decode()


def test_the_sdist_has_what_a_build_needs_and_nothing_else(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    tops = {name.partition("/")[0] for name in names}
    folders = {"docs", "libs", "services", "trainer_sdk"}
    files = {"LICENSE", "README.md", "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert folders | files <= tops <= folders | files | {"CHANGELOG.md"}
    docs = {name for name in names if name.startswith("docs/")}
    assert all(name.startswith("docs/runbooks") for name in docs)


def test_a_wheel_from_the_sdist_is_the_same_wheel(built: Built, tmp_path: Path) -> None:
    # Not here: extractall wants a filter in new Pythons, which Debian 12's does not know.
    unpack = [sys.executable, "-m", "tarfile", "-e", str(built.sdist), str(tmp_path / "source")]
    subprocess.run(unpack, check=True, capture_output=True, timeout=60)
    (source,) = (tmp_path / "source").iterdir()
    build(source, tmp_path, "wheel")
    assert contents(next(tmp_path.glob("*.whl"))) == contents(built.wheel)


def test_two_builds_of_a_commit_have_the_same_bytes(tmp_path: Path) -> None:
    commit = dist.commit()
    built = [dist.build(*commit, tmp_path / name) for name in ("first", "second")]
    assert [path.name for path in built[0]] == [path.name for path in built[1]]
    assert len(built[0]) == 2
    assert [path.read_bytes() for path in built[0]] == [path.read_bytes() for path in built[1]]


def test_the_bill_names_what_all_brings_and_is_the_same_each_time(built: Built) -> None:
    text = dist.bill(built.wheel, 0)
    assert text == dist.bill(built.wheel, 0)
    names = {component["name"] for component in json.loads(text)["components"]}
    assert {"msgspec", "click", "nats-py", "starlette"} <= names
    assert not {"torch", "pytest"} & names


# ---- what they bring


def test_the_base_brings_msgspec_only(built: Built) -> None:
    requires = metadata(built.wheel).get_all("Requires-Dist", [])
    base = [line for line in requires if "extra ==" not in line]
    assert [re.split(r"[<>=~!]", line)[0] for line in base] == ["msgspec"]


OF_SCRIPTS = {"kernels", "tensorboard", "wandb"}
"""What only a training script asks for: no command and no service needs it."""
OF_FRAMEWORKS = {"deepspeed", "demo", "huggingface", "lightning", "torchtitan"}
"""Each brings torch, of gigabytes, and most bring a framework: tests/e2e/test_frameworks.py."""


def test_all_brings_what_every_other_extra_brings(built: Built) -> None:
    assert set(metadata(built.wheel).get_all("Provides-Extra", [])) == set(declared())
    others = set(declared()) - OF_SCRIPTS - OF_FRAMEWORKS
    assert resolved("all") == set().union(*(resolved(extra) for extra in others))


def test_the_base_alone_works_and_says_what_the_command_needs(built: Built, tmp_path: Path) -> None:
    """Without an extra, the SDK of the wheel is imported (A1.1)."""
    site = tmp_path / "site"
    with zipfile.ZipFile(built.wheel) as archive:
        archive.extractall(site)
    import msgspec

    (site / "msgspec").symlink_to(Path(msgspec.__file__).parent)

    def run(program: str) -> subprocess.CompletedProcess[str]:
        start = f"import sys; sys.path.insert(0, {str(site)!r}); {program}"
        command = [sys.executable, "-I", "-S", "-B", "-c", start]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)

    modules = "trainer_sdk, everstep.messages, everstep.subjects, everstep.ids, everstep.settings"
    assert run(f"import {modules}").stderr == ""
    done = run("from everstep_services.cli.__main__ import main; sys.exit(main(['version']))")
    assert done.stderr == "everstep: click is missing: pip install 'everstep[cli]'\n"
    assert done.returncode not in {0, 2}
    assert done.stdout == ""


# ---- each extra alone (make test-all)

IMPORTS = {
    "": "trainer_sdk, everstep.messages, everstep.settings",
    "bus": "everstep.bus, everstep.bus.server.dev_server, everstep.bus.topology",
    "agent": "everstep.bus, psutil, pynvml, prometheus_client",
    "checkpoint": "trainer_sdk, numpy, xxhash",
    "kernels": "trainer_sdk.device.kernels",
    "tensorboard": "trainer_sdk.trackers, tensorboard.summary",
    "wandb": "trainer_sdk.trackers, wandb",
    "cli": "everstep_services.cli.group, everstep_services.cli.api.client",
    "services": (
        "everstep.runtime, everstep.observe.http, everstep.store.database, everstep.store.schema, "
        "everstep_services.history.projector, everstep_services.history.api.app, "
        "everstep_services.straggler.replica"
    ),
    "postgres": "asyncpg, trainer_sdk",
    "daemon": "grpc, google.protobuf, trainer_sdk",
    "dev-server": "trainer_sdk",
    "ec": "trainer_sdk, numpy, pyeclib.ec_iface",
    "export": "everstep_services.cli.group, safetensors",
    "mcp": "mcp, everstep_services.cli.api.client",
    "objectstore": "trainer_sdk.checkpoint.storage.objects",
    "run": "everstep_services.cli.group, everstep_services.cli.run.launch, uvicorn, psutil",
    "traces": "everstep_services.straggler.traces, pyarrow.parquet, numpy",
    "all": (
        "everstep_services.cli.stack.supervisor, everstep_services.history.api.app, asyncpg, numpy"
    ),
}


def test_the_matrix_covers_every_extra() -> None:
    assert set(IMPORTS) | OF_FRAMEWORKS == {"", *declared()}


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment with nothing in it, not even pip."""
    folder = tmp_path / "venv"
    command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(command, check=True, timeout=60)
    return folder


def install(environment: Path, requirement: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]
    subprocess.run([*pip, "-qq", "install", requirement], check=True, timeout=500)
    checked = subprocess.run(
        [*pip, "check"], capture_output=True, text=True, check=False, timeout=60
    )
    assert checked.returncode == 0, checked.stdout


def call(environment: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program, *rest = arguments
    return subprocess.run(
        [str(environment / "bin" / program), *rest],
        env={"PATH": "/usr/bin:/bin", "HOME": str(environment)},
        cwd=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("extra", IMPORTS)
def test_an_extra_alone_installs_and_works(built: Built, environment: Path, extra: str) -> None:
    """Pip installs the wheel into an empty environment, and it works (A1.1)."""
    install(environment, f"{built.wheel}[{extra}]" if extra else str(built.wheel))
    imported = call(environment, "python", "-W", "error", "-c", f"import {IMPORTS[extra]}")
    assert imported.returncode == 0, imported.stderr

    for command in (["version"], ["status"], ["bus", "info"]):
        done = call(environment, "everstep", *command)
        assert done.returncode == 0 or len(done.stderr.splitlines()) == 1, done.stderr
        if extra not in {
            "all",
            "cli",
            "export",
            "mcp",
            "run",
            "services",
            "traces",
            "wandb",
        }:  # these bring click
            assert done.stderr == "everstep: click is missing: pip install 'everstep[cli]'\n"
    if extra in {"cli", "run", "traces", "all"}:
        assert call(environment, "everstep", "version").returncode == 0
    if extra in {"dev-server", "run", "all"}:
        assert "nats-server" in call(environment, "nats-server", "--version").stdout


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_a_command_that_needs_another_extra_says_so_in_one_line(
    built: Built, environment: Path
) -> None:
    install(environment, f"{built.wheel}[cli]")
    assert call(environment, "everstep", "--help").returncode == 0
    for command in (["bus", "info"], ["bus", "init"], ["up"]):
        done = call(environment, "everstep", *command)
        assert done.returncode not in {0, 2}
        assert re.fullmatch(r"everstep: .+ pip install 'everstep\[.+\]'\n", done.stderr), command


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_the_sdist_installs(built: Built, environment: Path) -> None:
    install(environment, str(built.sdist))
    assert call(environment, "python", "-c", "import trainer_sdk").returncode == 0
