"""The demo's questions about its results: explain, lateness and what-if."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import typer

from resources import warehouse
from vt_dagster.cli import app

Say = Callable[[str], None]
ALLOWED = "1%"
"""The share of hours that may lack flights or change."""


def why(title: str, asset: str, partition: int, offset: int, say: Say) -> None:
    """Explains a row down to the files that it came from."""
    say(f"\nWhy this result? {title}")
    _ask(say, "explain", asset, "--offset", f"{partition}:{offset}", "--most", "2")


def what_else(say: Say) -> None:
    """Shows the cost of other grace periods of the hours, and how CI reacts to a change to six."""
    hours = "departures_so_far"
    say("\nWhich grace period? How many hours would lack flights")
    _ask(say, "lateness", hours, "--grace", "0s,1h,3h,6h,12h", "--at-most", ALLOWED)
    say("\nWhat if it were six hours? In a CI, this step fails where more than the budget changes")
    change = ["--module", "assets.topology", "--set", "window.grace=6h"]
    code = _ask(say, "what-if", hours, *change, "--budget", ALLOWED)
    say(f"  exit code {code}: {'the step fails' if code else 'the step passes'}")


def _ask(say: Say, *arguments: str) -> int:
    """Runs ``vt-dagster`` in this process, and prints the command."""
    say(f"$ vt-dagster {shlex.join(arguments)}")
    command = typer.main.get_command(app)
    code: int = command.main(
        [*arguments, "--warehouse", warehouse.path], "vt-dagster", standalone_mode=False
    )
    return code
