"""Show past which limits ranks have stalled, and why; or set one."""

import click

from everstep.messages.questions.health import LEAST_LIMIT_S, MOST_LIMIT_S
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.operator_requests import OUTSIDE, LimitRequest, fulfil, with_reason
from everstep_services.cli.times import seconds

_AUTO = "auto"


class _Setting(click.ParamType[tuple[str, float]]):
    """A section and its limit: `checkpoint=30m`, or `checkpoint=auto`."""

    name = "setting"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value
        section, _, said = str(value).rpartition("=")
        limit_s = 0.0 if said == _AUTO else seconds(said)
        if not section or limit_s is None or (limit_s == 0 and said != _AUTO):
            self.fail(f"{value!r} is not a limit: write SECTION=30s, =10m or =auto", param, ctx)
        if 0 < limit_s < LEAST_LIMIT_S:
            self.fail(f"{value!r} is too short: the least is {LEAST_LIMIT_S:g}s", param, ctx)
        if limit_s > MOST_LIMIT_S:
            text = f"the most is 366 days, {MOST_LIMIT_S:.0f}s"
            self.fail(f"{value!r} is too long: {text}", param, ctx)
        return "" if section == OUTSIDE else section, limit_s


@click.command()
@click.argument("job")
@click.option(
    "--set",
    "settings",
    type=_Setting(),
    multiple=True,
    metavar="SECTION=SPAN",
    help="The limit of this section; auto has it learned again. May be given several times.",
)
@with_reason
@click.pass_obj
def command(
    invocation: Invocation, *, job: str, settings: tuple[tuple[str, float], ...], reason: str
) -> None:
    """Show how long each section of a job may take before its rank has stalled, and why.

    `outside` is the time outside all sections, `first-step` everything up to the end of a round's
    first step, `step` and `heartbeat` the time from one to the next. While ranks run, the list has
    each limit that can apply to them, as reported by their agents. A limit that you set applies at
    once, in all rounds, wherever its name is open, and overrides --limit, until it is set to auto.
    """
    from everstep_services.cli.api.location import open_api
    from everstep_services.cli.pages.limits import print_limits

    for section, limit_s in settings:
        details = {"section": section, "limit_s": limit_s}
        fulfil(invocation, LimitRequest("set_limit", reason, job, details=details))
    if not settings:
        with open_api(invocation) as api:
            print_limits(invocation, api, job)
