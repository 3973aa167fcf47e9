"""A secret that protects nothing is refused before a message is signed with it."""

from pathlib import Path

import pytest

from everstep.settings import SettingsError
from everstep_services.history.notifications.settings import NotifySettings, WebhookSettings
from everstep_services.history.notifications.targets import check_secrets


def settings(folder: Path, secret: str) -> NotifySettings:
    file = folder / "secret"
    file.write_text(secret)
    file.chmod(0o600)
    return NotifySettings(webhook=WebhookSettings(url="https://a", secret_file=file))


@pytest.mark.parametrize("secret", ["kJ4", "vQ8zLw3Xr7Tb2Yd", "mN5pRt\n"])
def test_a_short_secret_is_refused_in_one_line_with_the_remedy(tmp_path: Path, secret: str) -> None:
    size = len(secret.strip())
    with pytest.raises(SettingsError) as raised:
        check_secrets(settings(tmp_path, secret))
    text = str(raised.value)
    assert f"{size} bytes" in text
    assert "openssl rand -hex 32" in text
    assert "\n" not in text
    assert secret.strip() not in text


@pytest.mark.parametrize("secret", ["vQ8zLw3Xr7Tb2YdF", "öäüöäüöä"])
def test_a_long_one_is_not(tmp_path: Path, secret: str) -> None:
    check_secrets(settings(tmp_path, secret))


def test_a_file_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "later"
    check_secrets(NotifySettings(webhook=WebhookSettings(url="https://a", secret_file=file)))
