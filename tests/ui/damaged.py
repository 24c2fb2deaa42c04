"""A small instance of the worked example: some days of two months consumed, a third landed, one table
damaged, and a week of weather that came a month late.

Run as a process of its own, with ``VT_DAGSTER_DATA`` and ``DAGSTER_HOME``: it starts Spark.
"""

from __future__ import annotations

SHOWN = ("weather", "flights", "airlines", "flights_with_weather")
DAMAGED = "airlines"
LATE = ("JFK", "2013-01-08", "2013-01-15")
"""The airport, and the days (the second exclusive) whose weather came with the next month's."""
DAYS = (*range(8, 15), 28)
"""Of each month, that have flights."""


def main() -> None:
    """Fills the instance."""
    import dagster as dg

    from assets.definitions import defs
    from assets.landing import LateWeather, write_landing
    from resources import LANDING, spark, warehouse
    from tests.few_flights import thin
    from vt_dagster.cli.run import run_checks
    from vt_dagster.orchestration.resources import session_of

    thin(DAYS)
    job = defs.resolve_job_def("main")
    quiet = {"loggers": {"console": {"config": {"log_level": "WARNING"}}}}
    with dg.DagsterInstance.get() as instance:
        for month in (1, 2):
            write_landing(LANDING, (month,), LateWeather(*LATE, month=1, lands=2))
            job.execute_in_process(
                instance=instance,
                run_config=quiet,
                asset_selection=[dg.AssetKey(name) for name in SHOWN],
            )
    write_landing(LANDING, (3,))
    path = f"{warehouse.path}/{DAMAGED}/view"
    rows = session_of(spark).read.format("delta").load(path)
    rows.union(rows.limit(3)).write.format("delta").mode("overwrite").save(path)
    assert any(found.stops for found in run_checks(defs, DAMAGED))


if __name__ == "__main__":
    main()
