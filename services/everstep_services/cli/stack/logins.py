"""The logins service, inside `everstep up`."""

from contextlib import AbstractAsyncContextManager

from everstep.bus.auth.accounts import Operator
from everstep.runtime import Parts
from everstep_services.cli.stack.services import Surroundings
from everstep_services.logins.service import opened as open_service
from everstep_services.logins.settings import LoginSettings


def opened(around: Surroundings) -> AbstractAsyncContextManager[Parts]:
    """As in production, with keys that follow from the operator's in the state directory."""
    settings = around.settings.section(LoginSettings)
    operator = Operator.opened(around.state.path / "nats")
    return open_service(operator.signers.valid_for(settings.valid_s), around.bus)
