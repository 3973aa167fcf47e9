"""Settings: typed, layered, refusing what they do not know, able to say where each came from.

One file, `everstep.toml`, has a section for each concern. The layers, each over the one before:
defaults, `/etc/everstep/everstep.toml`, `~/.config/everstep/everstep.toml`, `./everstep.toml`
(or one chosen file instead of all three), `EVERSTEP_<SECTION>__<KEY>`, flags.

    loaded = load({"bus": BusSettings}, files=config_files(os.environ), environ=os.environ)
    bus = loaded.section(BusSettings)
"""

from everstep.settings.layers import (
    DEFAULT,
    FILE_NAME,
    KNOWN_SECTIONS,
    MAX_FILE_BYTES,
    Flag,
    Loaded,
    Row,
    config_files,
    load,
    usual_places,
)
from everstep.settings.schema import (
    Leaf,
    Settings,
    SettingsError,
    field_help,
    is_secret,
    leaves,
    shown,
)
from everstep.settings.secrets import known_secrets, read_secret, remember_secret, wrong_mode

__all__ = [
    "DEFAULT",
    "FILE_NAME",
    "KNOWN_SECTIONS",
    "MAX_FILE_BYTES",
    "Flag",
    "Leaf",
    "Loaded",
    "Row",
    "Settings",
    "SettingsError",
    "config_files",
    "field_help",
    "is_secret",
    "known_secrets",
    "leaves",
    "load",
    "read_secret",
    "remember_secret",
    "shown",
    "usual_places",
    "wrong_mode",
]
