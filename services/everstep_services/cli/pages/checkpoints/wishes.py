"""What is to be done about a checkpoint, as the API and the catalog are asked for it."""

from dataclasses import dataclass
from typing import Any, Self

from everstep_services.cli.api.client import Api
from everstep_services.cli.operator_requests import Wish, asker, quoted


@dataclass(frozen=True, slots=True)
class CheckpointWish(Wish):
    """Something about the checkpoint of a step."""

    @classmethod
    def of(cls, action: str, job: str, step: int, reason: str, tier: str = "global") -> Self:
        """Do this about that step in a tier."""
        return cls("change", reason, job, details={"action": action, "step": step, "tier": tier})

    def tell(self, api: Api) -> Any:
        """Ask the API for it."""
        what = f"{self.details['step']}:{self.details['action']}"
        body = {"reason": self.reason, "user": asker(), "tier": self.details["tier"]}
        return api.post(f"jobs/{quoted(self.job)}/checkpoints/{what}", body)


@dataclass(frozen=True, slots=True)
class ScanWish(Wish):
    """The index compared with the files."""

    def tell(self, api: Api) -> Any:
        """Ask the API for it."""
        body = {"reason": self.reason, "user": asker(), **self.details}
        return api.post(f"jobs/{quoted(self.job)}/checkpoints:scan", body)
