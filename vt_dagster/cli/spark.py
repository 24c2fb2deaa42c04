"""``vt-dagster spark``: a Spark server on this machine, for frequent runs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from vt_dagster.errors import SparkUnavailableError
from vt_dagster.spark import server
from vt_dagster.spark.jars import JARS_ENV, resolve_jars, resolve_maven_jars
from vt_dagster.spark.session import FEW_QUERIES

Master = Annotated[str, typer.Option(help="The Spark master of the server.")]
Conf = Annotated[
    list[str] | None, typer.Option(help="A Spark setting, name=value; repeat it for more.")
]

spark = typer.Typer(
    help="A Spark server on this machine: runs connect to it instead of starting their own JVM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@spark.command()
def start(
    master: Master = "local[*]",
    conf: Conf = None,
    few_rows: Annotated[
        bool,
        typer.Option(
            "--few-rows", help="Warms up faster; slower for runs of more than a million records."
        ),
    ] = False,
) -> None:
    """Start the server if it is not running; runs use it if VT_DAGSTER_SPARK=server is set."""
    settings = {**(FEW_QUERIES if few_rows else {}), **_settings(conf)}
    there = server.running()
    _tell(there or server.start(master, settings), "was already running" if there else "started")


@spark.command()
def status() -> None:
    """Show whether the server is running; exits with 1 if it is not."""
    found = server.running()
    if found is None:
        typer.echo("no Spark server is running")
        raise typer.Exit(1)
    _tell(found, "is running")


@spark.command()
def stop() -> None:
    """Stop the server and all work that runs on it."""
    found = server.stop()
    stopped = None if found is None else f"stopped the Spark server, process {found.pid}"
    typer.echo(stopped or "no Spark server was running")


@spark.command()
def serve(
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on.")] = 15002,
    master: Master = "local[*]",
    conf: Conf = None,
) -> None:
    """Run a Spark Connect server in this process, for a container. Needs a token in
    SPARK_CONNECT_AUTHENTICATE_TOKEN, and a proxy with TLS before it."""
    server.serve(host, port, master, _settings(conf))


@spark.command()
def jars(
    to: Annotated[Path, typer.Option(help="The directory; created if missing.")],
    more: Annotated[
        list[str] | None,
        typer.Argument(help="More Maven coordinates, like org.apache.hadoop:hadoop-aws:3.5.0."),
    ] = None,
) -> None:
    """Copy the jars that Spark needs into a directory, for an image; set VT_DAGSTER_JARS there."""
    to.mkdir(parents=True, exist_ok=True)
    found = [*resolve_jars(), *(resolve_maven_jars(*more) if more else ())]
    for jar in found:
        shutil.copyfile(jar, to / jar.name)
    typer.echo(f"{len({jar.name for jar in found})} jars in {to}; to use them, set {JARS_ENV}={to}")


def _settings(conf: list[str] | None) -> dict[str, str]:
    found = dict[str, str]()
    for given in conf or ():
        name, equals, value = given.partition("=")
        if not equals:
            raise SparkUnavailableError(f"Expected --conf name=value, got {given!r}.")
        found[name] = value
    return found


def _tell(found: server.Server, what: str) -> None:
    typer.echo(
        f"the Spark server {what}: process {found.pid} on {found.master}, localhost:{found.port}, "
        f"log {found.log}"
    )
    if os.environ.get(server.NAMED) != server.SERVER:
        typer.echo(
            f"to use it, set {server.NAMED}={server.SERVER}, or SparkResource(remote={server.SERVER!r})"
        )
