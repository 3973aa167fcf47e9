"""Which modules the forge leaves to the ranks, by what they read during their import."""

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from trainer_sdk.bootstrap.import_watch import ImportWatch
from trainer_sdk.wire import Unfit


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    with mock.patch.dict(os.environ):  # some of these modules write there
        yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def imported(folder: Path, **sources: str) -> ImportWatch:
    """The watch after the import of the first of these modules."""
    for name, text in sources.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    known = frozenset(sys.modules)
    with ImportWatch(("RANK", "MASTER_PORT"), os.environ) as imports:
        __import__(next(iter(sources)))
        imports.look(known)
    return imports


READ = [
    "import os; rank = os.environ.get('RANK', 0)",
    "import os; is_rank = 'RANK' in os.environ",
    "from os import getenv; rank = getenv('RANK')",
    "import os; rank = os.environb.get(b'RANK')",
    "import os; rank = int(os.environ.setdefault('RANK', '0'))",
    "import os; os.environ['MASTER_PORT'] = '1'",
    "import os; kept = os.environ.copy()",
    "import os; kept = dict(os.environ)",
    "import os; log = f'/tmp/log-{os.getpid()}.txt'",
    "from os import getpid; from pathlib import Path; log = Path('/tmp') / str(getpid())",
    "import time; run = time.strftime('run-%Y%m%d-%H%M%S')",
    "from datetime import datetime; run = datetime.now().isoformat()",
    "import time; run = f'run-{int(time.time())}'",
]


@pytest.mark.parametrize("source", READ)
def test_a_module_that_reads_values_of_a_rank_is_left_to_the_ranks(
    folder: Path, source: str
) -> None:
    unfit = imported(folder, reader=source).verdict()
    assert unfit is not None
    assert unfit.without == ("reader",)
    assert "reader" in unfit.reason


HARMLESS = [
    "import os; home = os.environ.get('HOME')",
    "import os; tq = {k: v for k, v in os.environ.items() if k.startswith('TQDM_')}",
    "import os\nfor name in os.environ: os.environ[name]\ndel name",
    "import time; begun = time.time()",
    "import os; pid = os.getpid()",
    "import socket; host = socket.gethostname()",
    "import os\ndef rank(): return os.environ['RANK']",
    "version = '2.14.0.dev20261123'; digits = '1234567890'; number = 1",
]


@pytest.mark.parametrize("source", HARMLESS)
def test_modules_with_harmless_values_are_fit(folder: Path, source: str) -> None:
    assert imported(folder, reader=source).verdict() is None


PACKAGE = {
    "heavy": "import heavy_dependency\nfrom heavy.zero import rank_zero\nimport other",
    "heavy__zero": "import os\nrank = os.environ.get('RANK', '0')\ndef rank_zero(): return rank",
    "heavy_dependency": "value = 1",
    "other": "import heavy_dependency, user",
    "user": "from heavy.zero import rank_zero\nhere = rank_zero",
}


def test_importers_of_a_rank_reader_are_left_to_the_ranks(folder: Path) -> None:
    sources = {"heavy____init__": "", **PACKAGE}
    sources["heavy____init__"] = sources.pop("heavy")
    for name, text in sources.items():
        path = folder.joinpath(*name.split("__", 1)).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    with ImportWatch(("RANK",), os.environ) as imports:
        __import__("heavy")
    unfit = imports.verdict()
    assert unfit is not None
    assert unfit.without == ("heavy", "other", "user")
    assert unfit.besides == ("heavy_dependency",)
    assert unfit.reason == "heavy.zero, which heavy imports, reads RANK while it is imported"


def test_a_variable_that_only_the_rank_has_is_detected_at_its_fork(folder: Path) -> None:
    imports = imported(folder, reader="import os; level = os.environ.get('SOME_LEVEL')")
    here = dict(os.environ)
    assert imports.why_unfit(here) is None
    unfit = imports.why_unfit({**here, "SOME_LEVEL": "3"})
    assert isinstance(unfit, Unfit)
    assert unfit.without == ("reader",)


def test_variables_that_imports_set_are_set_in_ranks_without_a_value(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAKEN_AWAY", "1")
    monkeypatch.setenv("NEW_TO_ALL", "1")
    monkeypatch.delenv("NEW_TO_ALL")
    source = "import os; os.environ['NEW_TO_ALL'] = '7'; del os.environ['TAKEN_AWAY']"
    imports = imported(folder, reader=source)
    own = {**os.environ, "TAKEN_AWAY": "1"}
    del own["NEW_TO_ALL"]
    assert imports.changes(own) == {"NEW_TO_ALL": "7", "TAKEN_AWAY": None}
    assert imports.changes({**own, "NEW_TO_ALL": "8"}) == {"TAKEN_AWAY": None}


def test_generators_that_the_system_has_seeded_are_found(folder: Path) -> None:
    source = "import random; drawn = random.Random(); given = random.Random(7)"
    imports = imported(folder, reader=source)
    assert imports.generators == [sys.modules["reader"].drawn]


def test_the_import_watch_restores_everything(folder: Path) -> None:
    here = (type(os.environ), type(os.environb), os.getpid, random.Random.seed)
    imported(folder, reader="from os import getpid; known = getpid()")
    assert (type(os.environ), type(os.environb), os.getpid, random.Random.seed) == here
    assert sys.modules["reader"].getpid is os.getpid
