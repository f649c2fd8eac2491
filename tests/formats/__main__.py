"""Store what this version leaves behind."""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from coordinator.store.encoding import FORMAT
from sinks.testing.servers.mariadb import MariaDBServer
from sinks.testing.servers.postgres import postgres_service
from tests.formats import HERE, WORLDS, leave, pack

if __name__ == "__main__":
    stored = {}
    with ExitStack() as stack:
        servers: dict[str, Any] = {
            "postgresql": stack.enter_context(postgres_service({"max_prepared_transactions": "64"})),
            "mariadb": stack.enter_context(MariaDBServer()),
        }
        for name, (world, strategy) in WORLDS.items():
            server = servers.get(name.partition(" ")[0])
            with tempfile.TemporaryDirectory() as folder, server.database() if server else nullcontext("") as dsn:
                made = world(Path(folder), dsn, strategy)
                leave(made)
                stored[name] = pack(made)
    (HERE / f"format-{FORMAT}.json").write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
