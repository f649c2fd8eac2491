"""A real Kafka for tests: `with KafkaServer() as server: Producer(server.client_options())`.

Apache Kafka in KRaft mode runs from its jars of Maven Central (`sinks.testing.servers.maven`), on
free loopback ports, with one broker or with several. Each broker can be stopped, crashed, frozen
and started again on the same data and the same ports, and all die with the process that started
them, even when that gets SIGKILL.

`kafka_service` takes the broker that the environment variable TEST_KAFKA_BOOTSTRAP names instead,
or a container where a Docker engine answers.
"""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # re-exports some names without saying so
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ConfigResource,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from sinks._util.log import get_logger
from sinks.testing.servers.common import (
    START_TIMEOUT,
    InContainer,
    OneProcess,
    Service,
    Unmanaged,
    Watchdog,
    docker_answers,
    free_port,
    java,
    listens,
    log_in,
    named,
    run,
    spawn,
    temporary_folder,
    waiting_for,
)
from sinks.testing.servers.maven import cache_folder, maven_jars

logger = get_logger(__name__)

VERSION = "4.2.1"


def jars_of(version: str) -> tuple[str, ...]:
    return f"org.apache.kafka:kafka_2.13:{version}", "org.slf4j:slf4j-simple:1.7.36"


JARS = jars_of(VERSION)

STOP_TIMEOUT = 120.0
"""Seconds until a broker that does not end after SIGTERM gets SIGKILL: the last one of several
waits in vain for a controller to hand its partitions to."""

SMALL_JVM = ("-Xms128m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
"""Starts quickly and stays small. A benchmark wants another."""

SILENT_JVM = ("-Xlog:disable", "-Xlog:all=off")
"""Says nothing of an archive of classes that it cannot use."""

_FIRST_RECORDS = "bootstrap.checkpoint"

ADMIN = "admin"
"""The user with all permissions, where users are asked for."""


class KafkaService(Service):
    """A running Kafka. `start` also resumes brokers that are paused."""

    bootstrap: str
    """host:port of the brokers, separated by commas: librdkafka's bootstrap.servers."""

    def client_options(self, user: str | None = None) -> dict[str, str]:
        """Settings for every librdkafka client, of the superuser unless `user` names another."""
        return {"bootstrap.servers": self.bootstrap}

    def admin(self) -> AdminClient:
        return _admin(self.client_options())

    @contextmanager
    def topic(
        self, partitions: int = 1, config: Mapping[str, str] | None = None, name: str | None = None
    ) -> Iterator[str]:
        """The name of a fresh topic, once a leader is known for each partition.

        Deleted at the end, if it is still there; brokers that the test left crashed or paused are
        started for that.
        """
        name = name or f"test_{uuid.uuid4().hex[:12]}"
        admin = self.admin()
        new = NewTopic(name, partitions, config=dict(config or {}))
        _wait_until(lambda: _created(admin, new), f"no broker takes topic {name}")
        _wait_until(
            lambda: _leaders(admin, name) == partitions,
            f"topic {name} has no leader for some partitions",
        )
        try:
            yield name
        finally:
            self.start()
            # the old one may wait on a connection to a broker that has crashed
            admin = self.admin()
            try:
                admin.delete_topics([name])[name].result(START_TIMEOUT)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise


class KafkaServer(KafkaService):
    """Embedded brokers with data of their own in a temporary folder.

    `settings` are those of server.properties and go to every broker; unlike the default, topics are
    not made by themselves. Several brokers are each a controller too, so that any one of three may
    be missing; topics then have three replicas, of which two must be in sync. `features` are the
    cluster's levels of features, where they are not to be the newest: `{"transaction.version":
    "0"}`; `version` is a release of Kafka, from 3.3 on.

    When `users` are named, clients come in by SASL_SSL with SCRAM-SHA-512: `client_options(user)`.
    These users may do what `allow` gave them and nothing else, the superuser `admin` may do all.
    Among themselves the brokers use an open listener.
    """

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        brokers: int = 1,
        users: Sequence[str] = (),
        jvm: Sequence[str] = SMALL_JVM,
        features: Mapping[str, str] | None = None,
        version: str = VERSION,
    ) -> None:
        self.settings = dict(settings or {})
        self.features = dict(features or {})
        self.version = version
        self.jvm = tuple(jvm)
        self.bootstrap = ""
        self._count = brokers
        self._passwords = (
            {user: secrets.token_urlsafe(12) for user in (ADMIN, *users)} if users else {}
        )
        self._brokers: list[KafkaBroker] = []
        self._home: Path | None = None
        self._watchdog: Watchdog | None = None

    @property
    def brokers(self) -> tuple[KafkaBroker, ...]:
        return tuple(self._brokers)

    def broker(self, node: int = 1) -> KafkaBroker:
        """The broker with this node id, as in Kafka's metadata: 1, 2, …"""
        if not 1 <= node <= len(self._brokers):
            raise LookupError(
                f"Kafka has no broker {node}: it runs {len(self._brokers)}, with ids from 1"
            )
        return self._brokers[node - 1]

    @property
    def home(self) -> Path:
        """The folder of data and logs. Raises RuntimeError when there is none."""
        if self._home is None:
            raise RuntimeError("Kafka has no folder yet: call start() first")
        return self._home

    @property
    def running(self) -> bool:
        return bool(self._brokers) and all(broker.running for broker in self._brokers)

    def start(self) -> None:
        with named("Kafka"):
            self._start()

    def _start(self) -> None:
        attempts = 1 if self._brokers else 5
        while True:
            attempts -= 1
            if not self._brokers:
                self._initialise()
            try:
                with waiting_for("starting Kafka"):
                    for broker in self._brokers:
                        broker.launch()
                    for broker in self._brokers:
                        broker.await_ready()
                return
            except RuntimeError:
                # somebody else took a port in between
                if not attempts or not any(
                    "failed to bind" in broker.log for broker in self._brokers
                ):
                    raise
                self.close()

    def stop(self) -> None:
        for broker in self._brokers:
            broker.terminate()
        for broker in self._brokers:
            broker.stop()

    def kill(self) -> None:
        for broker in self._brokers:
            broker.kill()

    def close(self) -> None:
        self.kill()
        self._brokers = []
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)
            self._home = None
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None

    def client_options(self, user: str | None = None) -> dict[str, str]:
        return {"bootstrap.servers": self.bootstrap} | self._credentials(user or ADMIN)

    def allow(self, user: str, kind: str, name: str, operation: str) -> None:
        """Give a permission, and return when a broker knows it: `allow("ann", "topic", "orders",
        "write")`.

        `kind` is topic, group, transactional_id or broker (the cluster, whose name is
        kafka-cluster), `name` may be "*", `operation` is one of
        `confluent_kafka.admin.AclOperation`.
        """
        permission = _permission(user, kind, name, operation)
        admin = self.admin()
        for change in admin.create_acls([AclBinding(*permission)]).values():
            change.result(START_TIMEOUT)
        _await_permissions(admin, AclBindingFilter(*permission), 1)

    def withdraw(self, user: str, kind: str, name: str, operation: str) -> None:
        """Take back what `allow` gave."""
        permission = AclBindingFilter(*_permission(user, kind, name, operation))
        admin = self.admin()
        for change in admin.delete_acls([permission]).values():
            change.result(START_TIMEOUT)
        _await_permissions(admin, permission, 0)

    # ------------------------------------------------------------------ inside
    def _credentials(self, user: str) -> dict[str, str]:
        if not self._passwords:
            return {}
        return {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": user,
            "sasl.password": self._passwords[user],
            "ssl.ca.location": str(self.home / "ca.pem"),
        }

    def _initialise(self) -> None:
        self._home = home = Path(tempfile.mkdtemp(prefix="kafka-", dir=temporary_folder()))
        self._watchdog = Watchdog(home)
        nodes = range(1, self._count + 1)
        ports = _free_ports(3 * self._count)
        clients, internals, controllers = (
            dict(zip(nodes, ports[start::3], strict=True)) for start in range(3)
        )
        self.bootstrap = ",".join(f"127.0.0.1:{port}" for port in clients.values())
        voters = ",".join(f"{node}@127.0.0.1:{port}" for node, port in controllers.items())
        common = _settings(self._count) | {"controller.quorum.voters": voters}
        if self._passwords:
            common |= _security(home)
        program = _program(home, self.jvm, self.version)
        for node in nodes:
            broker = KafkaBroker(
                node,
                clients[node],
                home / str(node),
                program,
                self._credentials(ADMIN),
                self._watch,
            )
            listeners = {
                "CLIENT": clients[node],
                "INTERNAL": internals[node],
                "CONTROLLER": controllers[node],
            }
            broker.configure(common | _listeners(listeners, bool(self._passwords)) | self.settings)
            self._brokers.append(broker)
        cluster = _id()
        records = self._first_records()
        for broker in self._brokers:
            broker.format(cluster, records)

    def _first_records(self) -> bytes:
        """Those with which a cluster of these features and users begins, as Kafka's tool writes
        them. They are kept, if there are no users: the tool takes half as long as a broker's start.
        """
        features = [f"{feature}={level}" for feature, level in self.features.items()]
        cached = cache_folder() / "-".join(
            ["kafka", self.version, *features, "bootstrap.checkpoint"]
        )
        if not self._passwords and cached.exists():
            return cached.read_bytes()
        options = [option for feature in features for option in ("--feature", feature)]
        for user, password in self._passwords.items():
            options.append(f"--add-scram=SCRAM-SHA-512=[name={user},password={password}]")
        records = self._brokers[0].first_records(*options)
        if not self._passwords:
            new = cached.with_suffix(f".{uuid.uuid4().hex}")
            new.write_bytes(records)
            new.replace(cached)
        return records

    def _watch(self) -> None:
        assert self._watchdog is not None
        self._watchdog.watch(*(broker.pid for broker in self._brokers if broker.running))


class KafkaBroker(OneProcess):
    """One broker of a `KafkaServer`; a controller too."""

    def __init__(
        self,
        node: int,
        port: int,
        folder: Path,
        program: Sequence[str],
        credentials: Mapping[str, str],
        changed: Callable[[], None],
    ) -> None:
        self.node = node
        self.port = port
        """Of the clients' listener."""
        self._folder = folder
        self._program = tuple(program)
        self._credentials = dict(credentials)
        self._changed = changed
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def label(self) -> str:
        return f"Kafka broker {self.node}"

    @property
    def log(self) -> str:
        """All that the broker has written to its log."""
        return log_in(self._folder)

    def start(self) -> None:
        """Start the broker, or resume it, and return when it answers and the controller has let it
        in. With other brokers down there may be no controller: `KafkaServer.start` starts all."""
        self.launch()
        self.await_ready()

    def stop(self) -> None:
        """Stop the broker in good order, which hands its partitions to others.

        A paused one is resumed.
        """
        self.terminate()
        if self._process is not None:
            try:
                self._process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                logger.warning(
                    "Kafka broker %d did not stop within %.0f s: SIGKILL", self.node, STOP_TIMEOUT
                )
            self.kill()

    def kill(self) -> None:
        """Crash the broker: SIGKILL. Returns when it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._changed()

    def restart(self) -> None:
        self.stop()
        self.start()

    # ------------------------------------------------------------------ for KafkaServer
    def configure(self, settings: Mapping[str, str]) -> None:
        self._folder.mkdir()
        everything = dict(settings) | {"node.id": str(self.node), "log.dirs": str(self._data)}
        self._properties.write_text(
            "".join(f"{key}={value}\n" for key, value in everything.items())
        )

    def first_records(self, *options: str) -> bytes:
        """Those that Kafka's tool puts into a new data folder."""
        tool = [*self._program, "kafka.tools.StorageTool", "format", f"--cluster-id={_id()}"]
        run([*tool, "-c", str(self._properties), *options], cwd=self._folder)
        return (self._data / _FIRST_RECORDS).read_bytes()

    def format(self, cluster: str, records: bytes) -> None:
        """Make the data folder of a broker of this cluster, which begins with these records."""
        about = {"version": 1, "cluster.id": cluster, "node.id": self.node, "directory.id": _id()}
        self._data.mkdir(exist_ok=True)
        (self._data / _FIRST_RECORDS).write_bytes(records)
        (self._data / "meta.properties").write_text(
            "".join(f"{key}={value}\n" for key, value in about.items())
        )

    def launch(self) -> None:
        """Start the broker, or resume it, and return at once."""
        if self.running:
            self.resume()
            return
        self._process = spawn([*self._program, "kafka.Kafka", str(self._properties)], self._folder)
        self._changed()

    def await_ready(self) -> None:
        """Return when the broker answers and the controller has let it in.

        Kills it when it does not.
        """
        try:
            _wait_until(self._ready, f"Kafka broker {self.node} did not start")
        except RuntimeError as error:
            self.kill()
            raise RuntimeError(f"{error}\nThe end of its log:\n{self.log[-3000:]}") from None

    def terminate(self) -> None:
        """Ask the broker to stop, and return at once."""
        if self.running:
            self.resume()
            os.kill(self.pid, signal.SIGTERM)

    def _ready(self) -> bool:
        if not self.running:
            raise RuntimeError(f"Kafka broker {self.node} ended by itself")
        if not listens(self.pid, self.port):
            return False
        admin = _admin({"bootstrap.servers": self.address} | self._credentials)
        try:
            return self.node in admin.list_topics(timeout=2).brokers
        except KafkaException:
            return False

    @property
    def _properties(self) -> Path:
        return self._folder / "server.properties"

    @property
    def _data(self) -> Path:
        return self._folder / "data"


def class_archive() -> Path:
    """Where a broker's classes may be archived ("Dynamic CDS Archives", JEP 350): with them it
    starts in half the time. `archive_classes` makes it; another JVM goes without."""
    return cache_folder() / f"kafka-{VERSION}.jsa"


def archive_classes() -> None:
    """Run a broker, and keep the classes that it loaded for all later ones."""
    new = class_archive().with_suffix(".new")
    class_archive().unlink(missing_ok=True)  # a JVM that has loaded an archive makes none
    with KafkaServer(jvm=(*SMALL_JVM, f"-XX:ArchiveClassesAtExit={new}", *SILENT_JVM)) as server:
        with server.topic() as topic:
            producer = Producer(
                server.client_options() | {"transactional.id": topic, "log_level": 0}
            )
            producer.init_transactions()
            producer.begin_transaction()
            producer.produce(topic, b"")
            producer.commit_transaction()
        server.stop()
    new.replace(class_archive())


def _program(home: Path, jvm: Sequence[str], version: str) -> list[str]:
    """The command line up to the class to run."""
    archive = class_archive()
    return [
        java(),
        *(
            [f"-XX:SharedArchiveFile={archive}", *SILENT_JVM]
            if version == VERSION and archive.exists()
            else ()
        ),
        *jvm,
        "-XX:-UsePerfData",  # would leave a file in /tmp after SIGKILL
        f"-Djava.io.tmpdir={home}",
        "-Dorg.slf4j.simpleLogger.showDateTime=true",
        "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
        # otherwise there are a thousand lines at each start
        "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.common.config=warn",
        "-cp",
        os.pathsep.join(map(str, maven_jars(*jars_of(version)))),
    ]


def _settings(brokers: int) -> dict[str, str]:
    """What all brokers of a cluster of this size have in common: small, quick to start, quick to
    notice."""
    replicas, in_sync = (3, 2) if brokers >= 3 else (1, 1)
    return {
        "process.roles": "broker,controller",
        "auto.create.topics.enable": "false",
        "default.replication.factor": f"{replicas}",
        "min.insync.replicas": f"{in_sync}",
        "offsets.topic.num.partitions": "4",
        "offsets.topic.replication.factor": f"{replicas}",
        "transaction.state.log.num.partitions": "4",
        "transaction.state.log.replication.factor": f"{replicas}",
        "transaction.state.log.min.isr": f"{in_sync}",
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
        "group.initial.rebalance.delay.ms": "0",
        # a record twice a second that says nothing: a third of what rest takes
        "metadata.max.idle.interval.ms": "0",
        "broker.heartbeat.interval.ms": "500",  # with 250, a half more at rest
        # a crashed broker may not come back earlier
        "broker.session.timeout.ms": "6000" if brokers > 1 else "1500",
        "log.cleaner.dedupe.buffer.size": f"{4 << 20}",  # from the heap
    }


def _listeners(ports: Mapping[str, int], secured: bool) -> dict[str, str]:
    clients = "SASL_SSL" if secured else "PLAINTEXT"
    return {
        "listeners": ",".join(f"{name}://127.0.0.1:{port}" for name, port in ports.items()),
        "listener.security.protocol.map": (
            f"CLIENT:{clients},INTERNAL:PLAINTEXT,CONTROLLER:PLAINTEXT"
        ),
        "inter.broker.listener.name": "INTERNAL",
        "controller.listener.names": "CONTROLLER",
    }


def _security(home: Path) -> dict[str, str]:
    """The settings of a cluster with users; makes its certificate, which is its own authority:
    ca.pem."""
    # no option of keytool
    keystore = home / "keystore.p12"
    password = secrets.token_hex(12)
    store = [
        "-alias",
        "kafka",
        "-keystore",
        str(keystore),
        "-storetype",
        "PKCS12",
        "-storepass",
        password,
    ]
    names = ["-dname", "CN=localhost", "-ext", "san=ip:127.0.0.1,dns:localhost"]
    keytool = java("keytool")
    run(
        [
            keytool,
            "-genkeypair",
            *store,
            *names,
            "-keyalg",
            "EC",
            "-groupname",
            "secp256r1",
            "-validity",
            "30",
        ]
    )
    run([keytool, "-exportcert", *store, "-rfc", "-file", str(home / "ca.pem")])
    scram = "org.apache.kafka.common.security.scram.ScramLoginModule"
    return {
        "sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "listener.name.client.scram-sha-512.sasl.jaas.config": f"{scram} required;",
        "ssl.keystore.location": str(keystore),
        "ssl.keystore.password": password,
        "ssl.keystore.type": "PKCS12",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": f"User:{ADMIN};User:ANONYMOUS",  # the brokers themselves are anonymous
    }


def _id() -> str:
    """A new one, as Kafka writes them."""
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")


def _free_ports(count: int) -> list[int]:
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


def _admin(options: Mapping[str, str]) -> AdminClient:
    quick: dict[str, str | int | float | bool] = {
        "reconnect.backoff.ms": 20,
        "reconnect.backoff.max.ms": 500,
        "log_level": 0,
    }
    return AdminClient(quick | dict(options))


def _created(admin: AdminClient, topic: NewTopic) -> bool:
    """False while too few brokers take part: on a busy machine one may miss its heartbeats, and is
    back soon."""
    try:
        admin.create_topics([topic])[topic.topic].result(START_TIMEOUT)
    except KafkaException as error:
        if error.args[0].code() != KafkaError.INVALID_REPLICATION_FACTOR:
            raise
        return False
    return True


def _leaders(admin: AdminClient, topic: str) -> int:
    """The number of the topic's partitions that have a leader."""
    known = admin.list_topics(topic, timeout=START_TIMEOUT).topics[topic]
    return sum(partition.leader >= 0 for partition in known.partitions.values())


_Right = tuple[ResourceType, str, ResourcePatternType, str, str, AclOperation, AclPermissionType]


def _permission(user: str, kind: str, name: str, operation: str) -> _Right:
    return (
        ResourceType[kind.upper()],
        name,
        ResourcePatternType.LITERAL,
        f"User:{user}",
        "*",
        AclOperation[operation.upper()],
        AclPermissionType.ALLOW,
    )


def _await_permissions(admin: AdminClient, permission: AclBindingFilter, expected: int) -> None:
    _wait_until(
        lambda: len(admin.describe_acls(permission).result(START_TIMEOUT)) == expected,
        f"the broker does not know of the change of {permission}",
    )


def _wait_until(condition: Callable[[], bool], failure: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{failure} within {START_TIMEOUT:.0f} s")
        time.sleep(0.02)


class ExternalKafka(KafkaService, Unmanaged):
    """Brokers that somebody else runs, without encryption or password.

    `topic` needs the permission to create topics.
    """

    unmanaged = "the brokers of TEST_KAFKA_BOOTSTRAP are not ours to stop"

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap

    def has(self, settings: Mapping[str, str]) -> bool:
        """Whether every broker runs with these settings."""
        admin = self.admin()
        nodes = admin.list_topics(timeout=START_TIMEOUT).brokers
        answers = admin.describe_configs(
            [ConfigResource(ConfigResource.Type.BROKER, str(node)) for node in nodes]
        )
        for answer in answers.values():
            described = answer.result(START_TIMEOUT)
            if any(
                name not in described or described[name].value != value
                for name, value in settings.items()
            ):
                return False
        return True

    def start(self) -> None:
        self.admin().list_topics(timeout=START_TIMEOUT)


class ContainerKafka(InContainer, ExternalKafka):
    """One broker in a container."""

    def __init__(
        self, settings: Mapping[str, str] | None = None, image: str = f"apache/kafka:{VERSION}"
    ) -> None:
        from testcontainers.core.container import DockerContainer

        port = free_port()  # the same inside, since the broker tells it to its clients
        self._container = DockerContainer(image).with_bind_ports(port, port)
        host = self._container.get_container_host_ip()
        everything = _settings(1) | _listeners(
            {"CLIENT": port, "INTERNAL": 19092, "CONTROLLER": 19093}, secured=False
        )
        everything |= {
            "node.id": "1",
            "controller.quorum.voters": "1@localhost:19093",
            "listeners": f"CLIENT://:{port},INTERNAL://:19092,CONTROLLER://:19093",
            "advertised.listeners": f"CLIENT://{host}:{port},INTERNAL://localhost:19092",
        }
        for name, value in (everything | dict(settings or {})).items():
            self._container.with_env(f"KAFKA_{name.upper().replace('.', '_')}", value)
        self._container.start()
        super().__init__(f"{host}:{port}")

    def start(self) -> None:
        _wait_until(self._answers, f"the container did not answer at {self.bootstrap}")

    def _answers(self) -> bool:
        try:
            return bool(self.admin().list_topics(timeout=2).brokers)
        except KafkaException:
            return False


def kafka_service(settings: Mapping[str, str] | None = None) -> KafkaService:
    """The brokers that TEST_KAFKA_BOOTSTRAP names, if they run with these settings; else a
    container, where a Docker engine answers; else an embedded broker."""
    bootstrap = os.environ.get("TEST_KAFKA_BOOTSTRAP")
    if bootstrap:
        external = ExternalKafka(bootstrap)
        if external.has(settings or {}):
            return external
        logger.warning(
            "TEST_KAFKA_BOOTSTRAP does not run with %s: another broker takes its place", settings
        )
    if docker_answers():
        return ContainerKafka(settings)
    return KafkaServer(settings)
