"""Job files: TOML or Python files that say which coordinator a job has.

The CLI and programs read them.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from coordinator.config import CheckpointConfig
from coordinator.coordinator import CheckpointCoordinator, refused_start
from coordinator.errors import CheckpointError
from coordinator.storage import StorageError
from coordinator.storage.uris import is_secret
from sinks.base import Sink, TwoPhaseCommitSink
from sinks.errors import ConfigurationError, ExactlyOnceError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SINKS = {
    "postgres": "sinks.postgres:PostgresSink",
    "mysql": "sinks.mysql:MySQLSink",
    "kafka": "sinks.kafka:KafkaSink",
    "sqlalchemy": "sinks.sqlalchemy:SqlAlchemySink",
    "delta": "sinks.delta:DeltaSink",
    "iceberg": "sinks.iceberg:IcebergSink",
    "files": "sinks.files:FileSink",
}
"""The sink classes that `type` names."""

_FUNCTIONS = ("transform", "value_serializer")
_SHOWN = ("job", "type", "name", "table", "topic")
_KEYS = ("job", "storage", "checkpointing", "sinks")
_VARIABLE = re.compile(r"\$\{([^}]*)\}")


class JobFileError(ExactlyOnceError):
    """A job file cannot be read or understood.

    The message names file, place and fix, and no value of a variable.
    """

    code = "EO-JOB-FILE"


def load_job(place: str) -> CheckpointCoordinator:
    """Return the coordinator of a job file.

    `place` is `FILE.toml`, `FILE.py:ATTRIBUTE` or `package.module:ATTRIBUTE`, where the attribute
    is a coordinator, or a function without arguments that returns a coordinator ("coordinator" if
    it is left out). This connects to nothing. Raises JobFileError, and StorageError if `storage` is
    no address of a storage.
    """
    if place.endswith(".toml"):
        return _from_toml(Path(place))
    if Path(place).exists() and not place.endswith(".py"):
        raise JobFileError(f"the job file {place} is neither FILE.toml nor FILE.py:ATTRIBUTE")
    return _from_python(place)


# ---------------------------------------------------------------------- TOML
def _from_toml(path: Path) -> CheckpointCoordinator:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JobFileError(
            f"cannot read the job file {path}: {error.strerror}. Name it by --job FILE or the "
            "variable COORDINATOR_JOB"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JobFileError(f"{path} is not TOML: {error}") from None
    document = _filled_in(document, str(path))
    _require_known(document, _KEYS, str(path))
    for key, kind in (("job", str), ("checkpointing", dict), ("sinks", list)):
        if key in document and not isinstance(document[key], kind):
            raise JobFileError(f"{path}: {key} has to be {_FORMS[key]}")
    if missing := [key for key in ("job", "sinks") if not document.get(key)]:
        raise JobFileError(
            f"{path} lacks {' and '.join(f'{key} ({_FORMS[key]})' for key in missing)}"
        )
    sys.path.insert(0, str(path.absolute().parent))
    try:
        sinks = [
            _sink(section, f"{path}, sink {at}") for at, section in enumerate(document["sinks"], 1)
        ]
        config = CheckpointConfig.from_dict(document.get("checkpointing", {}))
        return CheckpointCoordinator(document["job"], sinks, document.get("storage"), config)
    except (ValueError, TypeError) as error:
        raise JobFileError(f"{path}: {error}") from error
    finally:
        sys.path.remove(str(path.absolute().parent))


_FORMS = {
    "job": 'a text, job = "orders"',
    "checkpointing": "a section, [checkpointing]",
    "sinks": "sections, [[sinks]]",
}


def _sink(section: Any, where: str) -> Sink:
    if not isinstance(section, dict) or not isinstance(section.get("type"), str):
        known = ", ".join(f'"{name}"' for name in SINKS)
        raise JobFileError(f'{where} lacks type = {known} or "package.module:Class"')
    arguments = {key: value for key, value in section.items() if key != "type"}
    make = _class(section["type"], where)
    parameters = inspect.signature(make).parameters.values()
    for parameter in parameters:
        kind = getattr(parameter.annotation, "__name__", parameter.annotation)
        if parameter.name in arguments and kind in _OPTIONS:
            wanted, form = _OPTIONS[kind]
            if type(arguments[parameter.name]) is not wanted:
                raise JobFileError(f"{where}: {parameter.name} has to be {form}")
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        _require_known(
            arguments, [parameter.name for parameter in parameters], f"{where} ({section['type']})"
        )
    if "dead_letters" in arguments:
        arguments["dead_letters"] = _sink(arguments["dead_letters"], f"{where}, dead_letters")
    for name in _FUNCTIONS:
        if isinstance(arguments.get(name), str):
            arguments[name] = _attribute(arguments[name], f"{where}, {name}")
    try:
        return make(**arguments)
    except (ConfigurationError, TypeError, ValueError) as error:
        raise JobFileError(f"{where}: {error}") from None


_OPTIONS: dict[str, tuple[type, str]] = {
    "str": (str, "a text, in quotation marks"),
    "str | None": (str, "a text, in quotation marks"),
    "bool": (bool, "true or false, without quotation marks"),
    "int": (int, "a whole number, without quotation marks"),
    "Mapping[str, Any] | None": (dict, "a table, { key = value }"),
    "Mapping[str, str] | None": (dict, "a table, { key = value }"),
}
"""The type that a value has to have, by the annotation of the sink's parameter.

Sinks check the values of other parameters themselves.
"""


def _class(kind: str, where: str) -> type[Sink]:
    place = SINKS.get(kind, kind)
    if ":" not in place:
        near = get_close_matches(kind, SINKS, n=1)
        hint = (
            f"did you mean {near[0]!r}?"
            if near
            else f"there are {', '.join(SINKS)} and package.module:Class"
        )
        raise JobFileError(f"{where}: there is no type {kind!r}; {hint}")
    sink_class = _attribute(place, where)
    if not (isinstance(sink_class, type) and issubclass(sink_class, TwoPhaseCommitSink)):
        raise JobFileError(f"{where}: {kind} is no subclass of sinks.TwoPhaseCommitSink")
    return sink_class


def _filled_in(value: Any, where: str) -> Any:
    """Replace `${NAME}` in every string, at any depth, by the environment variable.

    `$${` stands for `${`.
    """
    if isinstance(value, dict):
        return {key: _filled_in(item, f"{where}, {key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_filled_in(item, f"{where} {at}") for at, item in enumerate(value, 1)]
    if not isinstance(value, str):
        return value

    def variable(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise JobFileError(f"{where}: the environment variable {match[1]!r} is not set")
        if (key := where.rpartition(", ")[2]) in _SHOWN and is_secret(match[1]):
            raise JobFileError(
                f"{where}: {match[1]!r} seems to be a secret, and {key} is shown in logs and "
                "records"
            )
        return os.environ[match[1]]

    return "${".join(_VARIABLE.sub(variable, part) for part in value.split("$${"))


def _require_known(given: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    known = list(known)
    for key in given:
        if key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise JobFileError(f"{where}: unknown key {key!r}; {hint}")


# ---------------------------------------------------------------------- Python
def _from_python(place: str) -> CheckpointCoordinator:
    job = _attribute(place, "job", default="coordinator")
    if callable(job) and not isinstance(job, CheckpointCoordinator):
        with _failing(f"job: {place}"):
            job = job()
    if not isinstance(job, CheckpointCoordinator):
        raise JobFileError(
            f"{place} is neither a CheckpointCoordinator nor a function that returns one: {job!r}"
        )
    return job


def _attribute(place: str, where: str, default: str = "") -> Any:
    """Return the object that `FILE.py:NAME` or `package.module:NAME` stands for."""
    module_name, _, name = place.partition(":")
    name = name or default
    if not module_name or not name:
        raise JobFileError(f"{where}: write FILE.py:NAME or package.module:NAME, not {place!r}")
    if module_name.endswith(".py") and not Path(module_name).is_file():
        raise JobFileError(f"{where}: there is no file {module_name}")
    starts = JobFileError(
        f"{where}: {module_name} starts its query when it is imported: put what follows the "
        'coordinator below if __name__ == "__main__":'
    )
    token = refused_start.set(starts)
    try:
        with _failing(f"{where}: cannot import {module_name}"):
            module = _module(module_name)
    finally:
        refused_start.reset(token)
    try:
        return getattr(module, name)
    except AttributeError:
        near = get_close_matches(name, dir(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise JobFileError(f"{where}: {module_name} has no {name!r}{hint}") from None


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """Turn any error of the user's code in the block into a JobFileError.

    The message is one line, with the place in the user's code.
    """
    try:
        yield
    except (CheckpointError, StorageError, JobFileError):
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [
            each
            for each in frames
            if each.filename != __file__ and not each.filename.startswith("<frozen")
        ]
        place = f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""
        raise JobFileError(f"{what}: {type(error).__name__}: {error}{place}") from error


def _module(name: str) -> Any:
    """Import a module as a program in its folder (or in the current one) would."""
    if not name.endswith(".py"):
        with _on_path(os.getcwd()):
            return importlib.import_module(name)
    path = Path(name).absolute()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    with _on_path(str(path.parent)):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _on_path(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
