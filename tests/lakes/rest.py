"""An Iceberg REST catalog: a SQL catalog behind HTTP, with tokens of OAuth2."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError
from pyiceberg.table import CommitTableRequest

from tests.lakes.tables import IcebergLake

SECRET = "s3cr3t"


class RestCatalog:
    """What a client sends, and may be told to wait for."""

    def __init__(self, lake: IcebergLake) -> None:
        self.lake = lake
        self.answers = threading.Event()
        self.answers.set()
        self.uri = ""

    @property
    def properties(self) -> dict[str, Any]:
        return {"name": "rest", "type": "rest", "uri": self.uri, "s3.access-key-id": "of the store"}

    @property
    def oauth2(self) -> dict[str, Any]:
        by = {"client_id": "id", "client_secret": SECRET, "token_url": f"{self.uri}/v1/oauth/tokens"}
        return self.properties | {"auth": {"type": "oauth2", "oauth2": by}}

    @property
    def credential(self) -> dict[str, Any]:
        return self.properties | {"credential": f"id:{SECRET}", "oauth2-server-uri": f"{self.uri}/v1/oauth/tokens"}

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path.endswith("/config"):
            return {"defaults": {}, "overrides": {}}
        if path.endswith("/tokens"):
            return {"access_token": SECRET, "token_type": "bearer", "expires_in": 3600}
        with load_catalog(**self.lake.properties) as catalog:
            table = catalog.load_table(self.lake.name)
            if body:
                request = CommitTableRequest.model_validate_json(body)
                catalog.commit_table(table, request.requirements, request.updates)
                table = catalog.load_table(self.lake.name)
        return {"metadata-location": table.metadata_location, "metadata": json.loads(table.metadata.model_dump_json())}


@contextmanager
def rest_catalog(folder: Path) -> Iterator[RestCatalog]:
    made = RestCatalog(IcebergLake(folder))
    made.lake.create()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.answers.wait()
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            code, answer = 200, dict[str, Any]()
            try:
                answer = made.answer(self.path.partition("?")[0], body)
            except (CommitFailedException, NoSuchTableError) as error:
                code = 409 if isinstance(error, CommitFailedException) else 404
                answer = {"error": {"message": str(error), "type": type(error).__name__, "code": code}}
            data = json.dumps(answer).encode()
            try:
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                pass  # the client waits no more

        do_POST = do_GET  # noqa: N815

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.uri = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield made
    finally:
        made.answers.set()
        server.shutdown()
        thread.join()
        server.server_close()
        made.lake.close()
