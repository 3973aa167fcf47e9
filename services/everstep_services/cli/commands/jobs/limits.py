"""Show past which limits ranks have stalled, and why; or set one."""

import click

from everstep.messages.questions.health import LEAST_LIMIT_S, MOST_LIMIT_S
from everstep_services.cli.group import ShowGroup
from everstep_services.cli.invocation import NAME, Invocation
from everstep_services.cli.job_argument import job_at_work, with_newest_job
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


@click.group(cls=ShowGroup)
def command() -> None:
    """Show how long each section of a job may take before its rank has stalled, or set a limit.

    `everstep limits JOB` is short for `everstep limits show JOB`.
    """


@command.command()
@with_newest_job
@click.option("--set", "settings", type=_Setting(), multiple=True, hidden=True)
@with_reason
def show(
    invocation: Invocation, *, job: str, settings: tuple[tuple[str, float], ...], reason: str
) -> None:
    """Show how long each section of a job may take before its rank has stalled, and why.

    `outside` is the time outside all sections, `first-step` everything up to the end of a round's
    first step, `step` and `heartbeat` the time from one to the next. While ranks run, the list has
    each limit that can apply to them, as reported by their agents.
    """
    from everstep_services.cli.pages.limits import print_limits

    _set(invocation, job, settings, reason)
    if not settings:
        with invocation.open_api() as api:
            print_limits(invocation, api, job)


@command.command(name="set")
@click.option(
    "--job", type=NAME, callback=job_at_work, help="The job; by default the only one at work."
)
@click.argument("settings", type=_Setting(), nargs=-1, required=True, metavar="SECTION=SPAN...")
@with_reason
def set_(
    invocation: Invocation, *, job: str, settings: tuple[tuple[str, float], ...], reason: str
) -> None:
    """Set the limit of sections of a job; auto has it learned again.

    It applies at once, in all rounds, wherever the section's name is open, and overrides --limit,
    until it is set to auto.
    """
    _set(invocation, job, settings, reason)


def _set(
    invocation: Invocation, job: str, settings: tuple[tuple[str, float], ...], reason: str
) -> None:
    for section, limit_s in settings:
        details = {"section": section, "limit_s": limit_s}
        fulfil(invocation, LimitRequest("set_limit", reason, job, details=details))
