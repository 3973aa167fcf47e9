"""The [kubernetes] section: where the API server is, and what the signs of its nodes cause."""

from pathlib import Path
from typing import Literal

from everstep.settings import Settings

Reaction = Literal["ignore", "exclude", "drain"]
Marking = Literal["observe", "taint", "cordon"]
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DEPARTURES = (
    "ToBeDeletedByClusterAutoscaler",
    "karpenter.sh/disrupted",
    "cloud.google.com/impending-node-termination",
    "aws-node-termination-handler/spot-itn",
    "aws-node-termination-handler/scheduled-maintenance",
    "node.cloudprovider.kubernetes.io/shutdown",
    "node.kubernetes.io/out-of-service",
)


class KubernetesSettings(Settings, frozen=True, kw_only=True):
    """How nodes of Kubernetes are watched and marked."""

    api_url: str = "https://kubernetes.default.svc"
    """The API server; the default is its name in every cluster."""
    token_file: Path = _ACCOUNT / "token"
    """The token of the service account. It is read again for each request, because it changes."""
    ca_file: Path = _ACCOUNT / "ca.crt"
    """The authority that has signed the API server's certificate."""
    node_selector: str = ""
    """Only nodes with these labels, as in `kubectl get nodes --selector`."""
    on_cordon: Reaction = "exclude"
    """What a cordoned node causes: `exclude` keeps it out of the next rounds, `drain` also ends its
    part in the present one, after a save."""
    on_departure: Reaction = "drain"
    """The same for a node that will be taken away: one with a taint of `departure_taints`, or any
    other taint that evicts pods."""
    on_condition: Reaction = "exclude"
    """The same for a node with a condition of `conditions`."""
    departure_taints: tuple[str, ...] = DEPARTURES
    """The keys of taints that announce the end of a node."""
    conditions: tuple[str, ...] = ()
    """Types of conditions of nodes that are bad while true, such as those of the node problem
    detector: `KernelDeadlock`."""
    save_within_s: float = 300.0
    """How long ranks may save before a drained node leaves."""
    exclude_for_s: float = 3600.0
    """How long an exclusion lasts. It is renewed while the node has its sign, and ends by itself
    if this service does not run."""
    marks: Marking = "observe"
    """What happens to a node that Everstep has excluded: `taint` adds the taint
    `everstep.io/excluded`, `cordon` cordons it; `observe` only logs it. The mark is removed with
    the exclusion."""
    marks_most: int = 3
    """At most this many nodes are marked at the same time."""
    look_every_s: float = 10.0
    """How often exclusions are compared with marks."""
    retry_most_s: float = 60.0
    """The longest wait between two attempts at an API server that does not answer."""

    def __post_init__(self) -> None:
        self._above_zero("save_within_s exclude_for_s look_every_s retry_most_s", 1e7)
        self._at_least(1, "marks_most")
        if not self.api_url.startswith(("https://", "http://127.0.0.1", "http://localhost")):
            raise ValueError(f"api_url must begin with https://: {self.api_url!r}")
