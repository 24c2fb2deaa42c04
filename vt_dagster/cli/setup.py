"""``vt-dagster init`` creates a project, ``vt-dagster spark`` starts and stops a Spark server.

``init`` creates a runnable project from the templates in ``project``. The Spark server stays on this
machine, for frequent runs.
"""

from __future__ import annotations

import keyword
import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from vt_dagster.errors import DefinitionsError, SparkUnavailableError
from vt_dagster.spark import server
from vt_dagster.spark.jars import JARS_ENV, resolve_jars, resolve_maven_jars
from vt_dagster.spark.session import FEW_QUERIES
from vt_dagster.storage.delta import require_directory

# Project

_TEMPLATES = Path(__file__).with_name("project")
_PLACE = "NAME"
_NEXT = """\
{where} is a Dagster project: two sources in data/landing, a join, a check and a test.
  cd {where}
  make run     process the files in data/landing; starts a Spark server that later runs reuse
  make look    show a table's history and explain a row
  make test    run the project's test
  make check   run all checks on the committed tables
  make ui      open Dagster's UI on http://localhost:3000
  make stop    stop the Spark server
"""


def init(
    name: Annotated[str, typer.Argument(help="Name of the project, its directory and its package.")],
    yaml: Annotated[
        bool, typer.Option("--yaml", help="Declare tables in a defs.yaml, not in Python.")
    ] = False,
) -> None:
    """Create a project that runs at once, with data, a join, a check, a test and a Makefile."""
    _check(name)
    where = Path(name)
    require_directory(where)
    for folder in ("any", "yaml" if yaml else "python"):
        _write(_TEMPLATES / folder, where, name)
    typer.echo(_NEXT.format(where=where), nl=False)


def _check(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise DefinitionsError(
            "the name of a project must be a Python package name in lower-case letters, digits and _, "
            f"for example my_shop; got {name!r}: choose another name"
        )
    if Path(name).exists():
        raise DefinitionsError(
            f"expected a name that is free in {Path.cwd()}, got {name!r}, which already exists: "
            "choose another name, or remove it"
        )
    if find_spec(name) is not None:
        raise DefinitionsError(
            f"expected a name that no Python package has, got {name!r}, which can be imported here "
            "and would be hidden by the project: choose another name"
        )


def _write(template: Path, to: Path, name: str) -> None:
    """Writes a folder of templates, with the project's name for ``NAME`` in file names and texts."""
    to.mkdir(exist_ok=True)
    for one in template.iterdir():
        made = to / one.name.replace(_PLACE, name).removesuffix(".txt")
        if one.is_dir():
            _write(one, made, name)
        else:
            made.write_text(one.read_text(encoding="utf-8").replace(_PLACE, name), encoding="utf-8")


# Spark server

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
    _print_server(
        there or server.start(master, settings), "was already running" if there else "started"
    )


@spark.command()
def status() -> None:
    """Show whether the server is running; exits with 1 if it is not."""
    found = server.running()
    if found is None:
        typer.echo("no Spark server is running")
        raise typer.Exit(1)
    _print_server(found, "is running")


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
    require_directory(to)
    found = [*resolve_jars(), *(resolve_maven_jars(*more) if more else ())]
    for jar in found:
        shutil.copyfile(jar, to / jar.name)
    typer.echo(f"{len({jar.name for jar in found})} jars in {to}; to use them, set {JARS_ENV}={to}")


def _settings(conf: list[str] | None) -> dict[str, str]:
    found = dict[str, str]()
    for given in conf or ():
        name, equals, value = given.partition("=")
        if not equals or not name.strip():
            raise SparkUnavailableError(f"Expected --conf name=value, got {given!r}.")
        found[name] = value
    return found


def _print_server(found: server.Server, what: str) -> None:
    typer.echo(
        f"the Spark server {what}: process {found.pid} on {found.master}, localhost:{found.port}, "
        f"log {found.log}"
    )
    if os.environ.get(server.NAMED) != server.SERVER:
        typer.echo(
            f"to use it, set {server.NAMED}={server.SERVER}, or SparkResource(remote={server.SERVER!r})"
        )
