"""Write manifests for Kubernetes."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from everstep_services.cli.invocation import NAME, Invocation, with_common_options
from everstep_services.cli.output import say, usable

if TYPE_CHECKING:
    from everstep_services.cli.kubernetes.job_request import ClaimMount


@click.group()
def command() -> None:
    """Write manifests for Kubernetes."""


@command.command(context_settings={"allow_interspersed_args": False})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- [RUN OPTIONS] SCRIPT...")
@click.option("--job", type=NAME, required=True, metavar="ID", help="The job's id.")
@click.option("--image", required=True, metavar="IMAGE",
              help="The image of the pods, with everstep and the training.")  # fmt: skip
@click.option("--kind", type=click.Choice(("job", "jobset")), default="job",
              help="A Job (the default), or a JobSet, which needs its controller.")  # fmt: skip
@click.option("--name", default="", metavar="NAME",
              help="The name of its objects (from --job).")  # fmt: skip
@click.option("--namespace", default="", metavar="NAME",
              help="Their namespace (that of kubectl).")  # fmt: skip
@click.option("--bus-url", default="nats://everstep-bus.everstep:4222", metavar="URL",
              help="Where the bus is (nats://everstep-bus.everstep:4222).")  # fmt: skip
@click.option("--bus-secret", default="", metavar="NAME",
              help="The secret with the job's login, as bus.creds (everstep-bus-NAME)."
              )  # fmt: skip
@click.option(
    "--bus-ca",
    is_flag=True,
    help="The secret with the login also has ca.pem, for a tls:// address.",
)
@click.option("--gpus", type=click.IntRange(0, 1024), default=0, metavar="N",
              help="GPUs of each pod (0).")  # fmt: skip
@click.option("--gpu-resource", default="nvidia.com/gpu", metavar="NAME",
              help="The name of GPUs as a resource of Kubernetes (nvidia.com/gpu).")  # fmt: skip
@click.option("--cpu", default="4", metavar="QUANTITY", help="CPUs of each pod (4).")
@click.option("--memory", default="16Gi", metavar="QUANTITY", help="Memory of each pod (16Gi).")
@click.option("--shared-memory", default="8Gi", metavar="QUANTITY",
              help="How much of this memory /dev/shm may take (8Gi).")  # fmt: skip
@click.option("--disk", default="20Gi", metavar="QUANTITY",
              help="Space for logs and the spool, and as much again for /tmp (20Gi).")  # fmt: skip
@click.option("--volume", "volumes", multiple=True, metavar="CLAIM:/PATH",
              help="A persistent volume; may be given several times.")  # fmt: skip
@click.option("--grace", "grace_s", type=click.IntRange(1, 86400), default=600, metavar="SECONDS",
              help="Time to save when a node is taken away (600).")  # fmt: skip
@click.option("--retries", type=click.IntRange(0, 1000), default=2, metavar="N",
              help="How often a failed pod is tried again (2).")  # fmt: skip
@click.option("--user", type=click.IntRange(0, 2**31 - 1), default=10001, metavar="UID",
              help="The user and group of the pods (10001).")  # fmt: skip
@click.option("--pods-per-rack", type=click.IntRange(1, 100_000), metavar="N",
              help="With --kind jobset: a job of N pods for each rack.")  # fmt: skip
@click.option(
    "--rack-label", default="", metavar="LABEL", help="The label of nodes with their rack."
)
@click.option("--address", type=click.Choice(("pod-ip", "service")), default="pod-ip",
              help="How pods reach each other: by address (the default), or by name.")  # fmt: skip
@click.option("--queue", default="", metavar="NAME", help="Kueue's local queue.")
@click.option("--write", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="The manifest's file; by default it is printed.")  # fmt: skip
@with_common_options
def job(
    _invocation: Invocation,
    /,
    *,
    words: tuple[str, ...],
    volumes: tuple[str, ...],
    pods_per_rack: int | None,
    write: Path | None,
    **asked: Any,
) -> None:
    """Write a manifest that runs `everstep run` in one pod on each node.

    The number of pods is that of --nnodes and --spares:

    everstep kubernetes job --job llama --image registry.example/train:1 --gpus 8 -- --nnodes 4
    --spares 1 --nproc-per-node 8 train.py | kubectl apply -f -
    """
    from everstep_services.cli.kubernetes.job_manifest import job_manifest
    from everstep_services.cli.kubernetes.job_request import JobRequest
    from everstep_services.cli.run.arguments import scan

    request = JobRequest(
        words=words, mounts=tuple(map(_mount, volumes)), pods_per_rack=pods_per_rack or 0, **asked
    )
    given = scan(words, {})
    text = job_manifest(request, given)
    for note in given.notes:
        say(f"everstep: {note}")
    if write is None:
        click.echo(text, nl=False)
        return
    with usable(f"--write {write}"):
        write.write_text(text)
    say(f"apply it with: kubectl apply -f {write}")


def _mount(text: str) -> "ClaimMount":
    from everstep_services.cli.kubernetes.job_request import ClaimMount
    from everstep_services.cli.run.arguments import UsageError

    claim, colon, path = text.partition(":")
    if not claim or not colon:
        raise UsageError(f"--volume {text!r}: write CLAIM:/PATH, for example data:/data")
    return ClaimMount(claim, path)
