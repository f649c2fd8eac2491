"""The examples of docs/kubernetes.md: Spark itself takes their settings. A cluster is not to be had here."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml  # type: ignore[import-untyped]  # comes with moto[server]

EXAMPLE = Path(__file__).parents[1] / "examples" / "deploy" / "kubernetes.yaml"
POD = "orders-driver-5f7"
NAMESPACE = "prod"


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    """The example's objects, by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all(EXAMPLE.read_text())}


@pytest.fixture(scope="module")
def submit_args(objects: dict[str, Any]) -> str:
    """PYSPARK_SUBMIT_ARGS as the driver's container has it in `NAMESPACE`."""
    return environment(objects)["PYSPARK_SUBMIT_ARGS"]


def environment(objects: dict[str, Any]) -> dict[str, str]:
    """What a kubelet makes of the container's `env`: each value may name variables that stand before it."""
    fields = {"metadata.name": POD, "metadata.namespace": NAMESPACE, "status.podIP": "127.0.0.1"}
    [container] = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    seen: dict[str, str] = {}
    for variable in container["env"]:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            seen[variable["name"]] = fields[source["fieldRef"]["fieldPath"]]
        elif "value" in variable:
            seen[variable["name"]] = re.sub(
                r"\$\((\w+)\)", lambda found: seen.get(found[1], found[0]), variable["value"]
            )
    return seen


def test_the_objects_are_of_the_namespace_that_they_are_applied_to(objects: dict[str, Any]) -> None:
    assert {each["metadata"].get("namespace") for each in objects.values()} == {None}
    account = objects["ServiceAccount"]["metadata"]["name"]
    binding = objects["RoleBinding"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    assert binding["roleRef"]["kind"] == "Role"
    assert binding["roleRef"]["name"] == objects["Role"]["metadata"]["name"]
    assert objects["Deployment"]["spec"]["template"]["spec"]["serviceAccountName"] == account


def test_the_driver_makes_its_executors_in_its_own_namespace(submit_args: str) -> None:
    assert "$(" not in submit_args, "a variable that is not known, or not yet"
    settings = dict(word.split("=", 1) for word in shlex.split(submit_args) if word.startswith("spark."))
    assert settings["spark.kubernetes.namespace"] == NAMESPACE
    assert settings["spark.kubernetes.driver.pod.name"] == POD


class Api(BaseHTTPRequestHandler):
    """As much of a Kubernetes API server as a driver needs to ask for its first executor."""

    permissions: ClassVar[dict[str, Any]] = {}
    """The rules of the example's Role: what each resource may be asked for, in `NAMESPACE`."""
    refused: ClassVar[list[str]] = []
    executor_asked_for: ClassVar[threading.Event] = threading.Event()

    def _answer(self) -> None:
        path, _, query = self.path.partition("?")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        match = re.fullmatch(r"/api/v1/namespaces/([^/]+)/([^/]+)(?:/([^/]+))?", path)
        if not match:
            return self._say(200, {"major": "1", "minor": "34"})
        namespace, resource, name = match.groups()
        verb = self._verb(name, query)
        if namespace != NAMESPACE or verb not in self.permissions.get(resource, ()):
            self.refused.append(f"{verb} {path}")
            return self._say(403, {"kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403})
        if verb == "watch":
            return self._say(200, {})
        if verb == "list":
            return self._say(200, {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": []})
        if verb == "get":
            pod = {"name": name, "namespace": namespace, "uid": "1"}
            return self._say(200, {"kind": "Pod", "apiVersion": "v1", "metadata": pod})
        if verb == "create" and resource == "pods":
            self.executor_asked_for.set()
        return self._say(200, json.loads(body or b"{}"))

    def _verb(self, name: str | None, query: str) -> str:
        if self.command == "GET":
            return "watch" if "watch=true" in query else "get" if name else "list"
        return {"POST": "create", "PATCH": "patch", "DELETE": "delete" if name else "deletecollection"}[self.command]

    def _say(self, status: int, answer: Any) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PATCH = do_DELETE = _answer  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def api(objects: dict[str, Any]) -> Iterator[str]:
    for rule in objects["Role"]["rules"]:
        Api.permissions |= dict.fromkeys(rule["resources"], rule["verbs"])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_role_allows_what_the_driver_asks_for_in_any_namespace(submit_args: str, api: str, tmp_path: Path) -> None:
    here = submit_args.replace("https://kubernetes.default.svc", api).replace("=orders-driver ", "=127.0.0.1 ")
    with (tmp_path / "log").open("w") as log:
        driver = subprocess.Popen(
            [sys.executable, "-c", "from pyspark.sql import SparkSession; SparkSession.builder.getOrCreate()"],
            env=os.environ | {"PYSPARK_SUBMIT_ARGS": f"--conf spark.ui.enabled=false {here}"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        while not Api.executor_asked_for.wait(0.1) and driver.poll() is None:
            pass
        assert Api.refused == []
        assert driver.poll() is None, (tmp_path / "log").read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
