"""Checkpoint storage in object stores, through obstore.

A cloud store's conditional put (obstore's mode "create") is one request, atomic, and durable when
it is answered. Two things are left to do here.

obstore 0.12 (object_store 0.14) repeats some puts whose answer got lost, and then says that there
is a value already, without telling that it tried twice. So obstore is told to repeat nothing, and
this module repeats requests itself. Also, obstore takes every 409 to mean that there is a value,
though S3 also answers 409 while the key is being deleted.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import ObjectStore, from_url
from tenacity import Retrying

from coordinator.storage.base import (
    CheckpointStorage,
    StorageError,
    check_folder,
    check_key,
    is_key,
)
from coordinator.storage.retry import retries
from sinks._util.threads import side_by_side

_FORMS = {"s3": "s3://BUCKET/PREFIX", "gs": "gs://BUCKET/PREFIX", "az": "az://CONTAINER/PREFIX"}
_VARIABLES = {"s3": "AWS_*", "gs": "GOOGLE_*", "az": "AZURE_*"}

_RACERS = 4
"""The number of puts of one name that race when a store is opened."""

_PASSING = (
    r"HTTP error: (?!builder)|status code: (5(?!01)\d\d|408|429)"
    r"|InternalError|SlowDown|RequestTimeout"
)
"""What obstore says of transient faults of the transport or of the store."""

_NO_BUCKET = "NoSuchBucket|ContainerNotFound|bucket does not exist"

# Advice by what obstore or the store says. {} stands for the family of environment variables.
_CLOUD_ADVICE = (
    (
        "RequestTimeTooSkewed|date header too old|short-lived token|InvalidCertificate",
        "See that the clock of the driver's machine is right, and the store's certificate valid "
        "and of a known issuer",
    ),
    (_NO_BUCKET, "Create the bucket or container first, or fix its name in the URI"),
    (
        "token request|/latest/(api/token|meta-data)|Missing (AccessKeyId|Secret)|Account must "
        "be|credential error",
        "No usable credentials were found: set the environment variables {} on the driver, or give "
        "its machine a role",
    ),
    (
        "status code: 40[13]|AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken",
        "Check the credentials in {}; they need permission to list, read, write and delete objects "
        "below the prefix",
    ),
    (
        "Received redirect|AuthorizationHeaderMalformed",
        "Set AWS_REGION to the region of the bucket",
    ),
    (
        "builder error",
        "Only https is allowed; a test server without TLS needs ALLOW_HTTP=true in {}",
    ),
    (
        "NotImplemented|status code: 501",
        "The store has no conditional puts, or another address is needed in {}",
    ),
    (
        _PASSING,
        "Check that the store, or the endpoint in {}, can be reached from the driver; the query "
        "can then be restarted",
    ),
)


class ObjectStorage(CheckpointStorage):
    """Storage in any store that obstore knows, with one object for each key.

    The objects are named by the keys, below the store's own prefix. A request with a transient
    failure is repeated for up to `retry_seconds`. If a repeated put finds a value, the two values
    are compared: that tells a put whose answer got lost from a put that came second. This needs a
    store that repeats nothing by itself: `retry_config={"max_retries": 0}`.
    """

    def __init__(self, uri: str, store: ObjectStore, *, retry_seconds: float = 30.0) -> None:
        self.uri = uri
        self._store = store
        self._retry_seconds = retry_seconds

    def put_if_absent(self, key: str, value: bytes) -> bool:
        retrying = self._retrying()

        def put() -> bool:
            try:
                obstore.put(self._store, key, value, mode="create")
            except AlreadyExistsError:
                current = self.get(key)
                if current is None:
                    raise
                return retrying.statistics["attempt_number"] > 1 and current == value
            return True

        with self._errors(f"cannot write {len(value)} bytes", check_key(key)):
            return retrying(put)

    def get(self, key: str) -> bytes | None:
        with self._errors("cannot read", check_key(key)):
            try:
                return self._retrying()(lambda: obstore.get(self._store, key).bytes().to_bytes())
            except FileNotFoundError as error:
                if re.search(_NO_BUCKET, str(error)):
                    raise
                return None

    def list(self, prefix: str) -> list[str]:
        folder = check_folder(prefix)

        def names() -> Sequence[str]:
            return [
                entry["path"]
                for chunk in obstore.list(self._store, folder or None)
                for entry in chunk
            ]

        with self._errors(f"cannot list {folder!r}"):
            return sorted(name for name in self._retrying()(names) if is_key(name))

    def delete(self, key: str) -> None:
        with self._errors("cannot delete", check_key(key)), suppress(FileNotFoundError):
            self._retrying()(obstore.delete, self._store, key)

    @contextmanager
    def _errors(self, action: str, key: str = "") -> Iterator[None]:
        try:
            yield
        except (OSError, BaseError) as error:
            text = str(error)
            # S3 repeats a request whose signature is wrong, with the session token in it
            cause = None if "CanonicalRequest" in text else error
            raise StorageError(
                self.uri, key, f"{action}: {_reason(text)}", _advice(self.uri, text)
            ) from cause

    def _prove(self) -> None:
        """Prove that the store can be used: several puts of one name race, and only one may win.

        Raises StorageError if that fails, or if the store cannot be listed or written.
        """
        # No key begins with a dot, so `list` passes over this name.
        name = f".put-if-absent-{uuid.uuid4().hex}"
        begin = threading.Barrier(_RACERS, timeout=10)

        def put(number: int) -> bool:
            with suppress(threading.BrokenBarrierError):
                begin.wait()
            try:
                obstore.put(self._store, name, f"{number}".encode(), mode="create")
            except BaseError as error:  # there already, or too many at once for the store
                if not _may_pass(error):
                    raise
                return False
            return True

        with self._errors("cannot list"):
            self._retrying()(lambda: next(iter(obstore.list(self._store)), None))
        with self._errors("cannot write"):
            won = sum(side_by_side(put, range(_RACERS)))
        with self._errors("cannot delete"), suppress(FileNotFoundError):
            self._retrying()(obstore.delete, self._store, name)
        if won > 1:
            raise StorageError(
                self.uri,
                "",
                f"the store accepts {won} of {_RACERS} puts of one name at once, so it "
                + (
                    "ignores the header If-None-Match: *"
                    if won == _RACERS
                    else "looks first, and puts then"
                ),
                "Use a store, or a release of it, that knows conditional puts, or a database",
            )

    def _retrying(self) -> Retrying:
        return retries(self.uri, self._retry_seconds, _may_pass, lambda error: _reason(str(error)))


def open_bucket(uri: str, *, retry_seconds: float = 30.0, make: bool = True) -> ObjectStorage:
    """Open `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or `az://CONTAINER/PREFIX`.

    The bucket has to exist. Without `make` nothing is tried, and reading takes no permission to
    write.

    obstore takes credentials, region, endpoint and timeouts from the environment variables AWS_*,
    GOOGLE_* or AZURE_*, or from the role of the machine. For other sources of credentials, make the
    store with obstore and hand `ObjectStorage(uri, store)` to the coordinator.

    Raises StorageError if the store cannot be listed and written, or if it ignores the condition of
    a put, as some stores do that call themselves S3-compatible. Two drivers could then overwrite
    each other's records.
    """
    address = address_of_bucket(uri)
    try:
        store = from_url(uri, retry_config={"max_retries": 0})
    except (BaseError, ValueError) as error:
        text = str(error)
        raise StorageError(
            uri, "", f"cannot be opened: {_reason(text)}", _advice(uri, text) or _form(uri)
        ) from error
    storage = ObjectStorage(address, store, retry_seconds=retry_seconds)
    if make:
        storage._prove()
    return storage


def address_of_bucket(uri: str) -> str:
    """Return the URI of the storage. Raises StorageError for parts that do not belong in it."""
    parts = urlsplit(uri)
    if "@" in uri or parts.query or parts.fragment:  # repeats nothing: it may hold a secret
        raise StorageError(
            f"{parts.scheme}://...",
            "",
            "a user, a '?' or a '#' is not allowed in the URI",
            _form(uri),
        )
    return uri.rstrip("/")


def _form(uri: str) -> str:
    scheme = uri.partition(":")[0]
    return (
        f"Write {_FORMS[scheme]}; credentials, region and endpoint come from the variables "
        f"{_VARIABLES[scheme]}"
    )


def _reason(text: str) -> str:
    """Return what obstore says, without its appendix.

    Of an XML or HTML answer, only the code and the message are kept.
    """
    text = text.partition("\n\nDebug source")[0]
    said, _, body = text.partition("<")
    answer = [
        match[1] for tag in ("Code", "Message") if (match := re.search(rf"<{tag}>([^<\n]*)", body))
    ]
    return " ".join((said + ": ".join(answer)).split())


def _may_pass(error: BaseException) -> bool:
    """Tell whether to ask again after an error.

    That includes the error that there is a value although there is none, because S3 wants the
    request to be repeated then.
    """
    return isinstance(error, AlreadyExistsError) or (
        isinstance(error, BaseError) and re.search(_PASSING, _reason(str(error))) is not None
    )


def _advice(uri: str, text: str) -> str:
    variables = _VARIABLES.get(uri.partition(":")[0])
    advice = next(
        (advice for pattern, advice in _CLOUD_ADVICE if variables and re.search(pattern, text)), ""
    )
    return advice.format(variables)
