"""A rank whose output has no room on its disk trains on."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_sdk.bootstrap.rank_setup import LastingOutput

SCRIPT = """
import logging, sys
for step in range(1000):
    print("a line of output", step)
logging.warning("to stderr")
sys.stdout.buffer.write(b"bytes")
sys.stdout.flush()
open(sys.argv[1], "w").write("done")
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_script_outlives_a_disk_without_room_for_its_output(
    tmp_path: Path, unbuffered: str
) -> None:
    script, proof = tmp_path / "train.py", tmp_path / "proof"
    script.write_text(SCRIPT)
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "trainer_sdk.bootstrap", "rank", "file", script, proof],
            stdout=full, stderr=full, check=False, timeout=120,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert proof.read_text() == "done"
    assert ended.returncode == 0


def test_the_streams_look_as_those_of_the_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\n"
        "for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):\n"
        "    print(stream.name, stream.mode, stream.encoding, stream.errors, stream.fileno(),\n"
        "          stream.isatty(), stream.buffer.name, flush=True)\n"
    )
    plain = subprocess.run([sys.executable, script], capture_output=True, check=True, timeout=120)
    ours = subprocess.run(
        [sys.executable, "-m", "trainer_sdk.bootstrap", "rank", "file", script],
        capture_output=True, check=True, timeout=120,
    )  # fmt: skip
    assert ours.stdout == plain.stdout


def test_once_there_is_room_the_output_tells_how_much_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "stdout"
    output = LastingOutput(path, "wb")
    assert output.write(b"before\n") == 7
    full = os.open("/dev/full", os.O_WRONLY)
    kept = os.dup(output.fileno())
    os.dup2(full, output.fileno())
    assert output.write(b"lost") == 4
    assert output.write(memoryview(b"lost too")) == 8
    os.dup2(kept, output.fileno())
    output.write(b"after\n")
    output.close()
    for descriptor in (full, kept):
        os.close(descriptor)
    assert path.read_text() == (
        "before\n\n[everstep: the disk was full: 12 bytes of output are lost]\nafter\n"
    )


def test_other_errors_reach_the_script(tmp_path: Path) -> None:
    output = LastingOutput(tmp_path / "stdout", "wb")
    reading = os.open(tmp_path / "stdout", os.O_RDONLY)
    os.dup2(reading, output.fileno())
    os.close(reading)
    with pytest.raises(OSError, match="Bad file descriptor") as raised:
        output.write(b"text")
    assert raised.value.errno == errno.EBADF
    output.close()
