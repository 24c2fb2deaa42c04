"""The Dagster layer: assets, ops, types, checks, sensors, metadata."""
