"""Benchmarks of vt_dagster compared with its peers: ``make bench``, or ``python bench/run.py --quick``.

Prints a table and writes ``bench/results.json``. ``bench/README.md`` says what is compared and why.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import as_of_join
import corrections
import explore
import history_join
import incremental_run
import kafka_throughput
import operators
import plot
import processes
import snapshot_diff
import stream_join
import through_dagster
import upkeep
import versioned_put
from measure import Outputs, Result
from pyspark.sql import SparkSession

from vt_dagster.spark.session import build_session

RESULTS = Path(__file__).with_name("results.json")
CORES = 2


@dataclass(frozen=True)
class Sizes:
    """The number of rows of each benchmark."""

    stream: int
    versions: int
    tables: tuple[int, ...]
    keys: tuple[int, ...]
    new: int
    put: int
    operators: int
    topic: int


FULL = Sizes(
    stream=5_000_000,
    versions=1_000_000,
    tables=(100_000, 1_000_000, 10_000_000),
    keys=(100_000, 5_000_000),
    new=10_000,
    put=5_000_000,
    operators=1_000_000,
    topic=1_000_000,
)
QUICK = Sizes(
    stream=500_000,
    versions=100_000,
    tables=(10_000, 100_000),
    keys=(10_000, 500_000),
    new=10_000,
    put=500_000,
    operators=100_000,
    topic=100_000,
)
TINY = Sizes(
    stream=20_000,
    versions=4_000,
    tables=(2_000,),
    keys=(1_000, 2_000),
    new=500,
    put=20_000,
    operators=20_000,
    topic=5_000,
)


PARTS: dict[str, Callable[[SparkSession, Sizes, int, Outputs], tuple[list[Result], list[str]]]] = {
    "first-turn": lambda _, n, repeat, out: as_of_join.first_turn(n.stream, n.versions, repeat, out),
    "as-of-join": lambda s, n, repeat, out: as_of_join.run(s, n.stream, n.versions, repeat, out),
    "first-run": lambda s, n, repeat, out: incremental_run.first_run(s, n.operators, repeat, out),
    "incremental-run": lambda s, n, repeat, out: incremental_run.run(s, n.tables, n.new, repeat, out),
    "many-keys": lambda s, n, repeat, out: incremental_run.many_keys(s, n.keys, n.new, repeat, out),
    "put": lambda s, n, repeat, out: versioned_put.run(s, n.put, repeat, out),
    "snapshot": lambda s, n, repeat, out: snapshot_diff.run(s, n.put, repeat, out),
    "operators": lambda s, n, repeat, out: operators.run(s, n.operators, repeat, out),
    "stream-join": lambda s, n, repeat, out: stream_join.run(s, n.stream, repeat, out),
    "history": lambda s, n, repeat, out: history_join.run(s, n.operators, repeat, out),
    "corrections": lambda s, n, repeat, out: corrections.run(s, n.operators, repeat, out),
    "dagster": lambda s, n, repeat, out: through_dagster.run(s, n.operators // 4, repeat, out),
    "gates": lambda s, n, repeat, out: upkeep.gates(s, n.tables[0], n.new, repeat, out),
    "explore": lambda _, n, repeat, out: explore.run(n.tables[-1], repeat, out),
    "expiry": lambda s, n, repeat, out: upkeep.expiry(s, n.tables[:2], n.new, repeat, out),
}


def benchmarks(
    sizes: Sizes,
    repeat: int,
    kafka: bool = False,
    runs: int = 0,
    ticks: int = 0,
    only: Sequence[str] = (),
    executors: bool = False,
) -> tuple[list[Result], list[str]]:
    """Runs all benchmarks in one session. Instead, it can run those that need a Kafka broker, many runs
    of one table, or separate processes."""
    if ticks or executors:
        with tempfile.TemporaryDirectory(prefix="vt_dagster-bench-") as folder:
            outputs = Outputs(Path(folder))
            return (
                processes.run(repeat, ticks, outputs) if ticks else processes.executors(repeat, outputs)
            )
    spark = build_session(
        "vt_dagster bench", master=f"local[{CORES}]", conf={"spark.driver.memory": "4g"}
    )
    results: list[Result] = []
    notes: list[str] = []
    try:
        with tempfile.TemporaryDirectory(prefix="vt_dagster-bench-") as folder:
            outputs = Outputs(Path(folder))
            if kafka:
                return kafka_throughput.run(spark, sizes.topic, sizes.topic // 5, repeat, outputs)
            if runs:
                return upkeep.many_runs(spark, runs, 100, outputs)
            for part in only or PARTS:
                found, said = PARTS[part](spark, sizes, repeat, outputs)
                results += found
                notes += said
    finally:
        spark.stop()
    return results, notes


def table(results: Sequence[Result]) -> str:
    """The results as text, one line each."""
    head = ("what", "seconds", "peer", "seconds", "ratio", "target")
    lines = [head] + [
        (
            r.name,
            f"{r.seconds:.2f}",
            r.peer,
            f"{r.peer_seconds:.2f}",
            f"{r.ratio:.2f}x",
            "" if r.target is None else f"<= {r.target:g}x",
        )
        for r in results
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    numeric = {1, 3, 4, 5}
    return "\n".join(
        "  ".join(
            cell.rjust(w) if i in numeric else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Benchmarks of vt_dagster beside its peers.")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick",
        action="store_const",
        dest="sizes",
        const=QUICK,
        default=FULL,
        help="a tenth of the rows, about two minutes",
    )
    size.add_argument(
        "--tiny",
        action="store_const",
        dest="sizes",
        const=TINY,
        help="a few rows: only shows that everything runs and agrees",
    )
    parser.add_argument(
        "--kafka",
        action="store_true",
        help="those with topics instead: starts a broker, and Kafka Streams as a peer (needs a JDK)",
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=0,
        help="so many small runs of one table instead, the last ones beside the tenth (20 or more)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=0,
        metavar="TICKS",
        help="runs in processes of their own instead, and so many files that land with a daemon there",
    )
    parser.add_argument(
        "--executors",
        action="store_true",
        help="a run of three assets in one process instead, beside a process for each of them",
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=(), help="these parts alone")
    parser.add_argument(
        "--repeat",
        type=int,
        default=3,
        help="counted repetitions (default: 3); where it is 1, there is none before it",
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the JSON goes")
    options = parser.parse_args(arguments)
    if options.repeat < 1:
        parser.error(f"--repeat must be 1 or more, got {options.repeat}")
    if options.runs and options.runs < 20:
        parser.error(f"--runs must be 20 or more, got {options.runs}")
    results, notes = benchmarks(
        options.sizes,
        options.repeat,
        options.kafka,
        options.runs,
        options.processes,
        options.only,
        options.executors,
    )
    print(table(results))
    print()
    print("\n".join(notes))
    print(f"load of this machine over the last 5 minutes: {os.getloadavg()[1]:.1f}")
    options.output.write_text(json.dumps([r.as_json() for r in results], indent=2) + "\n")
    plot.draw(results, options.output.with_suffix(".svg"))


if __name__ == "__main__":
    main()
