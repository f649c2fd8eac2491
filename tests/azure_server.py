"""A server with the interface of Azure Blob Storage for tests: `with AzureServer() as server: server.environment`.

It is Azurite, which is fetched once from the npm registry and needs Node.js. Its blobs go with its process.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
from email.utils import formatdate
from pathlib import Path

from sinks.testing.servers.common import START_TIMEOUT, CannotBeHad, ServerProcess, run
from sinks.testing.servers.maven import FETCH_TIMEOUT, cache_folder, fetched_once

_VERSION = "3.37.0"
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The key that every emulator of Azure has, which is no secret."""


class AzureServer(ServerProcess):
    """One account with containers of blobs."""

    PORT_TAKEN = "EADDRINUSE"

    @property
    def label(self) -> str:
        return "Azurite"

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/{_ACCOUNT}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which obstore reaches this server."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
            "AZURE_STORAGE_ENDPOINT": self.endpoint,
            "AZURE_ALLOW_HTTP": "true",
        }

    def make_container(self) -> str:
        """The name of a fresh container. obstore makes none, so the request is signed here."""
        name = f"test-{uuid.uuid4().hex[:12]}"
        about = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
        lines = [f"{header}:{value}" for header, value in about.items()]
        resource = f"/{_ACCOUNT}/{_ACCOUNT}/{name}\nrestype:container"
        text = "\n".join(["PUT", *[""] * 11, *lines, resource])
        signature = hmac.new(base64.b64decode(_KEY), text.encode(), hashlib.sha256).digest()
        headers = about | {"Authorization": f"SharedKey {_ACCOUNT}:{base64.b64encode(signature).decode()}"}
        headers |= {"Content-Length": "0", "Content-Type": ""}
        address = f"{self.endpoint}/{name}?restype=container"
        request = urllib.request.Request(address, b"", headers, method="PUT")
        urllib.request.urlopen(request, timeout=START_TIMEOUT).close()
        return name

    def _command(self) -> Sequence[str]:
        program = _installation() / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
        where = ["--blobHost", "127.0.0.1", "--blobPort", str(self.port)]
        return ["node", str(program), *where, "--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck"]

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self.endpoint, timeout=5).close()
        except urllib.error.HTTPError:  # it wants a signature
            return True
        except OSError:
            return False
        return True


def _installation() -> Path:
    """The folder with Azurite. Raises CannotBeHad where it cannot be fetched."""
    if not shutil.which("npm"):
        raise CannotBeHad("it is fetched by npm, and this machine has no Node.js")
    folder = cache_folder() / "npm" / f"azurite-{_VERSION}"
    folder.parent.mkdir(exist_ok=True)
    fetched_once(folder, f"Azurite {_VERSION} from the npm registry", lambda: _fetch(folder))
    return folder


def _fetch(folder: Path) -> None:
    made = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(made, ignore_errors=True)
    quiet = ["--silent", "--no-audit", "--no-fund", "--ignore-scripts"]
    try:
        run(["npm", "install", *quiet, "--prefix", str(made), f"azurite@{_VERSION}"], timeout=FETCH_TIMEOUT)
    except RuntimeError as error:
        raise CannotBeHad(f"npm could not fetch it.\n{error}") from None
    made.rename(folder)
