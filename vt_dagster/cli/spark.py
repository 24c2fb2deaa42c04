"""``vt-dagster spark``: a Spark server of this machine, for runs that start often."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from vt_dagster.errors import SparkUnavailableError
from vt_dagster.spark import server
from vt_dagster.spark.session import FEW_QUERIES

spark = typer.Typer(
    help="A Spark server of this machine: runs connect to it and start no JVM of their own.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@spark.command()
def start(
    master: Annotated[str, typer.Option(help="The Spark master that it computes on.")] = "local[*]",
    conf: Annotated[
        list[str] | None, typer.Option(help="A Spark setting, name=value; repeat it for more.")
    ] = None,
    few_rows: Annotated[
        bool,
        typer.Option(
            "--few-rows", help="Sooner warm, and slower with runs of more than a million records."
        ),
    ] = False,
) -> None:
    """Start it, if it is not there; runs use it where VT_DAGSTER_SPARK=server is set."""
    settings = dict(FEW_QUERIES if few_rows else {})
    for given in conf or ():
        name, equals, value = given.partition("=")
        if not equals:
            raise SparkUnavailableError(f"Expected --conf name=value, got {given!r}.")
        settings[name] = value
    there = server.running()
    _tell(there or server.start(master, settings), "was there already" if there else "started")


@spark.command()
def status() -> None:
    """Say whether it is there; the exit code is 1 where it is not."""
    found = server.running()
    if found is None:
        typer.echo("there is no Spark server")
        raise typer.Exit(1)
    _tell(found, "is there")


@spark.command()
def stop() -> None:
    """End it, and what is at work on it."""
    found = server.stop()
    typer.echo("there was none" if found is None else f"ended the Spark server, process {found.pid}")


def _tell(found: server.Server, what: str) -> None:
    typer.echo(
        f"the Spark server {what}: process {found.pid} on {found.master}, localhost:{found.port}, "
        f"log {found.log}"
    )
    if os.environ.get(server.NAMED) != server.SERVER:
        typer.echo(
            f"use it: {server.NAMED}={server.SERVER}, or SparkResource(remote={server.SERVER!r})"
        )
