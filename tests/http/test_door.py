"""The HTTP door of the driver: what it is for, and what it keeps out."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator import CheckpointCoordinator
from coordinator.errors import SavepointError
from coordinator.http import access
from coordinator.http import server as door
from coordinator.protocol.records import CheckpointStore
from sinks.testing.local import LocalQuery
from tests.protocol.play import Job


class Client:
    def __init__(self, coordinator: CheckpointCoordinator, **options: Any) -> None:
        self.address = coordinator.serve_http(**options)
        self.place = self.address.removeprefix("http://")
        path = access.token_file("job", coordinator.protocol.store.storage.uri)
        self.token = options.get("token") or access.read(path)

    def ask(self, method: str, path: str, body: Any = None, **headers: str | None) -> tuple[int, Any]:
        """With all that it takes; a header that is None is left out."""
        sent: dict[str, str | None] = {
            "Host": self.place,
            "Authorization": f"Bearer {self.token}",
            "Content-Type": "application/json",
        }
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection(self.place, timeout=120)
        connection.putrequest(method, path, skip_host=True)
        data = b"" if body is None else json.dumps(body).encode()
        for name, value in ({"Content-Length": str(len(data))} | sent).items():
            if value is not None:
                connection.putheader(name, value)
        connection.endheaders(data)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        is_json = answer.getheader("Content-Type") == "application/json"
        return answer.status, json.loads(text) if is_json else text.decode()

    def raw(self, data: bytes) -> bytes:
        host, port = self.place.split(":")
        with socket.create_connection((host, int(port)), timeout=120) as connection:
            connection.sendall(data)
            return b"".join(iter(lambda: connection.recv(65536), b""))


def test_metrics_over_http(job: Job) -> None:
    with job.coordinator() as coordinator:
        client = Client(coordinator)
        assert client.ask("GET", "/metrics", Authorization=None)[0] == 401
        job.query(2).run(coordinator)
        status, text = client.ask("GET", "/metrics")
        assert status == 200
        assert 'checkpointing_checkpoints_total{job_name="job",status="completed"} 2.0' in text.splitlines()
        names = {family.name for family in text_string_to_metric_families(text)}
        assert {"checkpointing_rows", "checkpointing_phase_duration_seconds", "checkpointing_in_doubt"} <= names


@pytest.fixture
def client(job: Job, target: str) -> Iterator[Client]:
    with job.coordinator(config={"savepoint_dir": target}) as coordinator:
        client = Client(coordinator)
        job.query(2).run(coordinator)
        yield client


def test_savepoints_over_http(job: Job, target: str) -> None:
    with job.coordinator(config={"savepoint_dir": target}) as coordinator:
        client = Client(coordinator)
        assert client.ask("GET", "/checkpoints") == (200, {})
        status, answer = client.ask("POST", "/savepoints", {})
        assert (status, answer["type"]) == (500, "SavepointError")
        job.query(2).run(coordinator)
        assert CheckpointStore(job.storage, "job").newest_claim().address == client.address
        for body, place in (({}, target), ({"target": f"{target}/daily"}, f"{target}/daily")):
            status, answer = client.ask("POST", "/savepoints", body)
            assert (status, answer["checkpoint"]) == (201, 1)
            assert answer["uri"].startswith(f"{place}/savepoint-")
        assert client.ask("GET", "/checkpoints")[1]["checkpoint_id"] == 1
        assert client.ask("POST", "/savepoints", {}, Content_Type="text/plain")[0] == 415
        assert client.ask("POST", "/savepoints", {"goal": target})[0] == 400
        assert client.ask("POST", "/savepoints", {"stop": "yes"})[0] == 400
        assert client.ask("POST", "/savepoints", [])[0] == 400
        assert client.ask("GET", "/elsewhere")[0] == client.ask("POST", "/elsewhere", {})[0] == 404
    with pytest.raises(ConnectionRefusedError):
        client.ask("GET", "/checkpoints")


@pytest.mark.parametrize("how", ["stop", "cancel"])
def test_a_query_is_stopped_over_http(job: Job, target: str, how: str) -> None:
    coordinator = job.coordinator(config={"min_pause": 60, "savepoint_dir": target})
    client = Client(coordinator)
    running = threading.Thread(target=lambda: LocalQuery(job.folder / "query", job.input).run(coordinator))
    running.start()
    while not (job.folder / "query/commits/0").exists():
        time.sleep(0.01)
    status, answer = client.ask("POST", "/savepoints", {how: True})
    running.join(120)
    assert (status, running.is_alive()) == (201, False)
    job.assert_exactly_once(batches=answer["checkpoint"] + 1)
    coordinator.close()


# ---------------------------------------------------------------------- who may
@pytest.mark.parametrize("given", [None, "Bearer ", "Bearer wrong", "Basic eDp5", "Bearer \xe4"])
@pytest.mark.parametrize(("method", "path"), [("GET", "/checkpoints"), ("POST", "/savepoints"), ("GET", "/")])
def test_nothing_is_done_without_the_token(
    client: Client, tmp_path: Path, method: str, path: str, given: str | None
) -> None:
    assert client.ask(method, path, {"stop": True}, Authorization=given)[0] == 401
    assert not (tmp_path / "savepoints").exists()


def test_the_token_is_in_a_file_of_this_user_alone_and_gone_at_the_end(
    job: Job, target: str, state_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with job.coordinator(config={"savepoint_dir": target}) as coordinator:
        client = Client(coordinator)
        [file] = state_home.rglob("*.token")
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert file.read_text() == client.token
        job.query(1).run(coordinator)
        client.ask("GET", "/checkpoints")
        stored = b"".join(job.storage.get(key) or b"" for key in job.storage.list(""))
        assert client.token
        assert client.token not in stored.decode() + caplog.text
    assert list(state_home.rglob("*.token")) == []


def test_a_file_that_others_can_read_or_that_leads_elsewhere_gives_no_token(tmp_path: Path) -> None:
    open_to_all, link = tmp_path / "a.token", tmp_path / "b.token"
    open_to_all.write_text("x" * 40)
    open_to_all.chmod(0o644)
    link.symlink_to(open_to_all)
    with pytest.raises(SavepointError, match="not this user's alone"):
        access.read(open_to_all)
    with pytest.raises(OSError, match="symbolic links"):
        access.read(link)


def test_a_token_of_ones_own(job: Job, target: str, state_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for weak in ("short", "ä" * 40):
        with job.coordinator() as coordinator, pytest.raises(ValueError, match="at least 32 ASCII"):
            coordinator.serve_http(token=weak)
    with job.coordinator() as coordinator:
        assert Client(coordinator, token="t" * 32).ask("GET", "/checkpoints")[0] == 200
    monkeypatch.setenv("COORDINATOR_TOKEN", "e" * 32)
    with job.coordinator() as coordinator:
        client = Client(coordinator)
        assert client.token is None
        client.token = "e" * 32
        assert client.ask("GET", "/checkpoints")[0] == 200
    assert list(state_home.rglob("*.token")) == []


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ({"Host": "rebound.example"}, 421),
        ({"Host": "127.0.0.1"}, 421),
        ({"Host": None}, 421),
        ({"Origin": "http://127.0.0.1"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
    ],
)
@pytest.mark.parametrize("path", ["/checkpoints", f"/identity?nonce={'0' * 32}"])
def test_no_web_page_gets_in(client: Client, path: str, header: dict[str, str | None], status: int) -> None:
    assert client.ask("GET", path, **header)[0] == status


def test_the_driver_proves_who_it_is_for_its_own_address_only(client: Client) -> None:
    nonce = os.urandom(16).hex()
    status, answer = client.ask("GET", f"/identity?nonce={nonce}", Authorization=None)
    assert (status, answer) == (200, {"proof": access.proof(str(client.token), client.place, nonce)})
    assert client.ask("GET", f"/identity?nonce={nonce}", Host="127.0.0.1:1")[0] == 421
    assert client.ask("GET", "/identity?nonce=x", Authorization=None)[0] == 401


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_it_does_not_listen_everywhere(job: Job, host: str) -> None:
    with job.coordinator() as coordinator, pytest.raises(ValueError, match="host has to be"):
        coordinator.serve_http(host=host)


# ---------------------------------------------------------------------- where to
@pytest.mark.parametrize(
    "where",
    [
        "file:///etc/x",
        "{0}x",
        "{0}/../outside",
        "{0}/a/../../outside",
        "{0}/%2e%2e/outside",
        "{0}/link",
        "sqlite:///{1}/outside.db",
        "mysql://u:p@127.0.0.1:1/d?local_infile=1",
        "memory:outside",
        "outside",
        "",
    ],
)
def test_a_target_outside_of_the_roots_is_neither_opened_nor_made(client: Client, tmp_path: Path, where: str) -> None:
    (tmp_path / "savepoints").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "savepoints" / "link").symlink_to(tmp_path / "outside")
    before = sorted(tmp_path.rglob("*"))
    status, answer = client.ask(
        "POST", "/savepoints", {"target": where.format(f"file://{tmp_path}/savepoints", tmp_path)}
    )
    assert (status, "is not in a place" in answer["error"]) == (400, True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_driver_without_a_place_for_savepoints_takes_none(job: Job) -> None:
    with job.coordinator() as coordinator:
        status, answer = Client(coordinator).ask("POST", "/savepoints", {"target": "file:///tmp/x"})
    assert (status, "savepoint_dir" in answer["error"]) == (400, True)


def test_nothing_is_opened_by_get(client: Client, tmp_path: Path) -> None:
    assert client.ask("GET", f"/savepoints?target=file://{tmp_path}/savepoints/new")[0] == 404
    assert not (tmp_path / "savepoints").exists()


# ---------------------------------------------------------------------- how much
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content_Length": "-1"}, 411),
        ({"Content_Length": "+2"}, 411),
        ({"Content_Length": "many"}, 411),
        ({"Content_Length": None}, 411),
        ({"Content_Length": "99999999"}, 413),
        ({"Content_Length": "2", "Transfer_Encoding": "chunked"}, 411),
    ],
)
def test_odd_bodies_are_refused(client: Client, headers: dict[str, str | None], status: int) -> None:
    assert client.ask("POST", "/savepoints", {}, **headers)[0] == status


def test_deeply_nested_json(client: Client) -> None:
    text = b"[" * 30_000
    head = f"POST /savepoints HTTP/1.1\r\nHost: {client.place}\r\nAuthorization: Bearer {client.token}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    assert b" 400 " in client.raw(head.encode() + text).split(b"\r\n")[0]


def test_a_head_that_is_too_long_is_not_read(client: Client) -> None:
    head = f"GET /checkpoints HTTP/1.1\r\nHost: {client.place}\r\nAuthorization: Bearer {client.token}\r\n".encode()
    assert b" 200 " in client.raw(head + b"\r\n")
    answer = b""
    with contextlib.suppress(OSError):  # reset amid the sending
        answer = client.raw(head + (b"X: " + b"y" * 40_000 + b"\r\n") * 2 + b"\r\n")
    assert answer == b""


def test_slow_and_silent_clients_end_soon_and_are_few(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_SECONDS", 2.0)
    host, port = client.place.split(":")
    slow = [socket.create_connection((host, int(port))) for _ in range(50)]
    started = time.monotonic()
    while time.monotonic() - started < 1.5:
        for each in slow:
            with contextlib.suppress(OSError):
                each.send(b"G")
        time.sleep(0.2)
    handlers = [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]
    assert len(handlers) <= 8
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            assert client.ask("GET", "/checkpoints")[0] == 200
            break
        except OSError:
            time.sleep(0.1)
    else:
        pytest.fail("the door stays shut")
    for each in slow:
        each.close()


def test_one_savepoint_at_a_time(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(self: Any, target: str) -> Any:
        begun.set()
        assert go_on.wait(120)
        raise ValueError("enough")

    monkeypatch.setattr(CheckpointCoordinator, "trigger_savepoint", slow)
    first = threading.Thread(target=client.ask, args=("POST", "/savepoints", {}))
    first.start()
    assert begun.wait(120)
    assert "already" in client.ask("POST", "/savepoints", {})[1]["error"]
    assert client.ask("GET", "/checkpoints")[0] == 200
    go_on.set()
    first.join()
