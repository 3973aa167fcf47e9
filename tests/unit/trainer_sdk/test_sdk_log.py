"""The SDK warns through `logging` if the script has configured it, else on stderr (E8)."""

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.conftest import CONFIGURED_LOGGER
from trainer_sdk import sdk_log
from trainer_sdk.checkpoint.events import Reporter


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    """A log handler of the script."""
    monkeypatch.setattr(sdk_log, "_printed", set())
    monkeypatch.setattr(sdk_log, "_configured_logger", CONFIGURED_LOGGER)
    logger, handler = logging.getLogger("trainer_sdk"), Heard()
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_a_script_that_has_configured_logging_gets_the_warnings_there(
    heard: Heard, capsys: pytest.CaptureFixture[str]
) -> None:
    sdk_log.warn_once("a call made no sense: 100 %s")
    sdk_log.warn_once("a call made no sense: 100 %s")
    Reporter(3, None).warn("step 5 was not saved")
    first, second = heard.records
    assert (first.getMessage(), first.levelname) == ("a call made no sense: 100 %s", "WARNING")
    assert (second.getMessage(), vars(second)["rank"]) == ("rank 3: step 5 was not saved", 3)
    assert capsys.readouterr().err == ""


def test_a_log_handler_that_fails_does_not_fail_the_training(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def emit(_: logging.LogRecord) -> None:
        raise OSError("no room")

    monkeypatch.setattr(heard, "emit", emit)
    sdk_log.warn("a line")


@pytest.mark.parametrize("imports", ["import logging", "pass"])
def test_without_a_handler_it_goes_to_stderr(imports: str) -> None:
    code = f"{imports}; from trainer_sdk.sdk_log import warn; warn('a line', 2)"
    code += "; import sys; print('logging' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == "everstep: rank 2: a line\n"
    assert done.stdout.strip() == str(imports != "pass")
