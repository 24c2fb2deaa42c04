"""The web application: routes, pages, drawings, security headers, and the check of the Host header.

A page reads the warehouse by its query parameters and renders a template. The drawing of an explanation
has a box for each record, and lines to its inputs.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import reduce
from operator import and_
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import jinja2
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from vt_dagster.errors import StorageError, VtDagsterError, counted
from vt_dagster.explore import lateness_curves, table_diff
from vt_dagster.explore.key_history import (
    LOOKED_AT,
    exact_text,
    exact_time,
    key_history,
    newest,
    of_candidates,
    time_text,
    timeline_of_key,
    value_text,
)
from vt_dagster.explore.warehouse_overview import came_late, facts, overview, require_asset, runs
from vt_dagster.provenance.explain import explain
from vt_dagster.provenance.explain_request import Condition, Explanation, Log, Record, both
from vt_dagster.provenance.lateness import share
from vt_dagster.storage import delta
from vt_dagster.storage.arrow_reader import asset_names, of_key
from vt_dagster.topology.durations import epoch_micros, parse_time, spoken

DEEP, WIDE = 3, 6
"""Maximum number of upstream steps, and of inputs for each record."""
BOX, ROW, GAP = 232, 84, 56
_TITLE = 28


@dataclass
class Box:
    """A record with its position in the drawing.

    Args:
        asset: the asset's name.
        place: partition and offset, ``0:17``; empty = there is no such row.
        title: the asset's name, shortened.
        lines: the text in the box.
        more: the number of its inputs that are not drawn.
    """

    asset: str
    place: str
    title: str
    lines: Sequence[str]
    x: int
    y: float = 0.0
    more: int = 0


@dataclass
class Drawing:
    """Boxes, and the lines between them as SVG paths.

    ``left_out`` is the number of inputs that are not drawn.
    """

    boxes: list[Box] = field(default_factory=list[Box])
    lines: list[str] = field(default_factory=list[str])
    height: int = 0

    @property
    def width(self) -> int:
        return max((box.x for box in self.boxes), default=0) + BOX + 2

    @property
    def left_out(self) -> int:
        return sum(box.more for box in self.boxes)


def drawing(found: Explanation) -> Drawing:
    """Draws a row's explanation, with the inputs of each record to its right."""
    drawn, known = Drawing(), dict[tuple[str, str], Box]()
    _draw(found, 0, drawn, known)
    return drawn


def _draw(one: Explanation, depth: int, drawn: Drawing, known: dict[tuple[str, str], Box]) -> Box:
    place = "" if one.record is None else str(one.record.place)
    if place and (one.asset, place) in known:
        return known[one.asset, place]
    box = Box(one.asset, place, _short(one.asset), _lines(one, place), depth * (BOX + GAP) + 1)
    drawn.boxes.append(box)
    if place:
        known[one.asset, place] = box
    shown = one.made_of[:WIDE] if depth < DEEP else ()
    box.more = (one.made_of_in_all or len(one.made_of)) - len(shown)
    first = drawn.height
    below = [_draw(part, depth + 1, drawn, known) for part in shown]
    if drawn.height == first:
        drawn.height += ROW
    box.y = (first + drawn.height - ROW) / 2 + 1
    middle = (ROW - 16) / 2
    for other in below:
        x, y, end, down = box.x + BOX, box.y + middle, other.x, other.y + middle
        bend = (x + end) / 2
        drawn.lines.append(f"M{x} {y}C{bend} {y} {bend} {down} {end} {down}")
    return box


def _lines(one: Explanation, place: str) -> list[str]:
    if one.record is None:
        return ["there is no such row", one.operator]
    deleted = "deleted, " if one.record.is_tombstone else ""
    return [
        f"{deleted}{time_text(one.record.micros)}",
        _short(f"{place} · {', '.join(one.rules) or one.operator}"),
    ]


def _short(text: str) -> str:
    return text if len(text) <= _TITLE else f"{text[: _TITLE - 1]}…"


# Pages


NEWEST, MADE_OF = 50, 8
"""Maximum number of listed records, and of named inputs of a record."""
_LENGTH = re.compile(r"[0-9a-z. ]{1,40}")
_UTC = re.compile(r"(?<=\d\d:\d\d:\d\d)(\.\d{1,6})?(\+00:00)?")
"""The fraction of a second and the zone of a time in a text."""
_UNITS = ("B", "kB", "MB", "GB", "TB")


class Pages:
    """The pages for a warehouse.

    Args:
        warehouse: the directory or URL of the tables.
    """

    def __init__(self, warehouse: str) -> None:
        self._warehouse = warehouse
        folder = Path(__file__).with_name("templates")
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(folder), autoescape=True, undefined=jinja2.StrictUndefined
        )
        self._templates.filters |= _FILTERS
        self._templates.globals |= {"link": link, "row_link": row_link, "key_link": key_link}

    def page(self, template: str, status: int = 200, **shown: Any) -> Response:
        """Renders a template; values are escaped."""
        about = {"warehouse": self._warehouse, **shown}
        return HTMLResponse(self._templates.get_template(template).render(about), status)

    def start(self, request: Request) -> Response:
        """Shows all assets; reads only Delta's logs."""
        return self.page("start.html", assets=overview(self._warehouse), now=time.time() * 1e6)

    def table(self, request: Request) -> Response:
        """Shows an asset with its newest records, or the records that match a search."""
        name, query = self._name(request), request.query_params
        log = Log.open(self._warehouse, name)
        words = query.get("find", "").strip()
        condition = _conditions(log, words) if words else both()
        around = _moment(query.get("around"))
        # Without a search, the newest by time are among the last by arrival: reading a few is enough.
        enough = LOOKED_AT if words or around is not None else 20 * NEWEST
        found = newest(log, condition, around=around, most=NEWEST, looked_at=enough)
        return self.page(
            "table.html",
            facts=facts(self._warehouse, name),
            found=found,
            find=words,
            key=log.key,
            columns=_columns(log),
            now=time.time() * 1e6,
            around=query.get("around", ""),
        )

    def key(self, request: Request) -> Response:
        """Shows the history of a key, as of an event time and as known at a system time."""
        name, query = self._name(request), request.query_params
        key = query.getlist("key")
        as_of, known, around = (_moment(query.get(n)) for n in ("as_of", "known", "around"))
        found = key_history(self._warehouse, name, key, as_of, known, around)
        drawn, records = timeline_of_key(found, as_of), found.found.records
        return self.page(
            "key.html",
            name=name,
            key=key,
            history=found,
            drawn=drawn,
            spoken=[value_text(records[0].values[c]) for c in found.log.key] if records else key,
            runs=runs(self._warehouse, name),
            as_of=query.get("as_of", ""),
            moment=as_of,
            columns=_columns(found.log),
            known=known,
            known_text=query.get("known", ""),
        )

    def row(self, request: Request) -> Response:
        """Explains a row."""
        name, query = self._name(request), request.query_params
        key = query.getlist("key")
        found = explain(
            name,
            key=key or None,
            offset=query.get("offset"),
            at=query.get("at"),
            as_known_at=query.get("known") or None,
            warehouse=self._warehouse,
            most=MADE_OF,
        )
        record = found.record
        bars = None if record is None else of_candidates(record, found.candidates)
        log = Log.open(self._warehouse, name)
        return self.page(
            "row.html",
            name=name,
            found=found,
            upstream=drawing(found),
            drawn=bars,
            key=log.key,
            known=query.get("known", ""),
            known_at=_moment(query.get("known")),
            status=200 if record is not None else 404,
        )

    def lateness(self, request: Request) -> Response:
        """Shows the cost of other grace periods or history retentions, or why it is not known."""
        name, query = self._name(request), request.query_params
        known = facts(self._warehouse, name)
        if known.no_cost is not None:
            late = came_late(known.totals)
            return self.page("no_cost.html", facts=known, no_cost=known.no_cost, late=late)
        more = [one.strip() for one in query.get("grace", "").split(",") if one.strip()][:20]
        for one in more:
            if not _LENGTH.fullmatch(one):
                raise StorageError(f"expected lengths like 90m,2h, got {one[:40]!r}; correct them")
        at_most = query.get("at_most") or None
        return self.page(
            "lateness.html",
            name=name,
            costs=lateness_curves.lateness_curves(self._warehouse, name, more, at_most),
            grace=query.get("grace", ""),
            at_most=at_most or "",
            height=lateness_curves.HEIGHT,
        )

    def compare(self, request: Request) -> Response:
        """Compares two tables."""
        query, found = request.query_params, None
        one, other = query.get("one", ""), query.get("other", "")
        sides = [
            table_diff.Side(name, query.get(known) or None)
            for name, known in ((one, "known_one"), (other, "known_other"))
        ]
        if one and other:
            require_asset(self._warehouse, one)
            require_asset(self._warehouse, other)
            found = table_diff.table_diff(self._warehouse, *sides)
        return self.page(
            "compare.html",
            names=asset_names(self._warehouse),
            one=sides[0],
            other=sides[1],
            found=found,
        )

    def _name(self, request: Request) -> str:
        name = str(request.path_params["name"])
        require_asset(self._warehouse, name)
        return name


def _columns(log: Log) -> list[str]:
    """Returns the columns of a log that have values, without its key and timestamp."""
    names = log.head.shape.columns or ()
    return [c for c in names if c not in log.key and c.lower() != "timestamp"]


def _moment(text: str | None) -> int | None:
    return parse_time(text) if text and text.strip() else None


def _conditions(log: Log, words: str) -> Condition:
    """Returns the condition of a search like ``carrier=B6 flight=917``.

    Raises:
        StorageError: a word is not ``column=value``, or the log has no such column.
    """
    try:
        pairs = [one.partition("=") for one in shlex.split(words)]
    except ValueError:
        pairs = [(words, "", "")]
    for column, equals, _ in pairs:
        if not equals or column not in log.columns.names:
            raise StorageError(
                f"{log.name}: expected column=value of {log.columns.names}, got {words!r}; write each "
                "with its column, like carrier=B6"
            )
    return lambda columns: reduce(
        and_, [of_key(log.path, columns, [column], [value]) for column, _, value in pairs]
    )


# ------------------------------------------------------------------------------------------ addresses


def link(page: str, name: str = "", parameters: Mapping[str, Any] | None = None) -> str:
    """Returns the address of a page; empty parameters are left out."""
    given = [(k, v) for k, v in (parameters or {}).items() if v not in (None, "", [])]
    query = urlencode(given, doseq=True)
    path = f"/{page}/{quote(name)}" if name else f"/{page}"
    return f"{path}?{query}" if query else path


def row_link(asset: str, place: str, known: str = "") -> str:
    """Returns the address of a row's explanation."""
    return link("row", asset, {"offset": place, "known": known})


def key_link(record: Record, key: Any, **query: Any) -> str:
    """Returns the address of the history of a record's key."""
    values = [record.values.get(column) for column in key]
    values = [one.hex() if isinstance(one, bytes) else str(one) for one in values]
    return link("key", record.asset, {"key": values, **query})


# -------------------------------------------------------------------------------------------- filters


def _bytes(size: int) -> str:
    amount, unit = float(size), 0
    while amount >= 1000 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1000, unit + 1
    return f"{amount:,.0f} {_UNITS[unit]}" if unit == 0 else f"{amount:,.1f} {_UNITS[unit]}"


def _seconds(amount: float) -> str:
    """Returns a length of time in its two largest units."""
    rest, parts = round(amount), list[str]()
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        many, rest = divmod(rest, size)
        if many and len(parts) < 2:
            parts.append(f"{many:,} {unit}")
    return " ".join(parts) or "0 s"


def _grace(length: timedelta) -> str:
    """Returns a length to declare: one below a second is not 0."""
    short = timedelta(0) < length < timedelta(seconds=1)
    return spoken(length) if short else _seconds(length.total_seconds())


_FILTERS: dict[str, Any] = {
    "bytes": _bytes,
    "count": lambda n: f"{n:,}",
    "counted": counted,
    "seconds": _seconds,
    "grace": _grace,
    "time": lambda micros: "" if micros is None else time_text(micros),
    "utc": lambda micros: "" if micros is None else time_text(micros, exact=True),
    "date_and_time": lambda micros: [*time_text(micros).partition(" ")[::2]],
    "percent": lambda share: f"{share * 100:.6g}%",
    "stamp": lambda moment: time_text(epoch_micros(moment), exact=True),
    "share": share,
    "when": lambda moment: "" if moment is None else time_text(epoch_micros(moment)),
    "exact_when": lambda moment: "" if moment is None else exact_time(epoch_micros(moment)),
    "value": value_text,
    "exact": exact_text,
    "to_seconds": lambda text: _UTC.sub("", text),
    "without_zone": lambda text: text.replace("+00:00", ""),
}


# Application


HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""In each response: a page loads only files of this server, and runs no inline scripts."""
_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?")


class Guard:
    """Rejects requests whose Host is not this machine. A foreign site whose name resolves to this
    machine (DNS rebinding) sends its own name as Host."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(k.encode(), v.encode()) for k, v in HEADERS.items()]
            await send(message)

        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        app = self._app
        if len(hosts) != 1 or not _HOST.fullmatch(hosts[0]):
            app = PlainTextResponse("expected this machine's own name as Host: open 127.0.0.1\n", 421)
        await app(scope, receive, with_headers)


def application(warehouse: str) -> Starlette:
    """Returns the pages for a warehouse as an ASGI application.

    Args:
        warehouse: the directory or URL of the tables.

    Raises:
        StorageError: the path cannot be a warehouse, or is a local path without a directory.
    """
    asset_names(warehouse)
    fs, root = delta.filesystem(warehouse)
    if delta.is_local(fs) and not fs.isdir(root):
        raise StorageError(
            f"expected a directory of tables, got {warehouse!r}, which "
            f"{'is a file' if fs.exists(root) else 'does not exist'}; run an asset first, or name "
            "another directory"
        )
    pages = Pages(warehouse)

    def refused(request: Request, error: Exception) -> Response:
        """Returns the error page for an error of this library, with status 400."""
        return pages.page("error.html", 400, message=str(error))

    def missing(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        message = f"expected GET and a page, got {request.method} {request.url.path}"
        return pages.page("error.html", status, message=message)

    routes = [
        Route("/", pages.start),
        Route("/compare", pages.compare),
        Route("/table/{name:path}", pages.table),
        Route("/key/{name:path}", pages.key),
        Route("/row/{name:path}", pages.row),
        Route("/lateness/{name:path}", pages.lateness),
        Mount("/static", StaticFiles(directory=Path(__file__).with_name("static"))),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard)],
        exception_handlers={VtDagsterError: refused, HTTPException: missing},
    )
