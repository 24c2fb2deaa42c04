"""The command ``vt-dagster``."""

from vt_dagster.cli.app import app, main

__all__ = ["app", "main"]
