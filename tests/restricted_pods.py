"""What Kubernetes' restricted Pod Security profile wants, by its documentation; and our own rules.

The real admission plugin needs an API server, which tests do not have.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

Manifest = Mapping[str, Any]
_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim",
    "projected", "secret",
}  # fmt: skip
_TEMPLATES = {"Job", "Deployment", "StatefulSet", "DaemonSet"}
_SECRET_NAME = re.compile(r"PASSWORD|TOKEN|SECRET|SEED|PRIVATE", re.IGNORECASE)


def pod_specs(manifest: Manifest) -> Iterator[Manifest]:
    """The pod specs of one object."""
    if manifest["kind"] == "JobSet":
        for job in manifest["spec"]["replicatedJobs"]:
            yield job["template"]["spec"]["template"]["spec"]
    elif manifest["kind"] in _TEMPLATES:
        yield manifest["spec"]["template"]["spec"]


def complaints(pod: Manifest) -> list[str]:
    """Everything that the profile, or we, would refuse."""
    security = pod.get("securityContext", {})
    bad = [
        f"{name} is set"
        for name in ("hostNetwork", "hostPID", "hostIPC", "hostUsers")
        if pod.get(name)
    ]
    if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        bad.append("no seccomp profile")
    if security.get("runAsNonRoot") is not True or not security.get("runAsUser"):
        bad.append("may run as root")
    if pod.get("automountServiceAccountToken") is not False and "serviceAccountName" not in pod:
        bad.append("the default account's token is mounted")
    for volume in pod.get("volumes", []):
        bad += [f"volume {kind}" for kind in set(volume) - {"name"} - _VOLUMES]
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        bad += [f"{container['name']}: {text}" for text in _of_container(container)]
    return bad


def _of_container(container: Manifest) -> Iterator[str]:
    security, resources = container.get("securityContext", {}), container.get("resources", {})
    capabilities = security.get("capabilities", {})
    for is_bad, text in (
        (security.get("allowPrivilegeEscalation") is not False, "may gain privileges"),
        (capabilities.get("drop") != ["ALL"] or "add" in capabilities, "keeps capabilities"),
        (security.get("readOnlyRootFilesystem") is not True, "its root is writable"),
        (security.get("privileged"), "is privileged"),
        ({"cpu", "memory"} - resources.get("requests", {}).keys(), "requests no cpu or memory"),
        ("memory" not in resources.get("limits", {}), "has no limit of memory"),
        (any("hostPort" in port for port in container.get("ports", [])), "takes a host's port"),
        ("envFrom" in container, "takes a whole map into the environment"),
    ):
        if is_bad:
            yield text
    for variable in container.get("env", []):
        name = variable["name"]
        looks_secret = _SECRET_NAME.search(name) and not name.endswith(("_FILE", "_DIR"))
        if looks_secret or "secretKeyRef" in variable.get("valueFrom", {}):
            yield f"{name} is a secret in the environment"
