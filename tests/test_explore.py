"""Pages of ``vt-dagster explore``: what they show, their limits, who may read them, their escaping."""

from __future__ import annotations

import json
import random
import re
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pyspark.sql.types as T
import pytest
from deltalake import CommitProperties, Schema
from deltalake.schema import Field, PrimitiveType
from deltalake.transaction import AddAction, create_table_with_add_actions
from starlette.testclient import TestClient

from tests.log_writer import MICROS, LogWriter, document, moment
from tests.market import Market
from vt_dagster import FilesSource, SessionWindow, SlidingWindow, Stream, VersionedTable
from vt_dagster.cli import main
from vt_dagster.errors import StorageError
from vt_dagster.explore import app, key_history, lateness_curves, table_diff
from vt_dagster.explore.app import application
from vt_dagster.explore.warehouse_overview import came_late
from vt_dagster.provenance import lateness
from vt_dagster.provenance.explain import explain
from vt_dagster.provenance.explain_request import Explanation, Log, Record
from vt_dagster.storage.arrow_reader import look_up
from vt_dagster.topology.durations import as_time
from vt_dagster.topology.model import with_settings
from vt_dagster.topology.specification import FilterSpec

pytestmark = pytest.mark.usefixtures("few_rows")

EVIL = "<script>alert('k')</script>\"&"


def client(warehouse: Path | str, **about: Any) -> TestClient:
    about = {"base_url": "http://127.0.0.1:3001", **about}
    return TestClient(application(str(warehouse)), **about)


@pytest.fixture(scope="module")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prices of two runs, the second with a late record; and a stream whose values are HTML markup."""
    root = tmp_path_factory.mktemp("explore")
    prices = LogWriter(root)
    prices.run([("apple", "1", 0), ("pear", "9", 5), ("apple", "3", 20)], recorded=100)
    prices.run([("apple", "2", 10), ("pear", None, 30)], recorded=200)
    again = LogWriter(root, "prices_new")
    again.run([("apple", "1", 0), ("pear", "9", 5), ("apple", "4", 20)], recorded=100)
    again.run([("apple", "2", 10), ("pear", None, 30)], recorded=200)
    evil = LogWriter(root, "evil", kind="stream")
    evil.run([(EVIL, EVIL, 0)], recorded=100)
    return root


# ----------------------------------------------------------------------------------- who is answered


def test_foreign_host_header_is_refused(warehouse: Path) -> None:
    """Another name in the Host header belongs to a site whose DNS name points here (DNS rebinding)."""
    pages = client(warehouse)
    for host in ("127.0.0.1:3001", "localhost:3001", "[::1]:3001", "localhost"):
        assert pages.get("/", headers={"host": host}).status_code == 200, host
    for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:3001", "", "localhost:3001@x"):
        refused = pages.get("/table/prices", headers={"host": host})
        assert refused.status_code == 421, host
        assert "apple" not in refused.text


def test_only_get_and_head_are_allowed(warehouse: Path) -> None:
    pages = client(warehouse)
    before = sorted(warehouse.rglob("*"))
    for method in ("post", "put", "patch", "delete", "options"):
        assert getattr(pages, method)("/").status_code == 405, method
    assert pages.head("/").status_code == 200
    for page in ("/", "/table/prices", "/key/prices?key=apple", "/row/prices?offset=0:0"):
        assert pages.get(page).status_code == 200
    assert sorted(warehouse.rglob("*")) == before


def test_shown_values_are_escaped(warehouse: Path) -> None:
    """Values, keys and typed text are escaped, and no page contains an inline script."""
    pages = client(warehouse)
    asked = urlencode({"key": EVIL})
    for page in (
        "/table/evil",
        f"/table/evil?{urlencode({'find': EVIL})}",
        f"/table/evil?{urlencode({'around': EVIL})}",
        f"/key/evil?{asked}",
        f"/key/prices?{asked}",
        f"/key/prices?key=apple&{urlencode({'as_of': EVIL})}",
        f"/key/prices?key=apple&{urlencode({'known': EVIL})}",
        "/row/evil?offset=0:0",
        f"/row/prices?{urlencode({'offset': EVIL})}",
        f"/lateness/prices?{urlencode({'grace': EVIL})}",
        f"/lateness/prices?{urlencode({'at_most': EVIL})}",
        f"/compare?{urlencode({'one': 'prices', 'other': EVIL})}",
        f"/compare?{urlencode({'one': 'prices', 'other': 'prices', 'known_one': EVIL})}",
        f"/{EVIL}",
    ):
        answer = pages.get(page)
        assert answer.status_code in (200, 400, 404), page
        assert "<script>alert" not in answer.text, page
        assert not re.search(r"<script(?! src=)|\son\w+=|\sstyle=|javascript:", answer.text), page
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self';" in policy
        assert "unsafe" not in policy
    assert "&lt;script&gt;alert" in pages.get("/table/evil").text
    for page in ("/", "/static/explore.js", "/nothing"):
        assert pages.get(page).headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("/table/nothing", "expected one of"),
        ("/table/../prices/log", "expected"),
        ("/table/prices%2Flog", "expected one of"),
        ("/key/prices", "has the key"),
        ("/key/prices?key=a&key=b", "has the key"),
        ("/key/prices?key=apple&as_of=yesterday", "expected a time like"),
        ("/key/prices?key=apple&known=1999-01-01", "as_known_at at or after the first known commit"),
        ("/row/prices", "expected a key, an offset"),
        ("/row/prices?offset=0", "expected an offset as"),
        ("/table/prices?find=colour%3Dred", "expected column=value"),
        ("/table/prices?find=%22", "expected column=value"),
        ("/table/prices?find=offset%3Dx", "expected --key as a bigint"),
        ("/lateness/prices?grace=1h%3B", "expected lengths like"),
        ("/lateness/prices?grace=soon", "expected a length of time"),
        ("/lateness/prices?at_most=many", "expected a share"),
        ("/lateness/evil", "expected a join"),
        ("/compare?one=prices&other=evil", "expected the same columns"),
        ("/compare?one=prices&other=prices&known_other=x", "expected a time like"),
        ("/nothing", "expected GET and a page"),
    ],
)
def test_invalid_request_is_reported(warehouse: Path, page: str, said: str) -> None:
    answer = client(warehouse).get(page)
    assert answer.status_code in (400, 404)
    assert said in answer.text
    assert "Traceback" not in answer.text


# ------------------------------------------------------------------------------------ what is shown


def test_key_page_as_of_and_as_known_at(warehouse: Path) -> None:
    pages = client(warehouse)
    asked = {"key": "apple", "as_of": moment(15).isoformat()}
    now = pages.get("/key/prices", params=asked).text
    assert "True from 2024-01-01 00:10:00 to 2024-01-01 00:20:00," in now
    then = pages.get("/key/prices", params={**asked, "known": moment(150).isoformat()}).text
    assert "True from 2024-01-01 00:00:00 to 2024-01-01 00:20:00," in then
    assert "(not known then)" in then
    assert "(not known then)" not in now
    gone = pages.get("/key/prices", params={"key": "pear"}).text
    assert "It was deleted at 2024-01-01 00:30:00." in gone


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.endurance) for seed in range(2, 8))]
)
def test_key_page_equals_read(seed: int, tmp_path: Path, monkeypatch: Any) -> None:
    """A key's answer equals the rows of ``read`` for random records, whatever part of them is shown,
    and whatever the chunk size."""
    chance = random.Random(seed)
    monkeypatch.setattr(lateness, "CHUNK", chance.choice([3, 7, 1000]))
    monkeypatch.setitem(key_history.newest.__kwdefaults__, "most", 6)
    retention = timedelta(minutes=chance.choice([20, 10_000]))
    prices = LogWriter(tmp_path, retention=retention)
    for run in range(1, 4):
        records = [
            (chance.choice("ab"), None if chance.random() < 0.2 else str(n), chance.randrange(60))
            for n in range(8)
        ]
        prices.run(records, recorded=1000 * run)
    for _ in range(15):
        key, as_of = chance.choice("ab"), chance.choice([None] * 20 + [*range(-5, 70)])
        known = chance.choice([None, 1000, 1500, 2000, 3500])
        asked = None if known is None else moment(known).isoformat()
        about = (as_of, known, chance.choice([None, chance.randrange(60)]))
        micros = [None if one is None else MICROS + one * 60_000_000 for one in about]
        history = key_history.key_history(str(tmp_path), "prices", [key], *micros)
        answer = history.answer
        told = [] if answer is None or answer.record.is_tombstone else [answer]
        when = None if as_of is None else moment(as_of).isoformat()
        rows = look_up(str(tmp_path), "prices", None, [key], when, True, asked)
        read = [(row["v"], row["valid_to"]) for row in rows.to_pylist()]
        ends = [None if one.end is None else as_time(one.end) for one in told]
        assert [(o.record.values["v"], e) for o, e in zip(told, ends, strict=True)] == read, about
        every = look_up(str(tmp_path), "prices", "versions", [key], as_known_at=asked)
        versions = {(row["valid_from"], row["valid_to"]) for row in every.to_pylist()}
        spans = {(as_time(s.begin), s.end and as_time(s.end)) for s in history.spans}
        assert spans <= versions, about
        first = history.found.records[0].timestamp
        assert as_of is None or first <= moment(as_of) or not history.found.earlier, (
            "it is in the drawing"
        )
        assert len(history.found.records) <= 6
        shown = history.found.earlier + history.found.shown + history.found.later
        assert shown == history.found.count == look_up(str(tmp_path), "prices", "log", [key]).num_rows


def test_key_page_reports_omitted_rows(tmp_path: Path) -> None:
    prices = LogWriter(tmp_path)
    prices.run([("apple", str(n), n) for n in range(500)], recorded=1000)
    prices.run([("pear", str(n), n) for n in range(40)], recorded=1001)
    pages = client(tmp_path)
    page = pages.get("/key/prices?key=apple").text
    assert "200 of 500 records" in page
    assert "300 earlier" in page
    assert page.count('class="mark') == 200 + 5  # five in the legend
    listed = pages.get("/table/prices").text
    assert "50 of 540" in listed
    assert listed.count("<tr") == 50 + 1
    assert "50 of 500 that are there" in pages.get("/table/prices?find=k%3Dapple").text
    log = Log.open(str(tmp_path), "prices")
    some = key_history.newest(log, log.of_key(["apple"]), looked_at=100)
    assert (some.count, some.looked_at, some.of, some.whole) == (60, 100, 540, False)


def test_links_between_assets_with_key_prefix(tmp_path: Path) -> None:
    """Links between assets contain the assets' folders."""
    prices = LogWriter(tmp_path, "shop/eu/prices")
    prices.run([("apple", "1", 0)], recorded=1)
    made_by = FilterSpec(source="prices", predicate="v < 2")
    cheap = LogWriter(tmp_path, "shop/eu/cheap", made_by=made_by, logs={"prices": "log of prices"})
    cheap.run([("apple", "1", 0)], recorded=2)
    pages = client(tmp_path)
    assert 'href="/table/shop/eu/prices"' in pages.get("/table/shop/eu/cheap").text
    assert pages.get("/key/shop/eu/prices?key=apple").status_code == 200
    assert 'href="/row/shop/eu/prices?offset=0%3A0"' in pages.get("/row/shop/eu/cheap?offset=0:0").text


def test_record_search(warehouse: Path) -> None:
    page = client(warehouse).get("/table/prices", params={"find": "k=apple v='3'"}).text
    assert "1 of 1 that is there" in page
    assert '<a href="/row/prices?offset=0%3A2">0:2</a>' in page


def test_table_comparison(warehouse: Path) -> None:
    page = client(warehouse).get("/compare?one=prices&other=prices_new").text
    assert (
        "versions: 5 in the first, 5 in the second; 1 in the first alone, 1 in the second alone" in page
    )
    assert re.findall(r"<td class=differs>(\w)</td>", page) == ["4"]
    then = table_diff.Side("prices", moment(150).isoformat())
    known = table_diff.table_diff(str(warehouse), then, table_diff.Side("prices"))
    assert known.rows == (3, 5)
    assert known.only == (2, 4)  # two versions end earlier; a version and a tombstone are new


def test_truncated_stream_comparison(tmp_path: Path) -> None:
    whole = LogWriter(tmp_path, "whole", kind="stream")
    cut = {"batch": 0, "recorded_at": 0, "next_offset": {}, "log_retention": 60_000_000}
    rest = LogWriter(tmp_path, "rest", kind="stream", truncation=cut)
    for one in (whole, rest):
        one.run([("apple", "1", 0)], recorded=100)
        one.run([("apple", "2", 5)], recorded=200)
    then = table_diff.Side("rest", moment(150).isoformat())
    assert table_diff.table_diff(str(tmp_path), then, table_diff.Side("rest")).only == (0, 1)
    with pytest.raises(StorageError, match="rest: expected a stream with its whole log to compare"):
        table_diff.table_diff(str(tmp_path), table_diff.Side("whole"), table_diff.Side("rest"))


def test_oversized_page_suggests_command(warehouse: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(lateness_curves, "MOST", 4)
    monkeypatch.setattr(table_diff, "MOST", 4)
    pages = client(warehouse)
    assert "run vt-dagster lateness prices instead" in pages.get("/lateness/prices").text
    page = pages.get("/compare?one=prices&other=prices_new").text
    assert "run vt-dagster compare prices prices_new instead" in page


def test_lateness_page_has_row_per_length(warehouse: Path) -> None:
    page = client(warehouse).get("/lateness/prices?grace=10m").text
    rows = re.findall(r'<tr data-x="[\d.]+".*?>(?:<th scope="row">)([^<]+)</th>', page)
    assert rows[:3] == ["0 s", "10 min", "1 h"]
    assert "3,650 d (declared)" in rows
    assert re.findall(r'<svg class="at declared" x="([\d.]+)%">', page) == ["100.0"]
    with pytest.raises(StorageError, match="expected a join"):
        lateness_curves.lateness_curves(str(warehouse), "evil", [], None)


@pytest.mark.parametrize(
    ("values", "whole", "told"),
    [
        ([0.643, 0.1], False, ["0 %", "20 %", "40 %", "60 %", "80 %"]),
        ([1.0], False, ["0 %", "25 %", "50 %", "75 %", "100 %"]),
        ([0.0004], False, ["0 %", "0.01 %", "0.02 %", "0.03 %", "0.04 %"]),
        ([0.0], False, ["0 %", "25 %"]),
        ([11, 3], True, ["0", "5", "10", "15"]),
        ([3], True, ["0", "1", "2", "3"]),
        ([9], True, ["0", "3", "6", "9"]),
        ([4321], True, ["0", "2,000", "4,000", "6,000"]),
    ],
)
def test_axis_ticks_are_round(values: list[float], whole: bool, told: list[str]) -> None:
    axis = lateness_curves.Axis(values, whole)
    assert [text for _, text in axis.ticks] == told
    assert [axis.y(0), axis.ticks[-1][0]] == [lateness_curves.HEIGHT, 0]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0.1 + 0.2, "0.3"),
        (123.45678901234567, "123.457"),
        (1234567.891, "1234567.9"),
        (-0.000012345678, "-0.0000123457"),
        (1.23e-30, "1.23e-30"),
        (2.0, "2.0"),
        (float("nan"), "nan"),
        (12345678901234567, "12345678901234567"),
        (None, "null"),
        ("0.30000000000000004", "0.30000000000000004"),
        ("2024-01-01 10:00:00.25", "2024-01-01 10:00:00"),
        ("at 2024-01-01 10:00:00.25", "at 2024-01-01 10:00:00.25"),
    ],
)
def test_value_text(value: Any, told: str) -> None:
    assert key_history.value_text(value) == told
    assert key_history.exact_text(value) == ("" if told == str(value) or value is None else str(value))


def test_axis_labels_are_thinned(warehouse: Path) -> None:
    more = [f"{n}m" for n in range(1, 20)]
    curves = lateness_curves.lateness_curves(str(warehouse), "prices", more, None)
    assert len(curves.xs) == 31
    assert [x for x, _ in curves.labels] == curves.xs[::3]


def test_times_have_one_format_and_exact_title(tmp_path: Path) -> None:
    """Times have one form on each page, also those of records and runs at fractions of a second."""
    prices = LogWriter(tmp_path)
    exact, shown = "2024-01-01 00:00:07.500000", "2024-01-01 00:00:07"
    prices.run([("apple", exact, 0.125), ("apple", "2", 60)], recorded=100.125)
    pages = client(tmp_path)
    asked = {"as_of": "2024-01-01T00:30Z", "known": "2024-01-01T02:00:00.500+00:00"}
    for page in ("/", "/table/prices", "/key/prices?key=apple", "/row/prices?offset=0:0"):
        given = {"key": "apple", **asked} if page.startswith("/key") else None
        text = pages.get(page, params=given).text
        assert page == "/" or f'title="{exact}">{shown}<' in text
        text = re.sub("</tspan><tspan[^>]*>", " ", re.sub("<title>[^<]*</title>", "", text))
        text = re.sub("<[^>]*>", " ", text)
        others, found = re.subn(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?!\.\d|[+Z])", "", text)
        assert found
        assert re.findall(r".*\d\d:\d\d.*", others) == [], page


DAY = timedelta(days=1)
_ROW = T.StructType([T.StructField(name, T.StringType()) for name in ("k", "v")]).add(
    "timestamp", T.TimestampType()
)
_SALES, _PAID = (Stream(n, key="k", schema=_ROW, source=FilesSource(n)) for n in ("sales", "paid"))
_PRICES = VersionedTable(
    "prices", key="k", schema=_ROW, source=FilesSource("prices"), history_retention=DAY
)


def _windowed(window: Any) -> Any:
    return _SALES.group_by().windowed_by(window).count(name="counted")


@pytest.mark.parametrize(
    ("node", "why", "settings"),
    [
        (_windowed(SessionWindow(DAY)), "may merge two sessions", ["window.grace"]),
        (
            _windowed(SlidingWindow(DAY)),
            "the windows of a dropped record do not exist",
            ["window.grace"],
        ),
        (
            _SALES.left_join(_PRICES, name="priced", select=["left.*"], corrected_for=DAY),
            "A later run corrects each row that was joined too early",
            ["corrected_for", "grace_period"],
        ),
        (
            _SALES.left_join(_PAID, name="pairs", within=DAY, select=["left.v"], corrected_for=DAY),
            "is retracted when its match comes",
            ["corrected_for", "grace"],
        ),
        (
            _SALES.left_join(_PRICES, name="priced", select=["left.*"], as_known="when_recorded"),
            "left out on purpose",
            ["as_known"],
        ),
    ],
)
def test_page_explains_unsupported_lateness(
    tmp_path: Path, node: Any, why: str, settings: list[str]
) -> None:
    for name, kind in (("sales", "stream"), ("prices", "versioned")):
        LogWriter(tmp_path, name, kind=kind).run([("apple", "1", 0)], recorded=90)
    made = LogWriter(tmp_path, "made", kind="table", made_by=node.operator.specification)
    made.run([("apple", "1", 0)], recorded=100)
    pages = client(tmp_path)
    assert 'href="/lateness/made"' in pages.get("/table/made").text
    page = pages.get("/lateness/made")
    assert page.status_code == 200
    assert why in page.text
    tried = re.findall(r"vt-dagster what-if made --module MODULE --set ([\w.]+)=", page.text)
    assert tried == settings
    for setting in tried:  # what-if accepts the setting
        text = "when_recorded" if setting == "as_known" else "2h"
        with_settings(node, {setting: text})
    refused = "expected tumbling or hopping windows|is made by|expected a join without as_known"
    with pytest.raises(StorageError, match=refused):  # the command line gives no number either
        lateness_curves.lateness_curves(str(tmp_path), "made", [], None)


def test_late_counts_without_lateness_support() -> None:
    totals = {"in": 7, "late": 0, "late_records_dropped": 3, "corrections_too_late": 2}
    assert came_late(totals) == {
        "late records": 0,
        "records whose windows had closed": 3,
        "rows whose correction came too late: they are in quarantine": 2,
    }


def test_large_explanation_is_drawn_partly() -> None:
    part = explain_of("up", 1)
    many = explain_of("down", 0, [explain_of("up", n) for n in range(20)], 243)
    drawn = app.drawing(many)
    assert len(drawn.boxes) == 1 + app.WIDE
    assert drawn.left_out == 243 - app.WIDE
    assert len({(box.x, box.y) for box in drawn.boxes}) == len(drawn.boxes)
    twice = app.drawing(explain_of("down", 0, [part, explain_of("mid", 2, [part], 1)], 2))
    assert [box.asset for box in twice.boxes] == ["down", "up", "mid"]
    assert len(twice.lines) == 3


def explain_of(asset: str, offset: int, made_of: Any = (), count: int = 0) -> Explanation:
    record = Record(asset, 0, offset, moment(offset), moment(offset), False, {"k": "a"})
    return Explanation(asset, "source", record, made_of=tuple(made_of), made_of_in_all=count)


# --------------------------------------------------------------------------------- of a real warehouse


def test_every_page_of_real_warehouse(market: Market) -> None:
    """The test follows the links of all pages, up to 150 pages."""
    pages = client(market.warehouse)
    seen, ahead = set[str](), ["/"]
    while ahead and len(seen) < 150:
        page = ahead.pop(0)
        seen.add(page)
        answer = pages.get(page)
        assert answer.status_code == 200, (page, answer.text)
        for link in re.findall(r'href="(/[^"#]*)"', answer.text):
            link = link.replace("&amp;", "&")
            if link not in seen and link not in ahead and not link.startswith("/static"):
                ahead.append(link)
    kinds = {page.split("/")[1].split("?")[0] for page in seen}
    assert kinds >= {"", "table", "key", "row", "lateness", "compare"}


def test_key_page_lists_lookups_and_candidates(market: Market) -> None:
    log = Log.open(str(market.warehouse), "priced")
    record = next(one for one in log.records(lambda _: None) if one.values["price"] is not None)
    history = key_history.key_history(
        str(market.warehouse), "prices", [record.values["k"]], None, None, None
    )
    drawn = key_history.timeline_of_key(history, None)
    assert drawn is not None
    assert [lane.label for lane in drawn.lanes] == ["prices", "priced"]
    assert drawn.lanes[1].marks
    why = explain("priced", offset=record.place, warehouse=str(market.warehouse))
    bars = key_history.of_candidates(record, why.candidates)
    assert bars is not None
    assert [b.look for lane in bars.lanes for b in lane.bars].count("answer") == 1


# --------------------------------------------------------------------------------- ten million versions


def test_start_page_opens_no_data_file(tmp_path: Path) -> None:
    """The start page opens no data file: none exists; Delta's log alone describes 40 files."""
    types = {"k": "string", "timestamp": "timestamp", "partition": "integer", "offset": "long"}
    schema = Schema([Field(name, PrimitiveType(kind)) for name, kind in types.items()])
    rows, files = 250_000, 40
    adds = [
        AddAction(
            f"1-a/{n}.parquet",
            5_000_000,
            {},
            0,
            True,
            f'{{"numRecords": {rows}, "minValues": {{"partition": 0, "offset": {n * rows}}}, '
            f'"maxValues": {{"partition": 0, "offset": {(n + 1) * rows - 1}}}}}',
        )
        for n in range(files)
    ]
    said = document("prices", 1, MICROS, {0: rows * files}, {0: MICROS})
    about = CommitProperties(custom_metadata={"userMetadata": json.dumps({"vt_dagster": said})})
    path = str(tmp_path / "prices" / "log")
    create_table_with_add_actions(path, schema, adds, commit_properties=about)
    pages = client(tmp_path)
    page = pages.get("/")
    assert page.status_code == 200
    assert "10,000,000" in page.text
    assert "200.0 MB" in page.text


# -------------------------------------------------------------------------------------------- command


@pytest.mark.parametrize("place", ["nowhere", "a_file"])
def test_path_of_no_warehouse_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "a_file").touch()
    with pytest.raises(StorageError, match=f"directory of tables, got .*{place}.*; run an asset first"):
        application(str(tmp_path / place))
    assert "no table here yet" in client(tmp_path).get("/").text


def test_explore_command(
    warehouse: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints its address and answers there; a port in use is an error."""
    command = [str(Path(sys.executable).parent / "vt-dagster"), "explore", str(warehouse), "--port"]
    process = subprocess.Popen([*command, "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.match(r"http://127\.0\.0\.1:(\d+) shows", line)
        assert address is not None, line
        port = int(address.group(1))
        with socket.create_connection(("127.0.0.1", port), timeout=10) as opened:
            opened.sendall(b"GET / HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
            assert b"421" in opened.recv(100)
        monkeypatch.setattr(sys, "argv", [*command, str(port)])
        with pytest.raises(SystemExit) as taken:
            main()
        assert taken.value.code == 2
        assert "expected a free port on this machine" in capsys.readouterr().err
    finally:
        process.terminate()
        process.wait(20)
