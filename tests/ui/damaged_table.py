"""Damages a table of the worked example, and runs the checks of this and of another table, so that
pages show failed and passed checks.

Runs in a separate process, with ``VT_DAGSTER_DATA`` and ``DAGSTER_HOME``.
"""

from __future__ import annotations

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

CHECKED, DAMAGED = "flights_with_weather", "airlines"


def main() -> None:
    """Writes some rows twice, and runs the checks."""
    from assets.definitions import defs
    from resources import warehouse
    from vt_dagster.cli.run import run_checks

    path = f"{warehouse.path}/{DAMAGED}/view"
    rows = DeltaTable(path).to_pyarrow_table()
    write_deltalake(path, pa.concat_tables([rows, rows.slice(0, 3)]), mode="overwrite")
    assert not any(found.stops for found in run_checks(defs, CHECKED))
    assert any(found.stops for found in run_checks(defs, DAMAGED))


if __name__ == "__main__":
    main()
