"""What is used of other packages without their promise to keep it: all of it is listed, is there, and has a bound.

Spark and kafka-python have a module and a test of their own: `coordinator/spark/internals.py` with
`tests/spark/test_internals.py`, and `sinks/kafka/internals.py` with `tests/kafka/test_internals.py`.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from importlib.metadata import version
from types import CodeType

import pytest

from sinks._util.private_names import is_there
from tests.private_names import is_private, taken_from_others
from tests.test_structure import MODULES, ROOT

NAMES = {
    "deltalake": (
        "deltalake.DeltaTable.create_write_transaction(actions, mode, schema, partition_by, commit_properties)",
        "deltalake.DeltaTable.get_add_actions(flatten)",
        "deltalake.DeltaTable.transaction_version",
        "deltalake.transaction.AddAction(path, size, partition_values, modification_time, data_change, stats)",
    ),
    "pgpq": (
        "pgpq.ArrowToPostgresBinaryEncoder.finish",
        "pgpq.ArrowToPostgresBinaryEncoder.write_batch",
        "pgpq.ArrowToPostgresBinaryEncoder.write_header",
    ),
    "pyiceberg": (
        "pyiceberg.avro.decoder.new_decoder",
        "pyiceberg.avro.encoder.BinaryEncoder",
        "pyiceberg.avro.resolver.construct_writer",
        "pyiceberg.avro.resolver.resolve_reader(file_schema, read_schema, read_types)",
        "pyiceberg.catalog.rest.Session",
        "pyiceberg.catalog.rest.auth.requests.post",
        "pyiceberg.io.pyarrow._dataframe_to_data_files",
        "pyiceberg.io.pyarrow.data_file_statistics_from_parquet_metadata",
        "pyiceberg.manifest.data_file_with_partition",
        "pyiceberg.table.Table._do_commit(updates, requirements)",
        "pyiceberg.table.Transaction._requirements",
        "pyiceberg.table.Transaction._updates",
        "pyiceberg.utils.concurrent.ExecutorFactory._instance",
    ),
    "PyMySQL": (
        "pymysql.connections.Connection._auth_plugin_name",
        "pymysql.connections.Connection._create_ssl_ctx(sslp)",
        "pymysql.connections.Connection._execute_command(command, sql)",
        "pymysql.connections.Connection._process_auth(plugin_name, auth_packet)",
        "pymysql.connections.Connection._read_packet",
        "pymysql.connections.Connection._read_timeout",
        "pymysql.connections.Connection._secure",
        "pymysql.connections.Connection._sock",
        "pymysql.connections.Connection.write_packet(payload)",
        "pymysql.protocol.OKPacketWrapper",
    ),
}
"""By package. Names that replace others, such as a `Session` with a timeout, are among them."""

TAKEN = {
    "coordinator/spark/internals.py": {"_gateway", "_jdf", "_jsparkSession"},
    "sinks/iceberg/sink.py": {
        "_dataframe_to_data_files",
        "_do_commit",
        "_instance",
        "_requirements",
        "_updates",
    },
    "sinks/mysql/load.py": {"_execute_command", "_read_packet"},
    "sinks/testing/conformance.py": {"_run_exitfuncs"},
    "sinks/testing/driver.py": {"_exit"},
    "sinks/testing/table_suite.py": {"_server", "_target"},
}
"""By file, the names with an underscore that it takes from other packages, or from Python itself. The suite of tables
takes two from the sinks that it tests."""

BASES = ("deltalake", "kafka", "psycopg", "pyiceberg", "pymysql", "requests", "sqlalchemy")
"""Packages whose classes sinks derive from, or may."""

_REPLACE = "_replace"
"""Of named tuples, where Python documents it."""


def bounds() -> dict[str, str]:
    """By package with an upper bound, what `pyproject.toml` asks for."""
    text = (ROOT / "pyproject.toml").read_text()
    return dict(re.findall(r'"([\w-]+)(?:\[[^]]*\])?(>=[\w.]+,<[\w.]+)"', text))


@pytest.mark.parametrize("name", [name for names in NAMES.values() for name in names])
def test_it_is_there(name: str) -> None:
    assert is_there(name), f"the package changed this: {name}"


@pytest.mark.parametrize("package", [*NAMES, "kafka-python", "pyspark"])
def test_the_package_has_a_bound_above_what_is_installed(package: str) -> None:
    asked = bounds()[package]
    most = [int(part) for part in asked.partition("<")[2].split(".")]
    installed = [int(part) for part in version(package).split(".")[: len(most)]]
    assert installed < most, f"{package} {version(package)} is not {asked}"


def test_no_other_name_is_taken() -> None:
    found = {}
    for path in MODULES.values():
        if names := set(taken_from_others(path)) - {_REPLACE}:
            found[str(path.relative_to(ROOT))] = names
    assert found == TAKEN


# ---------------------------------------------------------------------- classes that derive from others'
def private_names_of(kind: type) -> set[str]:
    """What a class defines or uses. Instances have some that only a method names."""
    names = set(vars(kind))
    for member in vars(kind).values():
        function = inspect.unwrap(getattr(member, "__func__", getattr(member, "fget", member)))
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            names |= set(code.co_names)
    return {name for name in names if is_private(name)} - {"_abc_impl"}


def derived() -> Iterator[tuple[type, set[str]]]:
    """Each class of a sink that derives from another package's, with the private names that both use."""
    for module in sorted(name for name in MODULES if name.startswith("sinks.") and ".testing" not in name):
        for kind in vars(importlib.import_module(module)).values():
            if isinstance(kind, type) and kind.__module__ == module:
                bases = [base for base in kind.__mro__ if base.__module__.split(".")[0] in BASES]
                if bases:
                    yield kind, set().union(*map(private_names_of, bases)) & private_names_of(kind)


def test_what_a_class_shares_with_its_base_of_another_package_is_listed() -> None:
    listed = {re.split(r"[.(]", name.partition("(")[0])[-1] for names in NAMES.values() for name in names}
    found = {kind.__qualname__: shared for kind, shared in derived()}
    assert {"Connection", "_Transaction", "Session"} <= found.keys()
    assert {name for shared in found.values() for name in shared} <= listed
