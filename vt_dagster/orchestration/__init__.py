"""What Dagster sees: assets, ops, types, checks, sensors, metadata."""
