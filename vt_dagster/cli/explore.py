"""``vt-dagster explore``: a local web page on a warehouse, without Spark."""

from __future__ import annotations

import socket
from importlib import import_module
from typing import Annotated, Any

import typer

from vt_dagster.errors import DefinitionsError

HOST = "127.0.0.1"


def explore(
    warehouse: Annotated[
        str,
        typer.Argument(help="Directory or URL of the tables.", envvar="VT_DAGSTER_WAREHOUSE"),
    ] = "data/warehouse",
    port: Annotated[int, typer.Option(help="Port on localhost; 0 = any free port.")] = 3001,
) -> None:
    """Serve a local web page on a warehouse: tables, a key's history, explanations, lateness. It is
    read-only and listens on localhost only."""
    try:
        # Imported here: an optional extra that takes seconds to import.
        application: Any = import_module("vt_dagster.explore.app").application
        uvicorn: Any = import_module("uvicorn")
    except ModuleNotFoundError as error:
        raise DefinitionsError(
            f"expected the packages of the extra 'explore', got no {error.name}: install "
            "vt-dagster[explore]"
        ) from None
    pages = application(warehouse)
    with socket.socket() as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            place.bind((HOST, port))
            place.listen()
        except (OSError, OverflowError) as error:
            raise DefinitionsError(
                f"expected a free port on this machine, got {port}: {error}; set another --port"
            ) from None
        typer.echo(f"http://{HOST}:{place.getsockname()[1]} shows {warehouse}; stop it with Ctrl+C")
        server = uvicorn.Server(uvicorn.Config(pages, log_level="warning", server_header=False))
        server.run(sockets=[place])
