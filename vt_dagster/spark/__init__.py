"""The Spark session: its jars, its start, its settings."""
