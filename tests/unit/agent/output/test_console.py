"""The console: whole lines with their rank, and an agent that a slow reader never delays."""

import asyncio
import fcntl
import os
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everstep_services.agent.output import console as console_module
from everstep_services.agent.output.console import Console, Rank, Screen, opened_console
from everstep_services.agent.output.follower import Follower, Inotify
from everstep_services.agent.run_plan import ConsoleChoice, Std, StreamChoice

_END = b"\x04"


class Terminal:
    """A pipe that somebody reads all the time, or not at all."""

    def __init__(self) -> None:
        self._out, self.screen = os.pipe()
        self._seen = bytearray()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def look(self) -> None:
        self._thread.start()

    def _read(self) -> None:
        while data := os.read(self._out, 1 << 20):
            with self._changed:
                self._seen += data
                self._changed.notify_all()

    async def all(self) -> str:
        """Everything that was written to the screen before this call."""
        os.set_blocking(self.screen, True)
        os.write(self.screen, _END)
        await self.until(lambda seen: seen.endswith(_END))
        return self.data.removesuffix(_END).decode()

    @property
    def data(self) -> bytes:
        return bytes(self._seen)

    async def until(self, wanted: Callable[[bytes], bool]) -> None:
        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: wanted(bytes(self._seen)), timeout=20)

        assert await asyncio.to_thread(wait), bytes(self._seen)[-500:]

    def close(self) -> None:
        os.close(self.screen)
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        os.close(self._out)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    with closing(Terminal()) as made:
        yield made


@asynccontextmanager
async def shown_on(
    terminal: Terminal, choice: ConsoleChoice | None = None, *, colored: bool = False
) -> AsyncIterator[Console]:
    screen = Screen(terminal.screen, colored)
    terminal.look()
    async with opened_console("n1", choice or ConsoleChoice(), (screen, screen)) as console:
        yield console
        assert await console.drain(10)


def rank(tmp_path: Path, number: int = 0, **rest: Any) -> Rank:
    folder = tmp_path / f"rank-{number}"
    folder.mkdir(exist_ok=True)
    for name in ("stdout", "stderr"):
        (folder / name).touch()
    return Rank(number, number, folder, **rest)


def write(of: Rank, data: bytes, stream: str = "stdout") -> None:
    with (of.folder / stream).open("ab", buffering=0) as file:
        file.write(data)


async def test_lines_come_with_their_node_and_rank_as_they_are_written(
    tmp_path: Path, terminal: Terminal
) -> None:
    """Each line begins with its node and global rank (A4.4)."""
    ranks = [rank(tmp_path, number) for number in (0, 1)]
    async with shown_on(terminal) as console:
        for one in ranks:
            console.follow(one)
        write(ranks[0], b"step 1\n")
        await terminal.until(lambda seen: b"step 1" in seen)
        write(ranks[1], b"oh\nno\n", "stderr")
        await terminal.until(lambda seen: b"no" in seen)
    assert (await terminal.all()) == "n1:0| step 1\nn1:1| oh\nn1:1| no\n"


async def test_what_was_written_before_is_shown_from_where_the_run_begins(
    tmp_path: Path, terminal: Terminal
) -> None:
    one = rank(tmp_path, 0, starts=(4, 0))
    write(one, b"old\nnew\n")
    async with shown_on(terminal) as console:
        console.follow(one)
    assert (await terminal.all()) == "n1:0| new\n"


async def test_a_last_line_without_an_end_is_shown_at_the_end(
    tmp_path: Path, terminal: Terminal
) -> None:
    one, two = rank(tmp_path, 0), rank(tmp_path, 1)
    async with shown_on(terminal) as console:
        console.follow(one)
        console.follow(two)
        write(one, b"half a li")
        write(two, b"whole\n")
        await terminal.until(lambda seen: b"whole" in seen)
        assert b"half" not in terminal.data
        write(one, b"ne\nrest")
    assert sorted((await terminal.all()).splitlines()) == [
        "n1:0| half a line",
        "n1:0| rest",
        "n1:1| whole",
    ]


async def test_a_round_that_was_drained_is_followed_no_longer(
    tmp_path: Path, terminal: Terminal
) -> None:
    one = rank(tmp_path)
    async with shown_on(terminal) as console:
        console.follow(one)
        write(one, b"in time\n")
        assert await console.drain(10)
        write(one, b"late\n")
    assert (await terminal.all()) == "n1:0| in time\n"


async def test_drain_ends_although_a_rank_still_writes(tmp_path: Path, terminal: Terminal) -> None:
    one = rank(tmp_path)
    writer = await asyncio.create_subprocess_exec(
        *[sys.executable, "-c", "while True: print('x' * 99, flush=True)"],
        stdout=os.open(one.folder / "stdout", os.O_WRONLY | os.O_APPEND),
    )
    try:
        async with shown_on(terminal) as console:
            console.follow(one)
            await terminal.until(lambda seen: len(seen) > 1000)
            assert await console.drain(10)
    finally:
        writer.kill()
        await writer.wait()


@pytest.mark.parametrize("cut", range(1, 10))
async def test_a_character_on_a_boundary_survives(
    tmp_path: Path, terminal: Terminal, cut: int
) -> None:
    one = rank(tmp_path)
    line = "aä€𝄞z\n".encode()
    async with shown_on(terminal) as console:
        console.follow(one)
        write(one, b"begun\n" + line[:cut])
        await terminal.until(lambda seen: b"begun" in seen)
        write(one, line[cut:])
    assert (await terminal.all()) == "n1:0| begun\nn1:0| aä€𝄞z\n"


async def test_a_very_long_line_is_shown_in_parts_of_whole_characters(
    tmp_path: Path, terminal: Terminal
) -> None:
    one = rank(tmp_path)
    write(one, b"x" + "𝄞".encode() * 100_000 + b"\n")
    async with shown_on(terminal) as console:
        console.follow(one)
    parts = [line.removeprefix("n1:0| ") for line in (await terminal.all()).splitlines()]
    assert "".join(parts) == "x" + "𝄞" * 100_000
    assert max(len(part.encode()) for part in parts) <= 256 * 1024


async def test_strange_bytes_are_made_visible(tmp_path: Path, terminal: Terminal) -> None:
    one = rank(tmp_path)
    write(one, b"a\0b\n\xff\xfe\nlast\r\n")
    async with shown_on(terminal) as console:
        console.follow(one)
    assert (await terminal.all()) == "n1:0| a␀b\nn1:0| ��\nn1:0| last\n"


async def test_a_progress_bar_is_a_line_now_and_then(tmp_path: Path, terminal: Terminal) -> None:
    one = rank(tmp_path)
    async with shown_on(terminal) as console:
        console.follow(one)
        for percent in range(100):
            write(one, f"\r{percent:3d}%".encode(), "stderr")
        write(one, b"\r100%\ndone\n", "stderr")
    text = await terminal.all()
    lines = text.splitlines()
    assert lines[-2:] == ["n1:0| 100%", "n1:0| done"]
    assert len(lines) < 8
    assert "\r" not in text


async def test_only_what_was_chosen_is_shown(tmp_path: Path, terminal: Terminal) -> None:
    ranks = [rank(tmp_path, number) for number in range(3)]
    choice = ConsoleChoice(
        ranks=frozenset({0, 1}), redirects=StreamChoice(Std.NONE, {1: Std.ERR}), prefix=None
    )
    for one in ranks:
        write(one, b"out %d\n" % one.rank)
        write(one, b"err %d\n" % one.rank, "stderr")
    async with shown_on(terminal, choice) as console:
        for one in ranks:
            console.follow(one)
    assert sorted((await terminal.all()).splitlines()) == ["err 0", "out 0", "out 1"]


async def test_colour_and_a_prefix_of_the_users(tmp_path: Path, terminal: Terminal) -> None:
    one = rank(tmp_path, 1, role="actor")
    write(one, b"x\n")
    choice = ConsoleChoice(prefix="[${role_name}${rank}/${local_rank}]:")
    async with shown_on(terminal, choice, colored=True) as console:
        console.follow(one)
    assert (await terminal.all()) == "\x1b[33m[actor1/1]:\x1b[0mx\n"


async def test_lines_of_many_ranks_are_never_mixed(tmp_path: Path, terminal: Terminal) -> None:
    ranks = [rank(tmp_path, number) for number in range(8)]
    code = (
        "import sys\nfor n in range(2000): sys.stdout.write(f'{sys.argv[1]} {n} ' + 'y'*70 + '\\n')"
    )
    async with shown_on(terminal) as console:
        writers = []
        for one in ranks:
            console.follow(one)
            out = os.open(one.folder / "stdout", os.O_WRONLY | os.O_APPEND)
            writers.append(
                await asyncio.create_subprocess_exec(
                    *[sys.executable, "-c", code, str(one.rank)], stdout=out
                )
            )
            os.close(out)
        for writer in writers:
            assert await writer.wait() == 0
    lines = (await terminal.all()).splitlines()
    assert len(lines) == 16_000
    for one in ranks:
        own = [line for line in lines if line.startswith(f"n1:{one.rank}| ")]
        assert own == [f"n1:{one.rank}| {one.rank} {n} " + "y" * 70 for n in range(2000)]


async def test_a_file_that_was_made_shorter_goes_on_at_its_beginning(
    tmp_path: Path, terminal: Terminal
) -> None:
    one = rank(tmp_path)
    async with shown_on(terminal) as console:
        console.follow(one)
        write(one, b"a longer line\n")
        await terminal.until(lambda seen: b"longer" in seen)
        os.truncate(one.folder / "stdout", 0)
        write(one, b"new\n", "stderr")
        await terminal.until(lambda seen: b"new" in seen)
        write(one, b"again\n")
        await terminal.until(lambda seen: b"again" in seen)


async def test_without_inotify_it_looks_for_changes(
    tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left() -> Inotify:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(console_module, "Inotify", none_left)
    one = rank(tmp_path)
    async with shown_on(terminal) as console:
        console.follow(one)
        write(one, b"seen\n")
        await terminal.until(lambda seen: b"seen" in seen)


async def test_a_terminal_that_was_closed_harms_nobody(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    one = rank(tmp_path)
    screen = Screen(writing)
    async with opened_console("n1", ConsoleChoice(), (screen, screen)) as console:
        console.follow(one)
        write(one, b"x\n")
        assert await console.drain(10)
    os.close(writing)


async def test_a_terminal_that_takes_nothing_delays_nobody_and_memory_stays_bounded(
    tmp_path: Path, terminal: Terminal
) -> None:
    one = rank(tmp_path)
    screen = Screen(terminal.screen)
    async with opened_console("n1", ConsoleChoice(), (screen, screen)) as console:
        console.follow(one)
        write(one, b"first\n" + b"x" * 99_999 + b"\n")
        assert not await console.drain(0.2)
        console.follow(one)
        with (one.folder / "stdout").open("ab") as file:
            for _ in range(20):
                file.write(b"z" * ((1 << 20) - 1) + b"\n")
        write(one, b"last\n")
        terminal.look()
        assert await console.drain(20)
    text = await terminal.all()
    assert text.startswith("n1:0| first\n")
    note = re.search(r"\[n1:0\] 20 MiB skipped here; all of it is in (\S+)\n", text)
    assert note
    assert note[1] == str(one.folder / "stdout")
    assert text.endswith("n1:0| last\n")
    assert len(text) < 2 << 20


async def test_our_own_lines_wait_for_no_terminal_either(terminal: Terminal) -> None:
    """An agent that waited for its terminal would send no beat, and count as lost."""
    screen = Screen(terminal.screen)
    async with opened_console("n1", ConsoleChoice(), (screen, screen)) as console:
        for number in range(3000):
            console.say(f"{number} {'x' * 1000}")
        assert not await console.drain(0.2), "nobody reads"
        terminal.look()
        console.say("in the end")
        assert await console.drain(20)
    lines = (await terminal.all()).splitlines()
    assert lines[0].startswith("0 x")
    assert len(lines) < 3000


async def test_a_non_blocking_terminal_loses_nothing(tmp_path: Path, terminal: Terminal) -> None:
    os.set_blocking(terminal.screen, False)
    one = rank(tmp_path)
    write(one, b"".join(b"%d\n" % n for n in range(100_000)))
    async with shown_on(terminal) as console:
        console.follow(one)
    lines = (await terminal.all()).splitlines()
    assert lines == [f"n1:0| {n}" for n in range(100_000)]


def test_a_follower_alone_keeps_its_place(tmp_path: Path) -> None:
    path = tmp_path / "stdout"
    reading, writing = os.pipe()
    follower = Follower(path, 0, writing, b"", "n1:0")
    assert not follower.open()
    path.write_bytes(b"a\nb")
    assert follower.open()
    assert not follower.show_some()
    follower.close()
    os.close(writing)
    with open(reading, "rb") as seen:
        assert seen.read() == b"a\nb\n"


async def test_a_question_is_shown_before_its_line_ends_where_a_rank_is_alone(
    tmp_path: Path, terminal: Terminal
) -> None:
    """`breakpoint()` asks without an end of the line, and waits."""
    one = replace(rank(tmp_path), is_alone=True)
    write(one, b"a line\n(Pdb) ")
    async with shown_on(terminal) as console:
        console.follow(one)
        await terminal.until(lambda seen: seen == b"n1:0| a line\nn1:0| (Pdb) ")
        write(one, b"42\n(Pdb) ")
        await terminal.until(lambda seen: seen.endswith(b"(Pdb) 42\nn1:0| (Pdb) "))
        write(one, b"done\n")
    assert (await terminal.all()).endswith("n1:0| (Pdb) done\n")


async def test_half_a_line_is_kept_back_where_other_ranks_may_write(
    tmp_path: Path, terminal: Terminal
) -> None:
    one, other = rank(tmp_path), rank(tmp_path, 1)
    write(one, b"half")
    async with shown_on(terminal) as console:
        console.follow(one)
        console.follow(other)
        write(other, b"whole\n")
        await terminal.until(lambda seen: seen == b"n1:1| whole\n")
        write(one, b" and half\n")
        await terminal.until(lambda seen: seen.endswith(b"n1:0| half and half\n"))


def test_inotify_tells_of_writes_only(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.touch()
    with closing(Inotify()) as inotify:
        number = inotify.watch(file)
        assert inotify.changed() == set()
        file.read_bytes()
        assert inotify.changed() == set()
        file.write_bytes(b"x")
        assert inotify.changed() == {number}
        inotify.unwatch(number)
        with pytest.raises(FileNotFoundError):
            inotify.watch(tmp_path / "none")
        assert fcntl.fcntl(inotify.descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
