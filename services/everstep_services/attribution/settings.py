"""The [attribution] section: how soon a verdict is given, and how long an analyzer may take."""

from pathlib import Path
from typing import Literal

from everstep.settings import Settings
from everstep_services.attribution.domain.policy import PolicySwitches


class ExplainerSettings(Settings, frozen=True, kw_only=True):
    """A language model that puts finished verdicts into words. Off unless a URL is given."""

    url: str = ""
    """The address of a language model that speaks OpenAI's API: `http://127.0.0.1:8000/v1`. It gets
    the verdict with its evidence; known kinds of secrets are masked.
    """
    model: str = ""
    """The name of the model, as the endpoint knows it."""
    key_file: Path | None = None
    """A file with the API key of the endpoint, if it needs one."""
    within_s: float = 30.0
    """An answer that takes longer is given up."""
    most_tokens: int = 400
    """The most tokens of an answer."""

    def __post_init__(self) -> None:
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, got {self.url!r}")
        if self.url and not self.model:
            raise ValueError("url needs model: the name of a model at that endpoint")
        self._above_zero("within_s most_tokens")


class AttributionSettings(Settings, frozen=True, kw_only=True):
    """When incidents are judged, and what follows. No setting here delays a restart."""

    first_within_s: float = 4.0
    """A verdict is given this long after the first report of an incident, even if evidence is still
    missing; sooner once all nodes have stopped their ranks. Later evidence amends it."""
    quiet_s: float = 0.5
    """A complete case is judged once nothing has been added to it for this long."""
    again_after_s: float = 1.0
    """Evidence added to a judged case is weighed once nothing more has arrived for this long."""
    analyzer_within_s: float = 3.0
    """An analyzer that takes longer is left out of the verdict at first, then asked once more."""
    analyzer_longest_s: float = 120.0
    """How long that second attempt may take."""
    at_once: int = 2
    """How many incidents are analyzed at the same time."""
    user_errors: Literal["observe", "enforce"] = "observe"
    """Stop a job whose user code, configuration or data failed in the same way twice, without a new
    step between. This and the next three are switches, too: `attribution.user_errors`."""
    repeat_offenders: Literal["observe", "enforce"] = "observe"
    """Exclude a node that verdicts name again and again, and let a spare take its slot."""
    offences: int = 2
    """The number of verdicts that make a node a repeat offender …"""
    offences_within_s: float = 14 * 86_400.0
    """… when they come within this time."""
    keep_days: int = 30
    """The cases of a job are deleted this long after its end; its evidence is kept as long."""
    explainer: ExplainerSettings = ExplainerSettings()
    """A model that explains finished verdicts; it never decides."""

    def __post_init__(self) -> None:
        self._above_zero("quiet_s again_after_s analyzer_within_s offences_within_s")
        if self.first_within_s < self.quiet_s:
            raise ValueError(
                f"need quiet_s <= first_within_s, got {self.quiet_s:g} and {self.first_within_s:g}"
            )
        if self.analyzer_longest_s < self.analyzer_within_s:
            raise ValueError(
                f"need analyzer_within_s <= analyzer_longest_s, got {self.analyzer_within_s:g} and "
                f"{self.analyzer_longest_s:g}"
            )
        self._at_least(1, "offences at_once keep_days")


def defaults(settings: AttributionSettings) -> PolicySwitches:
    """What holds where nothing was switched."""
    return PolicySwitches(
        user_errors=settings.user_errors,
        repeat_offenders=settings.repeat_offenders,
        offences=settings.offences,
        offences_within_s=settings.offences_within_s,
    )
