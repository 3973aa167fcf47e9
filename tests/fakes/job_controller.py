"""What Kubernetes' Job controller and kubelet do with a manifest, by their documentation.

There is no cluster in tests: this is an emulator, and pods are local processes.
"""

from collections.abc import Mapping
from typing import Any, Literal

Manifest = Mapping[str, Any]
Action = Literal["FailJob", "Ignore", "Count", "Complete"]


def job_spec(objects: list[Manifest]) -> Manifest:
    """The spec of the Job, or of the only replicated job of the JobSet."""
    (job,) = (each for each in objects if each["kind"] in {"Job", "JobSet"})
    if job["kind"] == "JobSet":
        (job,) = (each["template"] for each in job["spec"]["replicatedJobs"])
    spec: Manifest = job["spec"]
    return spec


def after_exit(spec: Manifest, code: int, *, is_disrupted: bool = False) -> Action:
    """What follows after a pod: the first rule that fits; without one its failure counts."""
    if code == 0:
        return "Complete"
    (container,) = spec["template"]["spec"]["containers"]
    for rule in spec["podFailurePolicy"]["rules"]:
        codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions", ())
        if codes is not None and codes["containerName"] == container["name"]:
            assert codes["operator"] == "In"
            assert 0 not in codes["values"], "the API server refuses it"
            if code in codes["values"]:
                return _action(rule)
        if is_disrupted and {"type": "DisruptionTarget", "status": "True"} in conditions:
            return _action(rule)
    return "Count"


def _action(rule: Manifest) -> Action:
    action: Action = rule["action"]
    return action


def container_environment(container: Manifest, fields: Mapping[str, str]) -> dict[str, str]:
    """The environment of a container; `fields` are those of its pod that the downward API knows.

    `$(NAME)` is replaced by a variable that stands before it.
    """
    values: dict[str, str] = {}
    for variable in container["env"]:
        if "valueFrom" in variable:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            values[variable["name"]] = fields.get(path, "")
        else:
            values[variable["name"]] = expanded(variable["value"], values)
    return values


def expanded(text: str, values: Mapping[str, str]) -> str:
    """The text as the kubelet makes it: `$$` stands for `$`."""
    parts = text.split("$$")
    for name, value in values.items():
        parts = [part.replace(f"$({name})", value) for part in parts]
    return "$".join(parts)
