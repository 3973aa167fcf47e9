"""Survives rounds, as the SDK does, with what the arguments of its rank name."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

from trainer_sdk import layout
from trainer_sdk.bootstrap import agent_link
from trainer_sdk.bootstrap.agent_link import AgentLink, ShortPath
from trainer_sdk.bootstrap.process_setup import redirect
from trainer_sdk.wire import Channel, GoOn, Parked, SaveTogether, Survives, ToSurvivor, unpack

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT


def is_asked(name: str) -> bool:
    """Whether `NAME` or `NAME:RANK` is among the arguments."""
    return not {name, f"{name}:{os.environ['RANK']}"}.isdisjoint(sys.argv)


def connect() -> socket.socket:
    wire = socket.socket(socket.AF_UNIX)
    with ShortPath(os.environ[layout.SURVIVE_VARIABLE]) as path:
        wire.connect(path)
    return wire


def have_family() -> None:
    """A worker, an orphan in this session, and one in a session of its own."""
    sleeper = "sh -c 'echo $$ >> family; exec sleep 600'"
    subprocess.Popen(f"exec {sleeper}", shell=True)
    subprocess.run(f"{sleeper} &", shell=True, check=True)
    subprocess.run(f"setsid {sleeper} &", shell=True, check=True)


def try_in_a_child() -> None:
    """The warden hears no process that is not a rank."""
    if os.fork() == 0:
        with contextlib.suppress(OSError):
            wire = connect()
            print("child:", wire.recv(1), flush=True)
        os._exit(0)
    os.wait()


def go_on(line: GoOn) -> None:
    os.environ.clear()
    os.environ.update(unpack(line.environ))
    redirect(line.stdout, 1, _APPEND)
    redirect(line.stderr, 2, _APPEND)
    link = AgentLink(os.environ)
    if agent_link.bootstrap_link is not None:
        before = agent_link.bootstrap_link.words
        link.words[layout.DEFERRED] = before[layout.DEFERRED]
    link.up()
    begin(link)


def begin(link: AgentLink | None) -> None:
    print(f"here in round {os.environ[layout.ROUND_VARIABLE]}", flush=True)
    if link is not None:
        link.first_step(1)


def await_line() -> None:
    """Wait for the warden; end well once the folder that is the last argument has `end` in it."""
    while not select.select([wire], [], [], 0.02)[0]:
        if Path(sys.argv[-1], "end").exists():
            sys.exit(0)


def obey(channel: "Channel[ToSurvivor]") -> None:
    for line in channel.receive():
        if isinstance(line, GoOn):
            go_on(line)
        elif isinstance(line, SaveTogether) and is_asked("late"):
            continue
        elif isinstance(line, SaveTogether):
            print(f"saves as rank {line.rank} of {line.world_size}", flush=True)
            channel.send(Parked(step=1))
        elif is_asked("hangs-up"):
            hang_up()
        elif not is_asked("deaf"):
            channel.send(Parked(step=1))


def hang_up(*_: object) -> None:
    wire.shutdown(socket.SHUT_RDWR)


wire = connect()
channel: "Channel[ToSurvivor]" = Channel(wire, ToSurvivor)
channel.send(Survives(park_within_s=0.3 if is_asked("deaf") else 60.0))
signal.signal(signal.SIGUSR1, hang_up)
if is_asked("out-of-turn"):
    channel.send(Parked())
if is_asked("garbage"):
    wire.sendall(b"{}\n")
if is_asked("endless"):
    wire.sendall(b"x" * 5000)
if is_asked("family"):
    os.chdir(os.environ["EVERSTEP_RANK_DIR"])
    have_family()
if is_asked("child"):
    try_in_a_child()
begin(agent_link.bootstrap_link)
while True:
    try:
        await_line()
        obey(channel)
    except (EOFError, OSError):
        signal.pause()
