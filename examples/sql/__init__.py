"""SQL models in DuckDB on tables of vt_dagster; README.md says what to look at."""
