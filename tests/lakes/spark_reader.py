"""A process with a Spark of its own: `python -m tests.lakes.spark_reader delta|iceberg PLACE` reads a table, and to a
Delta table appends a row. Prints what it finds as JSON."""

from __future__ import annotations

import json
import sys

from benchmarks import spark
from benchmarks.lakes import DELTA_SPARK
from sinks.testing.servers.maven import maven_jars

ICEBERG_SPARK = "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0"


def main(kind: str, place: str) -> None:
    if kind == "delta":
        jars = [jar for jar in maven_jars(DELTA_SPARK) if jar.name.startswith(("delta-", "unitycatalog-"))]
        session = spark.session(
            jars,
            spark__sql__extensions="io.delta.sql.DeltaSparkSessionExtension",
            spark__sql__catalog__spark_catalog="org.apache.spark.sql.delta.catalog.DeltaCatalog",
            spark__databricks__delta__snapshotPartitions="2",
        )
    else:
        session = spark.session(maven_jars(ICEBERG_SPARK, transitive=False))
    print(session.version, file=sys.stderr)
    table = session.read.format(kind).load(place)
    found = {
        "ids": sorted(row.id for row in table.collect()),
        "by bounds": sorted(row.id for row in table.where("id >= 11 AND amount < 20.6").collect()),
        "by partition": sorted(row.id for row in table.where("name = 'user-20'").collect()),
    }
    if kind == "delta":
        row = session.createDataFrame([(900, "spark", 0.5)], "id BIGINT, name STRING, amount DOUBLE")
        row.write.format("delta").mode("append").save(place)
    session.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
