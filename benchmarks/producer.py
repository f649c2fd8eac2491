"""What options change for KafkaSink, without Spark, in turns with its defaults:

    python -m benchmarks.producer '{"batch.size": 100000}' '{"compression.type": "lz4"}'
        [--rows 1000000] [--runs 10]

The table that is printed is Markdown.
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from statistics import median

import pyarrow as pa
import pyarrow.compute as pc

from benchmarks import direct
from benchmarks.bench import say, tell, working_folder
from benchmarks.measure import Contender, rounds, spread, table
from benchmarks.topic import JVM, PARTITIONS, SETTINGS, Topic
from sinks.kafka import KafkaSink
from sinks.testing.servers.kafka import KafkaServer


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.producer", description=__doc__)
    parser.add_argument(
        "options", nargs="*", type=json.loads, help="options of one contender, as JSON"
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument(
        "--runs", type=int, default=10, help="rounds that count, after one that does not"
    )
    arguments = parser.parse_args()
    numbers = pa.array(range(arguments.rows)).cast(pa.string())
    values = pc.binary_join_element_wise(
        '{"id":', numbers, ',"name":"user', numbers, '","amount":1.5}', ""
    )
    with ExitStack() as stack:
        server = stack.enter_context(KafkaServer(SETTINGS, jvm=JVM))
        topic = Topic(server, stack.enter_context(server.topic(PARTITIONS)), (0, 0))
        folder = working_folder(stack)
        contenders = []
        for number, options in enumerate([{}, *arguments.options]):
            sink = KafkaSink(
                server.bootstrap, topic.name, name=f"options-{number}", options=options
            )
            feeders = direct.Feeders(sink, pa.table({"value": values}), 1, folder)
            stack.callback(feeders.close)
            contenders.append(
                Contender(json.dumps(options), feeders.run, topic.clear, topic.settle)
            )
        rounds(contenders, arguments.runs, 1, tell, server.broker().pid)
    defaults, *_ = contenders
    lines = []
    for c in contenders:
        costs = [
            spread([cpu / arguments.rows * 1e6 for cpu in each]) for each in (c.processor, c.client)
        ]
        over = spread([b / a for a, b in zip(c.processor, defaults.processor, strict=True)])
        lines.append([c.name, spread(c.seconds), *costs, over, f"{median(c.load):.1f}"])
    say(
        table(
            [
                "options",
                "s",
                "CPU s per million",
                "client's",
                "the defaults' CPU s over its own",
                "load",
            ],
            lines,
        )
    )


if __name__ == "__main__":
    main()
