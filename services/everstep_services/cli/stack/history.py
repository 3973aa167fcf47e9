"""The history service and the API, inside `everstep up`."""

from contextlib import AbstractAsyncContextManager

import msgspec

from everstep.runtime import Parts
from everstep.settings import DEFAULT
from everstep_services.cli.stack.services import Surroundings
from everstep_services.history.replica import opened as open_service
from everstep_services.history.settings import ApiSettings, HistorySettings


def opened(around: Surroundings) -> AbstractAsyncContextManager[Parts]:
    """As in production, with its database in the state directory."""
    return open_service(
        _settings(around),
        around.settings.section(ApiSettings),
        around.bus,
        around.listener,
        around.state.token_file,
    )


def _settings(around: Surroundings) -> HistorySettings:
    """As set, but the database is in the state directory unless somebody named one."""
    settings = around.settings.section(HistorySettings)
    if around.settings.origins["history.database_url"] != DEFAULT:
        return settings
    url = f"sqlite:///{around.state.path / 'history.db'}"
    return msgspec.structs.replace(settings, database_url=url)
