"""SQL models in DuckDB on tables of vt_dagster; README.md explains the example."""
