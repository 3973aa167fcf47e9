"""A Slurm of a test's own on loopback: one controller, one node, no accounting."""

import os
import pwd
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.e2e.ports import free_port
from tests.e2e.processes import ROOT, environment, kill_all, tagged
from tests.waiting import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "srun")
GRACE_S = 60
"""From SIGTERM to SIGKILL: more than a training that saves needs on a loaded machine."""

_CONFIG = """
ClusterName=everstep-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SwitchType=switch/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
KillWait={grace_s}
KillOnBadExit=1
WaitTime=1
OverTimeLimit=0
JobRequeue=1
ReturnToService=2
{extra}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Why there can be no Slurm here; empty if there can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"Slurm is not installed: there is no {', '.join(missing)}"
    if os.geteuid() != 0:
        return "slurmd needs root"
    return ""


class Slurm:
    """What a test asks of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        """The daemon of each node."""
        self.controller: subprocess.Popen[bytes] | None = None
        self.environ = {
            **environment(folder, folder.name),
            "SLURM_CONF": str(folder / "slurm.conf"),
        }

    def call(self, *command: str) -> str:
        done = subprocess.run(
            command, check=False, env=self.environ, cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, script: str, *options: str, **environ: str) -> str:
        """The id of a new job, whose output is in `job.out`."""
        path = self.folder / "job.sh"
        own = {**self.environ, **environ}
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in own.items())
        # Else `srun` would take nothing of it along.
        path.write_text(f"#!/bin/bash\nunset SLURM_EXPORT_ENV\n{exports}{script}\n")
        return self.call(
            *("sbatch", "--parsable", "--nodes=1", "--ntasks=1", "--cpus-per-task=2"),
            *("--open-mode=append", f"--output={self.folder}/job.out", f"--chdir={ROOT}"),
            *("--export=NONE", *options, str(path)),
        )

    def requeue(self, job: str) -> None:
        self.call("scontrol", "requeue", job)

    def kill_node(self, node: str) -> None:
        """End a node with all of its processes: its daemon is not the parent of its tasks."""
        victims = {self.daemons[node].pid}
        for pid in {*tagged(node, "SLURMD_NODENAME")} & {*tagged(self.folder.name)}:
            victims.add(pid)
            with suppress(psutil.NoSuchProcess):
                parents = psutil.Process(pid).parents()
                victims |= {each.pid for each in parents if each.name() == "slurmstepd"}
        kill_all(list(victims))

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{command[0]}.log").open("ab") as log:
            return subprocess.Popen(command, env=self.environ, stdout=log, stderr=log)

    def start_controller(self) -> None:
        self.controller = self.start("slurmctld", "-D")

    def stop_controller(self) -> None:
        """As `systemctl stop` does; its state stays."""
        assert self.controller is not None
        self.controller.terminate()
        self.controller.wait()

    def kill_daemon(self, node: str) -> None:
        """Kill a node's daemon alone; its steps and tasks live on."""
        self.daemons[node].kill()
        self.daemons[node].wait()

    def start_daemon(self, node: str) -> None:
        self.daemons[node].wait()
        self.daemons[node] = self.start("slurmd", "-D", "-N", node)

    def node_state(self, node: str) -> str:
        return self.call("sinfo", "--noheader", f"--nodes={node}", "--format=%T")

    def said(self) -> str:
        path = self.folder / "job.out"
        return path.read_text(errors="replace") if path.exists() else ""


@contextmanager
def running_slurm(folder: Path, nodes: int = 1, extra: str = "") -> Iterator[Slurm]:
    """It runs until the end, with all of its daemons; `extra` are further lines of its settings."""
    slurm = Slurm(folder)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    host, names = socket.gethostname().split(".")[0], [f"n{each + 1}" for each in range(nodes)]
    config = _CONFIG.format(
        host=host,
        user=pwd.getpwuid(os.geteuid()).pw_name,
        folder=folder,
        control_port=free_port(),
        nodes="\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=4 "
            f"RealMemory=500"
            for name in names
        ),
        grace_s=GRACE_S,
        extra=extra,
    )
    (folder / "slurm.conf").write_text(config)
    (folder / "cgroup.conf").touch()
    munge: subprocess.Popen[bytes] | None = None
    try:
        munge = slurm.start(
            *("munged", "--foreground", "--force", f"--key-file={key}"),
            *(f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"),
            *(f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed"),
        )
        until((folder / "munge.socket").exists, "munged listens")
        slurm.controller = slurm.start("slurmctld", "-D", "-c")
        for name in names:
            slurm.daemons[name] = slurm.start("slurmd", "-D", "-c", "-N", name)
        until(
            lambda: slurm.call("sinfo", "-h", "-t", "idle", "-o", "%D"),
            "all nodes are idle",
            holds=str(nodes).__eq__,
            despite=AssertionError,
        )
        yield slurm
    finally:
        if len(slurm.daemons) == nodes:
            with suppress(AssertionError):  # it has just ended
                for job in slurm.call("squeue", "-h", "-o", "%i").split():
                    slurm.call("scancel", "--signal=KILL", "--full", job)
        for daemon in (*slurm.daemons.values(), slurm.controller, munge):
            if daemon is not None:
                daemon.terminate()
                daemon.wait()
        kill_all(tagged(slurm.environ["SLURM_CONF"], "SLURM_CONF"))  # steps that wait for Slurm
