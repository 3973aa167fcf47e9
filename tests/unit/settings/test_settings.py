"""Settings: which layer wins, what each mistake says, what is never shown."""

import enum
import os
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta, field

from everstep.settings import (
    KNOWN_SECTIONS,
    MAX_FILE_BYTES,
    Flag,
    Leaf,
    Loaded,
    Settings,
    SettingsError,
    config_files,
    field_help,
    is_secret,
    leaves,
    load,
    read_secret,
    shown,
    usual_places,
    wrong_mode,
)

patient = settings(deadline=None)  # no promise about speed is made here


class Level(enum.Enum):
    LOW = "low"
    HIGH = "high"


class Keep(Settings, frozen=True, kw_only=True):
    events_days: int = 180
    """How long events are kept."""
    raw_days: int | None = None


class Demo(Settings, frozen=True, kw_only=True):
    url: str = "nats://127.0.0.1:4222"
    """Where it is,
    and which protocol it speaks."""
    wait_s: float = 5.0
    tries: Annotated[int, Meta(ge=1, le=9)] = 3
    is_on: bool = False
    folder: Path | None = None
    names: tuple[str, ...] = ()
    ports: tuple[int, ...] = (1, 2)
    mode: Literal["fast", "safe"] = "safe"
    level: Level = Level.LOW
    labels: dict[str, str] = field(default_factory=dict)
    password_file: Path | None = None
    keep: Keep = Keep()

    def __post_init__(self) -> None:
        if self.wait_s < 0:
            raise ValueError(f"wait_s must not be negative, got {self.wait_s:g}")


class Needy(Settings, frozen=True, kw_only=True):
    job: str


def one(
    text: str = "", *, tmp_path: Path, environ: dict[str, str] | None = None, **flags: object
) -> Loaded:
    file = tmp_path / "everstep.toml"
    file.write_text(text)
    given_flags = [
        Flag("--" + key.replace("__", "-"), key.replace("__", "."), value)
        for key, value in flags.items()
    ]
    return load({"bus": Demo}, files=[file], environ=environ or {}, flags=given_flags)


def test_each_layer_wins_over_the_one_before_and_says_so(tmp_path: Path) -> None:
    weak, strong = tmp_path / "weak.toml", tmp_path / "strong.toml"
    weak.write_text('[bus]\nurl = "nats://weak"\nwait_s = 1\ntries = 4\nis_on = true\n')
    strong.write_text("[bus]\nwait_s = 2\ntries = 5\nis_on = false\n")
    loaded = load(
        {"bus": Demo},
        files=[weak, strong],
        environ={"EVERSTEP_BUS__TRIES": "6", "EVERSTEP_BUS__IS_ON": "yes"},
        flags=[Flag("--on", "bus.is_on", value=False), Flag("--mode", "bus.mode", None)],
    )
    demo = loaded.section(Demo)
    assert (demo.url, demo.wait_s, demo.tries, demo.is_on) == ("nats://weak", 2.0, 6, False)
    assert {key: loaded.origins[f"bus.{key}"] for key in ("url", "wait_s", "tries", "is_on")} == {
        "url": f"file {weak}",
        "wait_s": f"file {strong}",
        "tries": "environment EVERSTEP_BUS__TRIES",
        "is_on": "flag --on",
    }
    assert loaded.origins["bus.mode"] == "default"


LAYERS = ("default", "file a", "file b", "environment EVERSTEP_BUS__TRIES", "flag --tries")


@patient
@given(st.lists(st.booleans(), min_size=4, max_size=4))
def test_the_strongest_layer_that_speaks_wins(spoken: list[bool]) -> None:
    folder = Path(os.environ["EVERSTEP_TEST_FOLDER"])
    for number, name in ((0, "a"), (1, "b")):
        text = f"[bus]\ntries = {number + 2}\n" if spoken[number] else ""
        (folder / name).write_text(text)
    here = os.getcwd()
    os.chdir(folder)
    try:
        loaded = load(
            {"bus": Demo},
            files=[Path("a"), Path("b")],
            environ={"EVERSTEP_BUS__TRIES": "4"} if spoken[2] else {},
            flags=[Flag("--tries", "bus.tries", 5 if spoken[3] else None)],
        )
    finally:
        os.chdir(here)
    strongest = max((index + 1 for index, said in enumerate(spoken) if said), default=0)
    assert loaded.origins["bus.tries"] == LAYERS[strongest]
    assert loaded.section(Demo).tries == (strongest + 1 if strongest else 3)


@pytest.fixture(autouse=True)
def folder_for_hypothesis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_TEST_FOLDER", str(tmp_path))


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("WAIT_S", "2", 2.0),
        ("WAIT_S", " 2.5 ", 2.5),
        ("TRIES", "9", 9),
        ("IS_ON", "on", True),
        ("IS_ON", "0", False),
        ("IS_ON", "No", False),
        ("FOLDER", "/var/x", Path("/var/x")),
        ("FOLDER", "", None),
        ("FOLDER", "none", None),
        ("NAMES", "a, b,c", ("a", "b", "c")),
        ("NAMES", "", ()),
        ("PORTS", "80,443", (80, 443)),
        ("PORTS", "[80, 443]", (80, 443)),
        ("LABELS", '{"a": "b"}', {"a": "b"}),
        ("MODE", "fast", "fast"),
        ("LEVEL", "high", Level.HIGH),
        ("URL", "tls://a", "tls://a"),
        ("KEEP__EVENTS_DAYS", "7", 7),
        ("KEEP__RAW_DAYS", "1", 1),
        ("KEEP__RAW_DAYS", "", None),
    ],
)
def test_text_from_the_environment_becomes_the_type(
    variable: str, text: str, value: object, tmp_path: Path
) -> None:
    demo: object = one(tmp_path=tmp_path, environ={f"EVERSTEP_BUS__{variable}": text}).section(Demo)
    for part in variable.lower().split("__"):
        demo = getattr(demo, part)
    assert demo == value


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (
            {"EVERSTEP_BUS__TRIES": "ten"},
            "bus.tries = 'ten' (environment EVERSTEP_BUS__TRIES): "
            "expected a whole number, at least 1 and at most 9",
        ),
        (
            {"EVERSTEP_BUS__TRIES": "10"},
            "bus.tries = '10' (environment EVERSTEP_BUS__TRIES): "
            "expected a whole number, at least 1 and at most 9",
        ),
        (
            {"EVERSTEP_BUS__WAIT_S": "5s"},
            "bus.wait_s = '5s' (environment EVERSTEP_BUS__WAIT_S): expected a number",
        ),
        (
            {"EVERSTEP_BUS__IS_ON": "maybe"},
            "bus.is_on = 'maybe' (environment EVERSTEP_BUS__IS_ON): expected true or false",
        ),
        (
            {"EVERSTEP_BUS__PORTS": "80,http"},
            "bus.ports = '80,http' (environment EVERSTEP_BUS__PORTS): "
            "expected a list, each a whole number",
        ),
        (
            {"EVERSTEP_BUS__MODE": "quick"},
            "bus.mode = 'quick' (environment EVERSTEP_BUS__MODE): expected one of fast, safe",
        ),
        (
            {"EVERSTEP_BUS__LEVEL": "top"},
            "bus.level = 'top' (environment EVERSTEP_BUS__LEVEL): expected one of low, high",
        ),
        (
            {"EVERSTEP_BUS__LABELS": "a=b"},
            "bus.labels = 'a=b' (environment EVERSTEP_BUS__LABELS): expected a table, as JSON "
            "(JSON is malformed: invalid character (byte 0))",
        ),
        (
            {"EVERSTEP_BUS__LABELS": '{"a": 1}'},
            "bus.labels.a = '1' (environment EVERSTEP_BUS__LABELS): expected text",
        ),
        (
            {"EVERSTEP_BUS__PORTS": '["http"]'},
            """bus.ports = '["http"]' (environment EVERSTEP_BUS__PORTS): """
            "expected a list, each a whole number",
        ),
        (
            {"EVERSTEP_BUS__KEEP__RAW_DAYS": "x"},
            "bus.keep.raw_days = 'x' (environment EVERSTEP_BUS__KEEP__RAW_DAYS): "
            "expected a whole number, or nothing",
        ),
        (
            {"EVERSTEP_BUS__WAIT_S": "-1"},
            "[bus] wait_s must not be negative, got -1 (environment EVERSTEP_BUS__WAIT_S)",
        ),
        (
            {"EVERSTEP_BUS__TRIESS": "1"},
            "EVERSTEP_BUS__TRIESS is not a setting; did you mean EVERSTEP_BUS__TRIES?",
        ),
        (
            {"EVERSTEP_BUS__KEEP__EVENT_DAYS": "1"},
            "EVERSTEP_BUS__KEEP__EVENT_DAYS is not a setting; "
            "did you mean EVERSTEP_BUS__KEEP__EVENTS_DAYS?",
        ),
        ({"EVERSTEP_BUS__ZZZ": "1"}, "EVERSTEP_BUS__ZZZ is not a setting"),
        (
            {"EVERSTEP_BUS_TRIES": "1"},
            "EVERSTEP_BUS_TRIES is not a setting; did you mean EVERSTEP_BUS__TRIES?",
        ),
        (
            {"EVERSTEP_BUZ__TRIES": "1"},
            "EVERSTEP_BUZ__TRIES: [buz] is not a section; did you mean bus?",
        ),
        (
            {"EVERSTEP_BUS__PASSWORD": "hunter22"},
            "EVERSTEP_BUS__PASSWORD is not a setting; a secret is read from a file: "
            "set EVERSTEP_BUS__PASSWORD_FILE",
        ),
        (
            {"EVERSTEP_BUS__TOKEN": "hunter22"},
            "EVERSTEP_BUS__TOKEN is not a setting; a secret is read from a file",
        ),
    ],
)
def test_a_mistake_in_the_environment_is_one_clear_line(
    environ: dict[str, str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError) as caught:
        one(tmp_path=tmp_path, environ=environ)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[bus]\nwait_s = '3'", "bus.wait_s = '3' (file {file}): expected a number"),
        ("[bus]\nis_on = 1", "bus.is_on = '1' (file {file}): expected true or false"),
        ("[bus]\nurl = 1", "bus.url = '1' (file {file}): expected text"),
        ("[bus]\nfolder = ''", "bus.folder = '' (file {file}): expected a path, or nothing"),
        ("[bus]\nnames = 'a'", "bus.names = 'a' (file {file}): expected a list, each text"),
        ("[bus]\ntriess = 1", "{file}: bus.triess is not a setting; did you mean bus.tries?"),
        ("[bus.keep]\nraw = 1", "{file}: bus.keep.raw is not a setting; "
         "did you mean bus.keep.raw_days?"),
        ("[bus]\nkeep = 1", "{file}: bus.keep is a section: write [bus.keep]"),
        ("bus = 1", "{file}: bus is a section: write [bus]"),
        ("[bsu]\na = 1", "{file}: [bsu] is not a section; did you mean bus?"),
        ("[zzz]\na = 1", "{file}: [zzz] is not a section"),
        ("[bus]\npassword = 'hunter22'", "{file}: bus.password is not a setting; "
         "a secret is read from a file: set bus.password_file"),
        ("[bus", "{file} is not TOML: Expected ']' at the end of a table declaration "
         "(at end of document)"),
        ("[bus]\nwait_s = -2", "[bus] wait_s must not be negative, got -2 (file {file})"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_one_clear_line(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        one(text, tmp_path=tmp_path)
    assert str(caught.value) == said.format(file=tmp_path / "everstep.toml")


def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    huge, latin, deep = tmp_path / "huge", tmp_path / "latin", tmp_path / "deep"
    huge.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    latin.write_bytes(b"[bus]\nurl = '\xe4'\n")
    deep.write_text(f"x = {'[' * 100_000}")
    lines = {
        tmp_path / "none": f"{tmp_path / 'none'} cannot be read: No such file or directory",
        tmp_path: f"{tmp_path} cannot be read: it is a folder, not a regular file",
        huge: f"{huge} is larger than 1024 KiB: no settings",
        latin: f"{latin} is not UTF-8 text (at byte 13)",
        deep: f"{deep} is not TOML: nested too deeply",
    }
    for path, said in lines.items():
        with pytest.raises(SettingsError) as caught:
            load({"bus": Demo}, files=[path], environ={})
        assert str(caught.value) == said


def test_sections_of_other_services_are_passed_over(tmp_path: Path) -> None:
    text = "".join(f"[{name}]\nanything = 1\n" for name in sorted(KNOWN_SECTIONS - {"bus"}))
    environ = {f"EVERSTEP_{name.upper()}__ANYTHING": "1" for name in KNOWN_SECTIONS - {"bus"}}
    assert one(text, tmp_path=tmp_path, environ=environ).section(Demo) == Demo()


def test_variables_that_are_no_settings_are_passed_over(tmp_path: Path) -> None:
    environ = {
        "EVERSTEP_STATE_DIR": "/x",
        "EVERSTEP_CONFIG": "/y",
        "EVERSTEP_JOB": "j",
        "HOME": "/",
    }
    assert one(tmp_path=tmp_path, environ=environ).section(Demo) == Demo()


def test_a_setting_without_a_default_must_be_given() -> None:
    with pytest.raises(SettingsError) as caught:
        load({"run": Needy}, environ={})
    assert str(caught.value) == (
        "run.job is not set: write it under [run] in everstep.toml, or set EVERSTEP_RUN__JOB"
    )


def test_a_secret_in_a_setting_is_refused_when_the_section_is_defined() -> None:
    class Careless(Settings, frozen=True, kw_only=True):
        api_token: str | None = None

    with pytest.raises(TypeError, match=r"bus\.api_token would hold a secret"):
        load({"bus": Careless}, environ={})


@patient
@given(st.text(min_size=1))
def test_the_value_of_a_secret_is_never_in_a_message(secret: str) -> None:
    for name in ("EVERSTEP_BUS__PASSWORD", "EVERSTEP_BUS__SECRET_KEY", "EVERSTEP_BUS__TOKEN"):
        with pytest.raises(SettingsError) as caught:
            load({"bus": Demo}, environ={name: f"<{secret}>"})
        assert f"<{secret}>" not in str(caught.value)


@patient
@given(st.sampled_from(leaves(Demo, "bus")), st.text())
def test_any_text_in_the_environment_is_taken_or_refused_by_name(leaf: Leaf, text: str) -> None:
    try:
        load({"bus": Demo}, environ={leaf.variable: text})
    except SettingsError as error:
        told = str(error)
    else:
        told = leaf.key
    assert leaf.key in told or told.startswith("[bus] ")


@patient
@given(st.binary(max_size=100) | st.text(alphabet="[]bus.keptrs={}'\"\n 0123").map(str.encode))
def test_any_bytes_in_a_file_are_taken_or_refused_by_name(data: bytes) -> None:
    file = Path(os.environ["EVERSTEP_TEST_FOLDER"]) / "bytes.toml"
    file.write_bytes(data)
    try:
        load({"bus": Demo}, files=[file], environ={})
    except SettingsError as error:
        told = str(error)
    else:
        told = str(file)
    assert str(file) in told


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("bus.url", "nats://u:p4ss@h:1/x", "nats://***@h:1/x"),
        ("bus.password", "p4ss", "***"),
        ("bus.password_file", Path("/run/x"), "/run/x"),
        ("bus.token_ttl_s", 5.0, "5.0"),
        ("bus.is_on", True, "true"),
        ("bus.names", ("a", "b"), "a, b"),
        ("bus.folder", None, ""),
        ("bus.text", "a\nb", "a b"),
        ("bus.text", "x" * 300, "x" * 197 + "..."),
    ],
)
def test_a_value_as_people_see_it(key: str, value: object, text: str) -> None:
    assert shown(key, value) == text


def test_names_of_secrets() -> None:
    assert all(map(is_secret, ["bus.password", "a.api_key", "a.nkey_seed", "x.auth_token"]))
    assert not any(map(is_secret, ["bus.key_file", "bus.monkey", "bus.passive_file", "a.keep"]))


def test_help_is_the_string_under_the_field(tmp_path: Path) -> None:
    assert field_help(Demo)["url"] == "Where it is, and which protocol it speaks."
    rows = {row.key: row for row in one(tmp_path=tmp_path).rows()}
    assert rows["bus.keep.events_days"].help == "How long events are kept."
    assert rows["bus.keep.events_days"].value == "180"
    assert rows["bus.tries"].help == ""
    assert [leaf.key for leaf in leaves(Demo, "bus")] == list(rows)


def test_a_section_that_was_not_loaded_is_a_mistake_of_ours(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="Needy is not among"):
        one(tmp_path=tmp_path).section(Needy)


def test_where_the_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    environ = {"HOME": str(tmp_path / "home")}
    places = usual_places(environ, root=tmp_path)
    assert places == (
        tmp_path / "etc/everstep/everstep.toml",
        tmp_path / "home/.config/everstep/everstep.toml",
        Path("everstep.toml"),
    )
    assert config_files(environ, root=tmp_path) == ()
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("")
    assert config_files(environ, root=tmp_path) == places

    named = {**environ, "EVERSTEP_CONFIG": "/a.toml"}
    assert config_files(named, root=tmp_path) == (Path("/a.toml"),)
    assert config_files(named, Path("/b.toml"), root=tmp_path) == (Path("/b.toml"),)
    personal = {"XDG_CONFIG_HOME": str(tmp_path / "xdg")}
    assert usual_places(personal)[1] == tmp_path / "xdg/everstep/everstep.toml"


def test_secrets_come_from_files(tmp_path: Path) -> None:
    file, empty, binary = tmp_path / "secret", tmp_path / "empty", tmp_path / "binary"
    file.write_text("hunter22\n")
    empty.write_text("\n")
    binary.write_bytes(b"\xff\xfe")
    assert read_secret(file) == "hunter22"
    for path, said in {
        empty: f"the secret in {empty} is empty",
        binary: f"the secret in {binary} is not text",
        tmp_path / "no": f"the secret in {tmp_path / 'no'} cannot be read: "
        "No such file or directory",
    }.items():
        with pytest.raises(SettingsError) as caught:
            read_secret(path)
        assert str(caught.value) == said

    file.chmod(0o640)
    assert wrong_mode(file) == f"{file} can be read by others (mode 640): chmod 600 {file}"
    file.chmod(0o600)
    assert wrong_mode(file) is None
