"""Pictures in a materialization: what they show, and that they never fail a run."""

from __future__ import annotations

import base64
import re
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from pyspark.sql import DataFrame

from tests.market import Market, materialized, observed, record
from vt_dagster.core.processor import RunCounts
from vt_dagster.drawing import BLUE, RED
from vt_dagster.orchestration import metadata
from vt_dagster.orchestration.metadata import (
    LABELS,
    SHOWN_AT_ONCE,
    Lane,
    counts_text,
    histogram,
    lateness_text,
    sketch,
    timeline,
)
from vt_dagster.storage import parquet

HOUR = 3_600_000_000


def svg_of(markdown: str) -> ElementTree.Element:
    """The SVG picture in a piece of markdown."""
    found = re.fullmatch(r"!\[\w+\]\(data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)\)", markdown)
    assert found is not None, markdown[:100]
    return ElementTree.fromstring(base64.b64decode(found.group(1)))


def parts(svg: ElementTree.Element, tag: str) -> list[ElementTree.Element]:
    return svg.findall(f"{{http://www.w3.org/2000/svg}}{tag}")


def texts(svg: ElementTree.Element) -> list[str]:
    return [t.text or "" for t in parts(svg, "text")]


def test_timeline() -> None:
    lane = Lane(
        "<JFK>", [(0, 2 * HOUR, False), (2 * HOUR, None, True)], [(HOUR, True), (3 * HOUR, False)]
    )
    svg = ElementTree.fromstring(timeline([lane], "late", 243))
    assert "<JFK>" in texts(svg)
    assert "red: late" in texts(svg)
    assert "timestamp, UTC" in texts(svg)
    assert any("dots: 2 of 243 records of this run" in said for said in texts(svg))
    (first, second) = parts(svg, "rect")
    assert float(first.attrib["x"]) < float(second.attrib["x"])
    assert second.attrib["fill"] == "none"  # the bar of a deletion has no fill
    late, in_order = parts(svg, "circle")
    assert late.attrib["fill"] != in_order.attrib["fill"]
    assert float(late.attrib["cx"]) < float(in_order.attrib["cx"])


@pytest.mark.parametrize(
    ("seconds", "label"),
    [(0, "0"), (1, "< 1m"), (60, "< 10m"), (3_599, "< 1h"), (3_600, "< 6h"), (86_400 * 400, "more")],
)
def test_histogram(seconds: float, label: str) -> None:
    svg = ElementTree.fromstring(histogram([seconds] * 1_234, {"grace period": timedelta(hours=2)}))
    bars = [float(r.attrib["height"]) for r in parts(svg, "rect")]
    assert bars == [90.0 if name == label else 0.0 for name in LABELS]
    assert "1,234" in texts(svg)
    assert any("minutes, h: hours" in said and said.endswith(": records") for said in texts(svg))
    assert "grace period 2:00:00" in texts(svg)


def test_pictures_of_runs(market: Market) -> None:
    said = materialized(market.results[-1], "prices")
    line = svg_of(said["timeline"])
    assert {"a", "b"} <= set(texts(line))
    assert {c.attrib["fill"] for c in parts(line, "circle")} == {BLUE}
    assert parts(line, "rect")
    late = svg_of(said["lateness"])
    assert any("history retention 1 day" in text for text in texts(late))

    joined = materialized(market.results[-1], "priced")
    colours = {c.attrib["fill"] for c in parts(svg_of(joined["timeline"]), "circle")}
    assert RED in colours  # s4 arrived after the grace period
    assert any("grace period 1:00:00" in text for text in texts(svg_of(joined["lateness"])))
    assert "timeline" not in observed(market.results[-1], "rates")


@pytest.mark.parametrize("select", [["left.*", "right.v as price"], ["left.at as sold", "right.v"]])
def test_picture_of_corrected_join_without_key(
    market: Market, tmp_path: Path, select: list[str]
) -> None:
    """The result's key is the place of a record (partition and offset), not the table's key. The
    picture has the join's keys with the table's versions. If the result lacks that key, it has no
    versions."""
    copy = market.copy(tmp_path / "copy")
    join = copy.sales.left_join(
        copy.prices, name="corrected", select=select, corrected_for=timedelta(days=1)
    )
    result = copy.run([join])
    assert result.success
    logs = copy.instance.all_logs(result.run_id)
    assert not [e.user_message for e in logs if "no pictures" in e.user_message]
    line = svg_of(materialized(result, "corrected")["timeline"])
    by_key = {"a", "b"} <= set(texts(line))
    assert by_key == bool(parts(line, "rect")) == ("left.*" in select)


def test_summary_is_first_metadata_entry(market: Market) -> None:
    said = materialized(market.results[-1], "priced")
    first = ["at_a_glance", "records_in", "records_out", "records_late"]
    assert list(said)[:4] == first
    assert said["at_a_glance"] == (
        "records: 3 in + 1 waiting before = 2 applied + 1 late + 1 waiting; 3 out; rows now: 4; "
        "stream time: 2024-01-01 09:00 UTC"
    )
    names = list(said)
    order = ["stream_time", "at_a_glance_timeline", "timeline", "lateness", "dagster/uri", "positions"]
    assert [names.index(name) for name in order] == sorted(names.index(name) for name in order)
    assert "o: a record at its timestamp (UTC), X: late" in said["at_a_glance_timeline"]
    assert said["at_a_glance_lateness"].endswith("; grace period 1 hour")


def test_text_timeline() -> None:
    hour = HOUR
    lane = Lane(
        "JFK",
        [(-hour, hour, False), (hour, 30 * hour, True), (30 * hour, None, False)],
        [(0, False), (30 * hour, True), (59 * hour, False)],
    )
    told_by = sketch([lane], "late", 243).splitlines()
    assert told_by[0] == "```text"
    assert told_by[1].split() == ["1970-01-01", "00:00", "1970-01-03", "11:00"]
    assert told_by[2] == "JFK      o" + " " * 23 + "X" + " " * 24 + "o"
    assert told_by[3] == " " * 9 + "." * 24 + "|" + "-" * 25
    assert told_by[-1].startswith("3 of 243 records of this run.")


def test_text_timeline_size_is_bounded() -> None:
    """Dagster would show a text of 1,000 characters (UTF-16) only after a click on a link."""
    keys = ["a`b\n", "\U0001f6eb" * 40, "x" * 40, "z", "y", "w"]
    lanes = [
        Lane(key, [(n, n + 1, False) for n in range(60)], [(n, n % 2 == 0) for n in range(60)])
        for key in keys
    ]
    drawn = sketch(lanes, "out of order", 10**12)
    assert 600 < len(drawn.encode("utf-16-le")) // 2 <= SHOWN_AT_ONCE
    assert "a?b?" in drawn
    assert drawn.count("```") == 2
    assert " of 1,000,000,000,000 records" in drawn


def test_summary_lines() -> None:
    assert counts_text("1,234 in", None, None) == "records: 1,234 in"
    assert counts_text("0 in", 7, -(10**17)).endswith(
        "; rows now: 7; stream time: before the year 1 UTC"
    )
    limits = {"grace period": timedelta(hours=6)}
    assert lateness_text([0, 0, 70], limits, 3) == (
        "lateness of 3 records behind stream time: 0: 2, < 10m: 1; grace period 6 hours"
    )
    assert lateness_text([0], {}, 1) == "lateness of 1 record behind stream time: 0: 1"
    assert "lateness of 1 record: how far behind stream time they" in histogram([0], {}, 1)
    counts = RunCounts()
    dropped = {"dropped": 1, "late_records_dropped": 1, "expired_window_records_dropped": 2}
    assert counts.text({"in": 2, "out": 0, **dropped}) == (
        "2 in; 0 out, 1 dropped, 1 late record dropped, 2 expired window records dropped"
    )


def test_picture_of_many_files_and_records(
    market: Market, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = market.copy(tmp_path / "copy")
    monkeypatch.setattr(metadata, "SAMPLE", 100)

    def in_five_files(rows: DataFrame, count: int) -> DataFrame:
        return rows.repartitionByRange(5, "offset").sortWithinPartitions("offset")

    monkeypatch.setattr(parquet, "packed", in_five_files)
    hours = [record("a", f"h{n}", f"{3 + n // 24} {n % 24:02d}:00") for n in range(240)]
    copy.land("prices", "3.jsonl", *hours)
    said = materialized(copy.run([copy.prices]), "prices")
    assert len(metadata._files(str(copy.warehouse / "prices" / "log"), 3)) == 5
    late = svg_of(said["lateness"])
    assert "lateness of 80 of 240 records: how far behind stream time they arrived" in texts(late)
    line = svg_of(said["timeline"])
    assert any("dots: 30 of 240 records of this run" in text for text in texts(line))
    assert "30 of 240 records of this run." in said["at_a_glance_timeline"]
    assert said["at_a_glance_lateness"].startswith(
        "lateness of 80 of 240 records behind stream time: 0: "
    )
    # The timeline draws a sample of the records.
    places = [float(c.attrib["cx"]) for c in parts(line, "circle")]
    assert len(places) == 30


def test_sampled_records_are_spread_evenly() -> None:
    crowd = [(n, n in (7, 8)) for n in range(240)]
    shown = metadata._spread(crowd)
    assert len(shown) == 60
    assert {(7, True), (8, True)} <= set(shown)
    assert max(b[0] - a[0] for a, b in pairwise(shown)) <= 6
    svg = ElementTree.fromstring(timeline([Lane("x", [], shown, 240)], "late", 240))
    assert "60 of 240" in texts(svg)


def test_failing_picture_does_not_fail_run(
    market: Market, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no ink")

    copy = market.copy(tmp_path / "copy")
    monkeypatch.setattr(metadata, "_draw", broken)
    copy.land("prices", "3.jsonl", record("a", "p5", "2 06:00"))
    result = copy.run([copy.prices])
    assert result.success
    assert "timeline" not in materialized(result, "prices")
