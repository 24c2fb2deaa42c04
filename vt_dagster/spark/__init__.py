"""The Spark session: jars, start and settings."""
