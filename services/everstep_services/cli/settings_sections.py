"""Which class holds which section of the settings: one line each, imported when asked."""

import importlib

from everstep.settings import Settings

SECTIONS = {
    "bus": "everstep.bus.settings:BusSettings",
    "agent": "everstep_services.agent.settings:AgentSettings",
    "checks": "everstep_services.agent.probes.settings:ChecksSettings",
    "log": "everstep.observe.settings:LogSettings",
    "observe": "everstep.observe.settings:ObserveSettings",
    "history": "everstep_services.history.settings:HistorySettings",
    "health": "everstep_services.health.settings:HealthSettings",
    "logins": "everstep_services.logins.settings:LoginSettings",
    "rendezvous": "everstep_services.rendezvous.settings:RendezvousSettings",
    "catalog": "everstep_services.catalog.settings:CatalogSettings",
    "kubernetes": "everstep_services.kubernetes.settings:KubernetesSettings",
    "straggler": "everstep_services.straggler.settings:StragglerSettings",
    "attribution": "everstep_services.attribution.settings:AttributionSettings",
    "api": "everstep_services.history.settings:ApiSettings",
    "notify": "everstep_services.history.notifications.settings:NotifySettings",
    "client": "everstep_services.cli.api.location:ClientSettings",
}


def section_class(name: str) -> type[Settings]:
    """The class of a section."""
    module, _, attribute = SECTIONS[name].partition(":")
    section: type[Settings] = getattr(importlib.import_module(module), attribute)
    return section


def known_sections() -> tuple[dict[str, type[Settings]], list[str]]:
    """Every section that can be imported here, and one line for each that cannot."""
    sections: dict[str, type[Settings]] = {}
    missing: list[str] = []
    for name in SECTIONS:
        try:
            sections[name] = section_class(name)
        except ModuleNotFoundError as error:
            missing.append(f"[{name}] is left out: {error.name} is not installed")
    return sections, missing
