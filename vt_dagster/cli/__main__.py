"""``python -m vt_dagster.cli``: the command."""

from vt_dagster.cli import main

main()
