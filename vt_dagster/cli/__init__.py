"""Query versioned tables, run and check assets, explain, correct and repair results."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup, TyperOption

from vt_dagster.errors import VtDagsterError

COMMANDS = {
    "conformance": "vt_dagster.conformance",
    "run": "vt_dagster.cli.run",
    "check": "vt_dagster.cli.run",
    "init": "vt_dagster.cli.setup",
    "demo": "vt_dagster.cli.tables",
    "get": "vt_dagster.cli.lookup",
    "history": "vt_dagster.cli.lookup",
    "explain": "vt_dagster.cli.explain",
    "explore": "vt_dagster.cli.explain",
    "lateness": "vt_dagster.cli.explain",
    "plan": "vt_dagster.cli.tables",
    "replay": "vt_dagster.cli.tables",
    "compare": "vt_dagster.cli.tables",
    "swap": "vt_dagster.cli.tables",
    "rebuild": "vt_dagster.cli.tables",
    "catalog": "vt_dagster.cli.tables",
    "erase": "vt_dagster.cli.tables",
    "restate": "vt_dagster.cli.tables",
    "spark": "vt_dagster.cli.setup",
    "class-archive": "vt_dagster.cli.class_archive",
    "what-if": "vt_dagster.cli.tables",
}
"""The module of each command: it has a function, or a group of commands, of the command's name. It is
imported when the command is used, because most import Spark or Dagster, which takes seconds."""


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        found = getattr(import_module(COMMANDS[cmd_name]), cmd_name.replace("-", "_"))
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            alone.command(cmd_name)(found)
            found = alone
        command = typer.main.get_command(found)
        command.name = cmd_name
        for one in (command, *getattr(command, "commands", {}).values()):
            _without_types_of_flags(one.get_params(ctx))
        return command

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types_of_flags(super().get_params(ctx))


def _without_types_of_flags(parameters: list[Any]) -> list[Any]:
    """A flag takes no value, but typer's help shows ``<bool>`` for it."""
    for one in parameters:
        if isinstance(one, TyperOption) and one.is_flag:
            one.metavar = ""
    return parameters


app = typer.Typer(cls=_Commands, help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False)


def _tell_version(requested: bool) -> None:
    if requested:
        typer.echo(f"vt-dagster {version('vt-dagster')}")
        raise typer.Exit


@app.callback()
def _about(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_tell_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: prints a VtDagsterError as a sentence, without a stack trace."""
    try:
        app()
    except VtDagsterError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from None
