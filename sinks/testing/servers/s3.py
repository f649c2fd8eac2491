"""An S3-compatible server for tests: `with S3Server() as server:
os.environ.update(server.environment)`.

It is moto (`pip install "moto[server]"`), in a process of its own on a free loopback port. A lock
lets in one request at a time, which makes a put with `If-None-Match: *` atomic, as Amazon's S3 is:
moto looks for the key and writes it in two steps, between which its threads may switch. (Seen
without the lock and with sys.setswitchinterval(1e-6): of 400 keys for which eight processes raced,
one was won twice.) A list is told in pages of `PAGE` keys.
"""

from __future__ import annotations

import json
import sys
import urllib.request
import uuid
from collections.abc import Sequence

from sinks.testing.servers.common import START_TIMEOUT, ServerProcess

PAGE = 100
"""Of Amazon's 1,000, so that a test meets the second page soon."""

_SERVE = f"""
import os, sys
os.environ["MOTO_S3_DEFAULT_MAX_KEYS"] = "{PAGE}"
from threading import Lock
from moto.moto_server import werkzeug_app
from werkzeug.serving import make_server

moto = werkzeug_app.DomainDispatcherApplication(werkzeug_app.create_backend_app)
handler = werkzeug_app.MotoRequestHandler
lock = Lock()

def one_at_a_time(environ, start_response):
    with lock:
        return list(moto(environ, start_response))

port = int(sys.argv[1])
make_server("127.0.0.1", port, one_at_a_time, True, request_handler=handler).serve_forever()
"""

_VERSIONING = b"""<VersioningConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/">
<Status>Enabled</Status></VersioningConfiguration>"""


class S3Server(ServerProcess):
    """Its objects go with its process."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which obstore, boto3 and the AWS command line reach this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }

    def make_bucket(self, *, versioned: bool = False) -> str:
        """The name of a fresh bucket, which may keep what is deleted as versions."""
        name = f"test-{uuid.uuid4().hex[:12]}"
        self._put(name)
        if versioned:
            self._put(f"{name}?versioning", _VERSIONING)
        return name

    def deny(self, bucket: str, *actions: str) -> None:
        """Forbid everybody these actions on the objects of the bucket: `deny(name,
        "s3:PutObject")`."""
        resource = f"arn:aws:s3:::{bucket}/*"
        statement = {"Effect": "Deny", "Principal": "*", "Action": actions, "Resource": resource}
        self._put(
            f"{bucket}?policy",
            json.dumps({"Version": "2012-10-17", "Statement": [statement]}).encode(),
        )

    def _command(self) -> Sequence[str]:
        return [sys.executable, "-c", _SERVE, str(self.port)]

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self.endpoint, timeout=5).close()
        except OSError:
            return False
        return True

    def _put(self, path: str, body: bytes = b"") -> None:
        request = urllib.request.Request(
            f"{self.endpoint}/{path}", body, {"Content-Type": "application/json"}, method="PUT"
        )
        urllib.request.urlopen(request, timeout=START_TIMEOUT).close()
