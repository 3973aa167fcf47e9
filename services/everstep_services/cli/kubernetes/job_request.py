"""What a manifest is written for, and what is refused before it is written. Pure."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from everstep.ids import BadNameError, checked_name
from everstep_services.cli.run.arguments import Given, UsageError
from everstep_services.cli.run.compatibility import nodes_of

Kind = Literal["job", "jobset"]
Address = Literal["pod-ip", "service"]
RETRIES = 2
"""Failures of one pod after which it is tried again; as in batch scripts for Slurm."""
GRACE_S = 600
IN_JOB_RESTARTS = 3
_PODS_MOST = 100_000
"""The most indexes of an Indexed Job."""
_LABEL = 63
_SUFFIX = len("-xxxxx")
"""JobSet wants room for the random end of a pod's name."""
GROUP = "node"
"""The replicated job of a JobSet."""
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?")
_IMAGE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._:/@-]{0,511}")
_LABEL_KEY = re.compile(
    r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
_BUS_URL = re.compile(r"(nats|tls)://[A-Za-z0-9.,:/\[\]-]+")


@dataclass(frozen=True, slots=True)
class ClaimMount:
    """A claim, and where its volume is in the container."""

    claim: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """What a manifest is written for."""

    words: tuple[str, ...]
    """The words after `everstep run`."""
    job: str
    image: str
    name: str = ""
    """The name of its objects; by default it follows from the job's."""
    namespace: str = ""
    kind: Kind = "job"
    bus_url: str = "nats://everstep-bus.everstep:4222"
    bus_secret: str = ""
    """The secret with the login, as `bus.creds`; by default it follows from the name."""
    bus_ca: bool = False
    """The secret has the bus's authority, as `ca.pem`."""
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    cpu: str = "4"
    memory: str = "16Gi"
    shared_memory: str = "8Gi"
    disk: str = "20Gi"
    mounts: tuple[ClaimMount, ...] = ()
    grace_s: int = GRACE_S
    retries: int = RETRIES
    user: int = 10001
    pods_per_rack: int = 0
    """With a JobSet: the pods of one of its jobs, which run in one rack."""
    rack_label: str = ""
    """The label of nodes with their rack."""
    address: Address = "pod-ip"
    queue: str = ""
    """Kueue's queue."""


@dataclass(frozen=True, slots=True)
class JobShape:
    """The numbers that follow from a request, and its names."""

    name: str
    secret: str
    pods: int
    groups: int
    """Jobs of a JobSet; 1 otherwise."""

    @property
    def pods_per_group(self) -> int:
        """Pods of one job."""
        return self.pods // self.groups


def shape_of(request: JobRequest, given: Given) -> JobShape:
    """The checked numbers and names. Raises `UsageError`, one line, for what cannot work."""
    _check_words(given)
    _check_texts(request, given)
    _check_sizes(request, given)
    _, most = nodes_of(given)
    pods = most + (given.whole("spares") or 0)
    if pods > _PODS_MOST:
        raise UsageError(
            f"--nnodes and --spares ask for {pods} pods, and an indexed Job has at most "
            f"{_PODS_MOST}: start fewer nodes, with more ranks on each"
        )
    groups = _groups(request, pods)
    name = _name_of(request, pods // groups, groups)
    secret = request.bus_secret or f"everstep-bus-{name}"
    _check_dns("--bus-secret", secret, 253)
    return JobShape(name, secret, pods, groups)


_WHY_NOT = {
    "job": "name the job before `--`, as --job of `everstep kubernetes job`",
    "standalone": "leave it out: a pod is one node of the job",
    "infra_rank": "each pod has its own from its index; leave it out",
    "node_rank": "each pod has its own from its index; leave it out",
    "node_id": "each pod has the name of its node; leave it out",
    "allocation": "pods are replaced one by one; leave it out",
    "address": "each pod has its own; see --address before `--`",
    "bus_url": "use --bus-url before `--`",
    "bus_user": "a pod logs in with a secret; see --bus-secret",
    "bus_password_file": "a pod logs in with a secret; see --bus-secret",
    "bus_credentials_file": "a pod logs in with a secret; see --bus-secret",
    "preempt_grace_s": "use --grace before `--`: the pod's own grace depends on it",
    "shutdown_timeout": "use --grace before `--`: the pod's own grace depends on it",
    "state_dir": "it is a volume of the pod; leave it out",
}


def _check_words(given: Given) -> None:
    if not given.script:
        raise UsageError(
            "which training shall run? everstep kubernetes job [options] -- "
            "[options of everstep run] SCRIPT [arguments]"
        )
    for name, why in _WHY_NOT.items():
        if name in given.values:
            raise UsageError(f"{given.origins[name]} after `--`: {why}")


def _check_texts(request: JobRequest, given: Given) -> None:
    try:
        checked_name("job", request.job)
        "\0".join((*request.words, given.script or "")).encode()
    except BadNameError as error:
        raise UsageError(f"--job: {error}") from error
    except UnicodeEncodeError as error:
        raise UsageError("a word after `--` is not UTF-8, which a manifest must be") from error
    if request.user == 0:
        raise UsageError("--user 0: the restricted profile allows no root; give another user id")
    for option, text, pattern, remedy in _shaped(request):
        if not pattern.fullmatch(text):
            raise UsageError(f"{option} {text[:80]!r}: {remedy}")
    _check_mounts(request)
    for option, text, longest in (
        ("--namespace", request.namespace, _LABEL),
        ("--queue", request.queue, _LABEL),
        *(("--volume", mount.claim, 253) for mount in request.mounts),
    ):
        if text:
            _check_dns(option, text, longest)


_FACTORS = {
    "m": 0.001, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50,
}  # fmt: skip


def _check_sizes(request: JobRequest, given: Given) -> None:
    if _number(request.shared_memory) > _number(request.memory):
        raise UsageError(
            f"--shared-memory {request.shared_memory} is a part of --memory {request.memory}, and "
            f"larger: raise --memory or lower --shared-memory"
        )
    ranks = given.text("nproc_per_node", "1")
    if request.gpus and ranks.isdecimal() and int(ranks) != request.gpus:
        given.notes.append(
            f"each pod has {request.gpus} GPUs (--gpus) and {ranks} ranks (--nproc-per-node): "
            f"usually each rank has one GPU"
        )


def _number(quantity: str) -> float:
    """The value of a quantity of Kubernetes, whose shape was checked."""
    unit = quantity.lstrip("0123456789.")
    return float(quantity.removesuffix(unit)) * _FACTORS.get(unit, 1.0)


def _shaped(request: JobRequest) -> Iterator[tuple[str, str, re.Pattern[str], str]]:
    """Each text that has a shape: its option, the text, the shape, and the remedy."""
    yield (
        "--image", request.image, _IMAGE,
        "write an image's name, for example registry.example/team/train:1.2",
    )  # fmt: skip
    yield (
        "--bus-url", request.bus_url, _BUS_URL,
        "write nats://HOST:PORT or tls://HOST:PORT, without a user; the login is in --bus-secret",
    )  # fmt: skip
    for option, text in (
        ("--cpu", request.cpu),
        ("--memory", request.memory),
        ("--shared-memory", request.shared_memory),
        ("--disk", request.disk),
    ):
        yield option, text, _QUANTITY, "write a quantity, for example 8 or 64Gi"
    for option, text in (
        ("--gpu-resource", request.gpu_resource),
        ("--rack-label", request.rack_label),
    ):
        if text:
            yield option, text, _LABEL_KEY, "write a name such as example.com/rack"


_OWN_PATHS = ("/dev", "/dev/shm", "/proc", "/sys", "/tmp", "/run/everstep", "/var/lib/everstep")  # noqa: S108


def _check_mounts(request: JobRequest) -> None:
    paths: set[str] = set()
    for mount in request.mounts:
        path = mount.path.rstrip("/")
        is_safe = re.fullmatch(r"(/[A-Za-z0-9._-]+)+", path) and ".." not in path.split("/")
        if not is_safe:
            raise UsageError(
                f"--volume {mount.claim}:{mount.path}: write CLAIM:/PATH, with letters, digits, "
                f"'.', '_' and '-' in the path"
            )
        if path in _OWN_PATHS or path in paths:
            raise UsageError(
                f"--volume {mount.claim}:{mount.path}: {path} is taken; choose another"
            )
        paths.add(path)


def _check_dns(option: str, text: str, longest: int) -> None:
    is_valid = all(_DNS_LABEL.fullmatch(part) for part in text.split("."))
    if not is_valid or len(text) > longest or (longest == _LABEL and "." in text):
        raise UsageError(
            f"{option} {text[:80]!r}: Kubernetes wants lower-case letters, digits and '-', at most "
            f"{longest}, the first and the last a letter or digit"
        )


def _groups(request: JobRequest, pods: int) -> int:
    if not request.pods_per_rack:
        if request.rack_label:
            raise UsageError(f"--rack-label {request.rack_label}: give --pods-per-rack, too")
        return 1
    if request.kind != "jobset" or not request.rack_label:
        raise UsageError(
            f"--pods-per-rack {request.pods_per_rack}: it needs --kind jobset and --rack-label, "
            f"because a JobSet places each of its jobs in one rack"
        )
    if pods % request.pods_per_rack:
        raise UsageError(
            f"--pods-per-rack {request.pods_per_rack}: {pods} pods cannot be divided by it; change "
            f"--spares"
        )
    return pods // request.pods_per_rack


def _name_of(request: JobRequest, pods: int, groups: int) -> str:
    name = request.name or re.sub(r"[^a-z0-9]+", "-", request.job.lower()).strip("-")
    option = "--name" if request.name else "--job: the name of its objects,"
    longest = _LABEL - len(_ending(request, pods, groups))
    if len(name) > longest:
        raise UsageError(
            f"{option} {name[:80]!r}: {len(name)} characters, and pods of this job can be named "
            f"after {longest} at most; give a shorter --name"
        )
    _check_dns(option, name, _LABEL)
    if name[0].isdecimal():
        raise UsageError(f"{option} {name!r}: a service begins with a letter; give another --name")
    return name


def _ending(request: JobRequest, pods: int, groups: int) -> str:
    if request.kind == "job":
        return f"-{pods - 1}"
    return f"-{GROUP}-{groups - 1}-{pods - 1}" + "x" * _SUFFIX
