"""The manifest of a training: a Job or a JobSet, and the objects around it. Pure."""

import json
import re
import textwrap
from collections.abc import Iterable

from everstep import __version__
from everstep_services.cli.kubernetes.job_request import (
    GROUP,
    IN_JOB_RESTARTS,
    JobRequest,
    JobShape,
    shape_of,
)
from everstep_services.cli.run.arguments import Given

GRACE_RESERVE_S = 30
"""The pod's grace is longer than the ranks' by this: the agent ends, and its facts are sent."""
FINAL = (2, 93, 130)
"""The exit codes after which another pod would end in the same way."""
NOT_COUNTED = (90, 91)
"""The exit codes after which another pod takes over, as often as it takes."""
_NOT_PLAIN = "[\x7f-\xa0\u2028\u2029\ufeff\ufffe\uffff]"
"""Characters besides the control characters that YAML must not have as they are."""
_KUEUE = "kueue.x-k8s.io/queue-name"


def job_manifest(request: JobRequest, given: Given) -> str:
    """The text of the manifest. Raises `UsageError` for options that cannot work."""
    shape = shape_of(request, given)
    documents = [
        _head(request, shape),
        _account(request, shape),
        _service(request, shape) if request.kind == "job" else "",
        _network_policy(request, shape),
        _disruption_budget(request, shape),
        _job_set(request, shape, given)
        if request.kind == "jobset"
        else _job(request, shape, given),
    ]
    head, *objects = (document for document in documents if document)
    return head + "\n---\n".join(objects) + "\n"


def quoted(text: str) -> str:
    """The text as a YAML scalar in double quotes, whatever is in it."""
    plain = json.dumps(text, ensure_ascii=False)
    return re.sub(_NOT_PLAIN, lambda match: f"\\u{ord(match[0]):04x}", plain)


def literal(word: str) -> str:
    """A word of a command that Kubernetes leaves as it is: it would replace `$(NAME)`."""
    return quoted(word.replace("$", "$$"))


def _head(request: JobRequest, shape: JobShape) -> str:
    namespace = f" --namespace {request.namespace}" if request.namespace else ""
    return textwrap.dedent(f"""\
        # Job {request.job}, by `everstep kubernetes job` of Everstep {__version__}.
        # Apply it with kubectl. Everything in it may be changed. Before it, once, its login, which
        # must be valid for longer than the training: a pod that is replaced begins with it.
        #   everstep bus login {request.job} --keys keys --valid 90d --out bus.creds
        #   kubectl{namespace} create secret generic {shape.secret} --from-file=bus.creds
        """)


def _metadata(request: JobRequest, shape: JobShape, *more: str) -> str:
    lines = ["metadata:", f"  name: {shape.name}"]
    if request.namespace:
        lines.append(f"  namespace: {request.namespace}")
    lines += ["  labels:", f"    {_label(shape)}", *more]
    return "\n".join(lines)


def _label(shape: JobShape) -> str:
    return f"everstep.io/job: {quoted(shape.name)}"


def _document(api: str, kind: str, metadata: str, body: str) -> str:
    return f"apiVersion: {api}\nkind: {kind}\n{metadata}\n{textwrap.dedent(body).strip()}"


def _account(request: JobRequest, shape: JobShape) -> str:
    return "# The pods ask nothing of the API server, and get no token for it.\n" + _document(
        "v1", "ServiceAccount", _metadata(request, shape), "automountServiceAccountToken: false"
    )


def _service(request: JobRequest, shape: JobShape) -> str:
    return "# It gives each pod a name, also while it starts.\n" + _document(
        "v1",
        "Service",
        _metadata(request, shape),
        f"""
        spec:
          clusterIP: None
          publishNotReadyAddresses: true
          selector:
            {_label(shape)}
        """,
    )


def _network_policy(request: JobRequest, shape: JobShape) -> str:
    return "# Only pods of this job reach its pods: torch's ports have no password.\n" + _document(
        "networking.k8s.io/v1",
        "NetworkPolicy",
        _metadata(request, shape),
        f"""
        spec:
          podSelector:
            matchLabels:
              {_label(shape)}
          policyTypes: [Ingress]
          ingress:
            - from:
                - podSelector:
                    matchLabels:
                      {_label(shape)}
        """,
    )


def _disruption_budget(request: JobRequest, shape: JobShape) -> str:
    if shape.pods == 1:
        return ""
    return (
        "# Evictions take one node at a time. For pods of a Job only this form counts.\n"
        + _document(
            "policy/v1",
            "PodDisruptionBudget",
            _metadata(request, shape),
            f"""
            spec:
              minAvailable: {shape.pods - 1}
              unhealthyPodEvictionPolicy: AlwaysAllow
              selector:
                matchLabels:
                  {_label(shape)}
            """,
        )
    )


def _queue(request: JobRequest) -> list[str]:
    return [f"    {_KUEUE}: {quoted(request.queue)}"] if request.queue else []


def _job(request: JobRequest, shape: JobShape, given: Given) -> str:
    metadata = _metadata(request, shape, *_queue(request))
    return f"apiVersion: batch/v1\nkind: Job\n{metadata}\nspec:\n" + _indent(
        2, _job_spec(request, shape, given)
    )


def _job_set(request: JobRequest, shape: JobShape, given: Given) -> str:
    more = _queue(request)
    if request.rack_label:
        more += [
            "  annotations:",
            "    # Each of the jobs has a rack of its own.",
            f"    alpha.jobset.sigs.k8s.io/exclusive-topology: {quoted(request.rack_label)}",
        ]
    body = textwrap.dedent(f"""\
        spec:
          network:
            enableDNSHostnames: true
            publishNotReadyAddresses: true
            subdomain: {shape.name}
          failurePolicy:
            maxRestarts: 0  # pods are tried again one by one, below
          replicatedJobs:
            - name: {GROUP}
              replicas: {shape.groups}
              template:
                metadata:
                  labels:
                    {_label(shape)}
                spec:
        """)
    return (
        f"apiVersion: jobset.x-k8s.io/v1alpha2\nkind: JobSet\n{_metadata(request, shape, *more)}\n"
        + body
        + _indent(10, _job_spec(request, shape, given))
    )


def _job_spec(request: JobRequest, shape: JobShape, given: Given) -> str:
    rules = textwrap.dedent(f"""\
        completionMode: Indexed
        completions: {shape.pods_per_group}
        parallelism: {shape.pods_per_group}
        # A pod is replaced only once the one before it has ended.
        podReplacementPolicy: Failed
        backoffLimitPerIndex: {request.retries}
        maxFailedIndexes: 0
        podFailurePolicy:
          rules:
            # Another pod would end in the same way, or a person has ended the job.
            - action: FailJob
              onExitCodes:
                containerName: train
                operator: In
                values: [{_numbers(FINAL)}]
            # The node was taken away, and its ranks have saved; or the node does not fit.
            - action: Ignore
              onExitCodes:
                containerName: train
                operator: In
                values: [{_numbers(NOT_COUNTED)}]
            # Evicted or preempted, and killed before its ranks had saved.
            - action: Ignore
              onPodConditions:
                - type: DisruptionTarget
                  status: "True"
            # All other codes count for backoffLimitPerIndex.
        template:
        """)
    return rules + _indent(2, _pod(request, shape, given))


def _pod(request: JobRequest, shape: JobShape, given: Given) -> str:
    head = textwrap.dedent(f"""\
        metadata:
          labels:
            {_label(shape)}
        spec:
          restartPolicy: Never
          terminationGracePeriodSeconds: {request.grace_s + GRACE_RESERVE_S}
          serviceAccountName: {shape.name}
          automountServiceAccountToken: false
          enableServiceLinks: false
        """)
    if request.kind == "job":
        head += f"  subdomain: {shape.name}\n"
    head += textwrap.indent(
        textwrap.dedent(f"""\
            securityContext:
              runAsNonRoot: true
              runAsUser: {request.user}
              runAsGroup: {request.user}
              fsGroup: {request.user}
              fsGroupChangePolicy: OnRootMismatch
              seccompProfile:
                type: RuntimeDefault
            affinity:
              podAntiAffinity:  # one agent on each node
                requiredDuringSchedulingIgnoredDuringExecution:
                  - topologyKey: kubernetes.io/hostname
                    labelSelector:
                      matchLabels:
                        {_label(shape)}
            """),
        "  ",
    )
    if request.gpus:
        head += _indent(
            2,
            textwrap.dedent(f"""\
                tolerations:
                  - key: {request.gpu_resource}
                    operator: Exists
                    effect: NoSchedule
                """),
        )
    return (
        head
        + _indent(2, "containers:\n" + _indent(2, _container(request, shape, given)))
        + (_indent(2, _volumes(request, shape)))
    )


def _container(request: JobRequest, shape: JobShape, given: Given) -> str:
    resources = [f"cpu: {quoted(request.cpu)}", f"memory: {quoted(request.memory)}"]
    if request.gpus:
        resources.append(f'{request.gpu_resource}: "{request.gpus}"')
    lines = [
        "- name: train",
        f"  image: {quoted(request.image)}",
        "  command: [everstep, run]",
        "  args:",
        *(f"    - {literal(word)}" for word in _words(request, given)),
        "  env:",
        *(f"    {line}" for line in _environment(request, shape)),
        "  # SIGTERM is the notice that the node is taken away: there is no preStop hook.",
        "  # Everstep finds hung ranks: a liveness probe would end pods that wait for others.",
        "  resources:",
        "    requests:",
        *(f"      {line}" for line in resources),
        "    limits:",
        *(f"      {line}" for line in resources if not line.startswith("cpu")),
        "  securityContext:",
        "    allowPrivilegeEscalation: false",
        "    readOnlyRootFilesystem: true",
        "    capabilities:",
        "      drop: [ALL]",
        "  volumeMounts:",
        "    - {name: state, mountPath: /var/lib/everstep}",
        "    - {name: tmp, mountPath: /tmp}",
        "    - {name: shm, mountPath: /dev/shm}",
        "    - {name: login, mountPath: /run/everstep/bus, readOnly: true}",
        *(
            f"    - {{name: data-{number}, mountPath: {quoted(mount.path)}}}"
            for number, mount in enumerate(request.mounts)
        ),
    ]
    return "\n".join(lines) + "\n"


def _words(request: JobRequest, given: Given) -> list[str]:
    words = ["--job", request.job, "--preempt-grace", str(request.grace_s)]
    if "max_restarts" not in given.values:
        words += ["--max-restarts", str(IN_JOB_RESTARTS)]
    return [*words, *request.words]


def _environment(request: JobRequest, shape: JobShape) -> Iterable[str]:
    job_label = "metadata.labels['batch.kubernetes.io/job-name']"
    index_label = "metadata.labels['batch.kubernetes.io/job-completion-index']"
    yield from _from_field("NODE_NAME", "spec.nodeName")
    yield from _from_field("POD_IP", "status.podIP")
    yield from _from_field("JOB_NAME", job_label)
    if request.kind == "jobset":
        yield from _from_field(
            "JOBSET_JOB_INDEX", "metadata.labels['jobset.sigs.k8s.io/job-index']"
        )
        yield from _value("JOBSET_PODS_PER_JOB", str(shape.pods_per_group))
    if request.address == "service":
        yield from _from_field("POD_INDEX", index_label)
        yield from _value("EVERSTEP_AGENT__ADDRESS", f"$(JOB_NAME)-$(POD_INDEX).{shape.name}")
    else:
        yield from _value("EVERSTEP_AGENT__ADDRESS", "$(POD_IP)")
    if request.rack_label:
        yield from _value("EVERSTEP_AGENT__DOMAIN", "rack-$(JOBSET_JOB_INDEX)")
        yield from _value("EVERSTEP_AGENT__TOPOLOGY", "rack-$(JOBSET_JOB_INDEX)")
    else:
        yield "# Kubernetes sets this label of a pod from 1.35 on; before, the zone is unknown."
        yield from _from_field(
            "EVERSTEP_AGENT__TOPOLOGY", "metadata.labels['topology.kubernetes.io/zone']"
        )
    yield from _value("EVERSTEP_AGENT__SCHEDULER_GRACE_S", str(request.grace_s + GRACE_RESERVE_S))
    yield from _value("EVERSTEP_BUS__URL", request.bus_url)
    yield from _value("EVERSTEP_BUS__CREDENTIALS_FILE", "/run/everstep/bus/bus.creds")
    yield from _value("EVERSTEP_BUS__RENEWED_CREDENTIALS_FILE", "/var/lib/everstep/bus.creds")
    if request.bus_ca:
        yield from _value("EVERSTEP_BUS__CA_FILE", "/run/everstep/bus/ca.pem")
    yield from _value("EVERSTEP_STATE_DIR", "/var/lib/everstep")
    yield from _value("HOME", "/var/lib/everstep")


def _from_field(name: str, path: str) -> list[str]:
    return [f"- name: {name}", f"  valueFrom: {{fieldRef: {{fieldPath: {quoted(path)}}}}}"]


def _value(name: str, text: str) -> list[str]:
    return [f"- name: {name}", f"  value: {quoted(text)}"]


def _volumes(request: JobRequest, shape: JobShape) -> str:
    keys = ["bus.creds", "ca.pem"] if request.bus_ca else ["bus.creds"]
    lines = [
        "volumes:",
        "  - name: state",
        f"    emptyDir: {{sizeLimit: {quoted(request.disk)}}}",
        "  - name: tmp",
        f"    emptyDir: {{sizeLimit: {quoted(request.disk)}}}",
        "  - name: shm  # it counts as memory of the container",
        f"    emptyDir: {{medium: Memory, sizeLimit: {quoted(request.shared_memory)}}}",
        "  - name: login",
        "    secret:",
        f"      secretName: {shape.secret}",
        "      defaultMode: 0440",
        "      items:",
        *(f"        - {{key: {key}, path: {key}}}" for key in keys),
    ]
    for number, mount in enumerate(request.mounts):
        lines += [
            f"  - name: data-{number}",
            "    persistentVolumeClaim:",
            f"      claimName: {mount.claim}",
        ]
    return "\n".join(lines) + "\n"


def _numbers(codes: Iterable[int]) -> str:
    return ", ".join(str(code) for code in codes)


def _indent(columns: int, text: str) -> str:
    return textwrap.indent(text, " " * columns)
