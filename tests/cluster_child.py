"""``python -m tests.cluster_child ADDRESS FOLDER``: runs worked scenarios, and real tables, on a Spark.

ADDRESS is a Spark master or a Spark Connect address. FOLDER has the landed files of
``storage/chain.py``. Prints one line for each result.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.storage.chain import Chain
from tests.storage.topology import Topology, land_first, land_second
from vt_dagster.conformance.runner import run
from vt_dagster.spark.session import build_session

WORKED = Path(__file__).parent / "conformance" / "worked"


def main(address: str, folder: Path) -> None:
    conf = {"spark.sql.shuffle.partitions": "2", "spark.executor.memory": "1g"}
    if address.startswith("sc://"):
        spark = build_session(remote=address, conf={"spark.sql.shuffle.partitions": "2"})
    else:
        spark = build_session(master=address, conf=conf)
    topology = Topology(folder)
    for land in (land_first, land_second):
        land(topology)
        for name in ("rates", "orders", "priced"):
            topology.run(name, spark)
    for name in ("rates", "orders", "priced"):
        print(name, topology.tables(name, spark))
    chain = Chain(folder)
    chain.run(spark)
    print("chain", chain.tables(spark))
    report = run([WORKED], None, "run", None, spark=spark, echo=lambda line: None)
    print(list(report.lines())[-1])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
