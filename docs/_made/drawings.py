"""The pictures of the concepts, drawn of bars, dots and arrows."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from timeline import AMBER, GREEN, svg, text

from vt_dagster.drawing import BLUE, GREY, RED

W, LEFT, HOUR = 860, 150, 115


def x(hour: float) -> float:
    """Of a time between 9:30 and 15:30."""
    return LEFT + (hour - 9.5) * HOUR


def bar(start: float, end: float, y: float, said: str, colour: str = AMBER, empty: bool = False) -> str:
    fill = "none" if empty else colour
    return (
        f'<rect x="{x(start):.1f}" y="{y}" width="{(end - start) * HOUR - 2:.1f}" height="22" '
        f'fill="{fill}" fill-opacity="0.3" stroke="{colour}"/>'
        + text(x((start + end) / 2), y + 15, said, "middle")
    )


def dot(hour: float, y: float, said: str, colour: str = BLUE, hollow: bool = False) -> str:
    fill = "none" if hollow else colour
    return (
        f'<circle cx="{x(hour):.1f}" cy="{y}" r="5" fill="{fill}" stroke="{colour}" '
        'stroke-width="1.5"/>' + text(x(hour) + 10, y + 4, said)
    )


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str = GREY) -> str:
    vertical = abs(x2 - x1) < abs(y2 - y1)
    back = -6 if (y2 > y1 if vertical else x2 > x1) else 6
    head = f"l-4 {back}h8z" if vertical else f"l{back} -4v8z"
    return (
        f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}" fill="none"/>'
        f'<path d="M{x2:.1f} {y2:.1f}{head}" fill="{colour}"/>'
    )


def hours(
    bottom: float, some: Iterable[int] = range(10, 16), about: str = "timestamp, hours:minutes"
) -> str:
    return text(4, 14, about, colour=GREY) + "".join(
        f'<path d="M{x(h)} 20V{bottom}" stroke="{GREY}" stroke-opacity="0.25"/>'
        + text(x(h), 14, f"{h}:00", "middle", GREY)
        for h in some
    )


def label(y: float, *said: str) -> str:
    return "".join(text(4, y + 14 * n, one, colour=GREY) for n, one in enumerate(said))


def versions() -> str:
    drawn = [
        hours(150),
        label(50, "weather of JFK"),
        label(104, "flight B6 917"),
        label(134, "its data arrives"),
    ]
    drawn += [
        bar(10, 11, 36, "39 °F"),
        bar(11, 12, 36, "41 °F"),
        bar(12, 13, 36, "44 °F"),
        bar(13, 15.4, 36, "45 °F"),
    ]
    drawn += [dot(11.33, 100, "leaves at 11:20"), arrow(x(11.33), 93, x(11.33), 60, BLUE)]
    drawn += [dot(13.67, 130, "13:40: joined with 41 °F, not with 45", GREEN)]
    return svg(W, 155, "versions of a table and a record that is joined as of its time", drawn)


def out_of_order() -> str:
    drawn = [hours(130), label(50, "before"), label(84, "a late record"), label(116, "after")]
    drawn += [bar(10, 12, 36, "1.0"), bar(12, 15.4, 36, "1.4")]
    drawn += [dot(11, 80, "price 1.2, valid from 11:00, arrives after that of 12:00", RED)]
    drawn += [bar(10, 11, 102, "1.0"), bar(11, 12, 102, "1.2"), bar(12, 15.4, 102, "1.4")]
    return svg(W, 132, "a record out of order splits one interval", drawn)


def deletions() -> str:
    drawn = [
        hours(212),
        label(46, "dump of 11:00"),
        label(80, "dump of 12:00"),
        label(114, "… the table", "(assumed: dashed)"),
        label(158, "dump of 14:00"),
        label(192, "… the table"),
    ]
    drawn += [dot(11, 42, "Ann, updated_at 10:00"), dot(12, 76, "without Ann: deleted at 12:00", RED)]
    drawn += [bar(10, 12, 100, "Ann"), _deleted(12, 15.4, 100)]
    drawn += [dot(14, 154, "Ann, updated_at 10:00", GREEN)]
    drawn += [bar(10, 12, 178, "Ann"), bar(12, 15.4, 178, "Ann again, in place of the deletion", GREEN)]
    return svg(W, 215, "a deletion has the dump's time; a row that returns replaces it", drawn)


def _deleted(start: float, end: float, y: float) -> str:
    return (
        f'<rect x="{x(start):.1f}" y="{y}" width="{(end - start) * HOUR - 2:.1f}" height="22" '
        f'fill="none" stroke="{RED}" stroke-dasharray="4 3"/>'
        + text(x((start + end) / 2), y + 15, "deleted", "middle")
    )


def grace() -> str:
    drawn = [hours(215), label(46, "1: order of 11:00"), label(80, "2: price of 10:30", "(late)")]
    drawn += [
        label(120, "3: order of 12:00"),
        label(154, "4: order of 12:30"),
        label(190, "5: order of 10:45"),
    ]
    drawn += [dot(11, 42, "waits: stream time 11:00 < 11:00 + grace 1:00")]
    drawn += [dot(10.5, 76, "is in time: the order of 11:00 still waits", AMBER)]
    drawn += [
        dot(12, 116, "stream time 12:00: the order of 11:00 is emitted, with the price of 10:30", GREEN)
    ]
    drawn += [dot(12.5, 150, "waits")]
    drawn += [dot(10.75, 186, "10:45 is late: before 12:30 minus 1:00. Joined at once, is_late", RED)]
    return svg(W, 218, "a stream record waits for the grace period", drawn)


def retention() -> str:
    drawn = [hours(150), label(46, "stream time 14:00,", "history retention 3 h")]
    drawn += [
        f'<rect x="{x(11)}" y="36" width="{3 * HOUR}" height="22" fill="{GREEN}" fill-opacity="0.2"/>'
    ]
    drawn += [text(x(12.5), 51, "the table keeps and accepts these", "middle")]
    drawn += [dot(14, 84, "the largest timestamp so far"), dot(11, 110, "exactly 3 h: accepted", GREEN)]
    drawn += [dot(10.5, 136, "older: rejected, counted, put into quarantine (late)", RED)]
    return svg(W, 152, "history retention is counted in stream time", drawn)


def known() -> str:
    top, step = 44, 44
    drawn = [hours(top + 3 * step + 6, about="known at ↓   valid at, h:mm →")]
    rows = [
        ("Monday", [(10, 15.4, "1.0")], "1.0 of 10:00 is recorded"),
        ("Tuesday", [(10, 12, "1.0"), (12, 15.4, "1.4")], "1.4 of 12:00 is recorded"),
        (
            "Wednesday",
            [(10, 11, "1.0"), (11, 12, "1.2"), (12, 15.4, "1.4")],
            "1.2 of 11:00 is recorded: late",
        ),
    ]
    for number, (day, bars, said) in enumerate(rows):
        y = top + number * step
        drawn += [label(y + 8, f"{day}:"), text(x(10), y - 5, said, colour=GREY)]
        drawn += [bar(*one[:2], y, one[2]) for one in bars]
    drawn += [f'<path d="M{x(11.5)} 20V{top + 3 * step}" stroke="{RED}" stroke-dasharray="4 3"/>']
    drawn += [text(x(11.5) + 4, top + 3 * step + 4, "as of 11:30: 1.0, 1.0, 1.2", colour=RED)]
    return svg(W, top + 3 * step + 12, "the version valid at a time, as known on three days", drawn)


def corrections() -> str:
    drawn = [
        hours(196),
        label(50, "prices"),
        label(92, "order of 11:30"),
        label(130, "a late price"),
        label(178, "its row after that"),
    ]
    drawn += [bar(10, 12, 36, "1.0"), bar(12, 15.4, 36, "1.4")]
    drawn += [dot(11.5, 88, "revision 0: price 1.0", GREEN), arrow(x(11.5), 80, x(11.5), 60, GREEN)]
    drawn += [
        dot(11, 126, "1.2, valid from 11:00 to 12:00: orders of that interval are joined again", RED)
    ]
    drawn += [dot(11.5, 174, "revision 1: price 1.2; old: 1.0; cause: the late price's offset", GREEN)]
    return svg(W, 198, "a late price corrects the row of an order", drawn)


def log_and_view() -> str:
    drawn = [label(14, "log: records in order of arrival, never changed")]
    columns = ["offset", "product", "price", "timestamp", "is_latest"]
    rows = [
        ["0", "apple", "1.0", "10:00", "true"],
        ["1", "apple", "1.4", "14:00", "true"],
        ["2", "apple", "1.2", "12:00", "false"],
    ]
    drawn += _table(4, 26, columns, rows, 70)
    drawn += [arrow(370, 66, 446, 66), text(408, 58, "fold", "middle", GREY)]
    drawn += [text(456, 14, "view: versions and their intervals", colour=GREY)]
    columns = ["product", "price", "valid_from", "valid_to"]
    rows = [
        ["apple", "1.0", "10:00", "12:00"],
        ["apple", "1.2", "12:00", "14:00"],
        ["apple", "1.4", "14:00", "null"],
    ]
    drawn += _table(456, 26, columns, rows, 95)
    return svg(W, 116, "a log of three records and its view", drawn)


def _table(left: float, top: float, head: list[str], rows: list[list[str]], width: float) -> list[str]:
    drawn: list[str] = []
    for number, row in enumerate([head, *rows]):
        y = top + number * 20
        for column, said in enumerate(row):
            colour = GREY if number == 0 else "currentColor"
            drawn.append(text(left + column * width + 4, y + 14, said, colour=colour))
        drawn.append(
            f'<path d="M{left} {y + 20}h{len(head) * width}" stroke="{GREY}" stroke-opacity="0.4"/>'
        )
    return drawn


def _box(left: float, top: float, width: float, lines: list[str], colour: str = BLUE) -> str:
    height = 16 * len(lines) + 12
    said = "".join(
        text(left + width / 2, top + 18 + 16 * n, one, "middle") for n, one in enumerate(lines)
    )
    return (
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="6" fill="{colour}" '
        f'fill-opacity="0.15" stroke="{colour}"/>{said}'
    )


def run() -> str:
    steps = [
        (["pin", "which records,", "which versions"], BLUE),
        (["read", "inputs from the", "position on"], BLUE),
        (["operate", "DataFrame to", "DataFrame"], BLUE),
        (["gate", "types, pandera,", "bad share"], AMBER),
        (["commit", "append to the log,", "one Delta commit"], GREEN),
        (["follow", "view,", "quarantine"], BLUE),
    ]
    drawn: list[str] = []
    for number, (lines, colour) in enumerate(steps):
        drawn.append(_box(4 + number * 143, 10, 122, lines, colour))
        if number:
            drawn.append(arrow(4 + number * 143 - 21, 40, 4 + number * 143 - 2, 40))
    drawn += [
        text(
            4,
            96,
            "killed here: nothing was committed; the next run takes the same records",
            colour=GREY,
        )
    ]
    drawn += [
        f'<path d="M4 78H{4 + 4 * 143 + 122}" stroke="{RED}"/>',
        f'<path d="M{4 + 5 * 143} 78h122" stroke="{GREEN}"/>',
    ]
    drawn += [
        text(
            W - 8,
            112,
            "killed here: results are committed; the next run brings the view up to date",
            "end",
            GREY,
        )
    ]
    return svg(W, 120, "a run from pin to follow", drawn)


def hops() -> str:
    drawn = [
        _box(4, 10, 150, ["landing/prices/*.csv", "a sensor sees files"]),
        _box(4, 90, 150, ["landing/orders/*.csv", "a sensor sees files"]),
        _box(240, 10, 170, ["asset prices", "log · view · quarantine"], AMBER),
        _box(240, 90, 170, ["asset orders", "log · quarantine"], BLUE),
        _box(500, 50, 170, ["asset priced_orders", "log · view"], GREEN),
        _box(740, 50, 112, ["checks", "after the commit"]),
        arrow(156, 32, 236, 32), arrow(156, 112, 236, 112),
        arrow(412, 32, 496, 62), arrow(412, 112, 496, 84), arrow(672, 72, 736, 72),
        text(196, 26, "files", "middle", GREY), text(196, 106, "files", "middle", GREY),
        text(455, 36, "versions", "middle", GREY), text(452, 120, "offsets", "middle", GREY),
    ]  # fmt: skip
    return svg(W, 145, "from files to a joined table, asset by asset", drawn)


STEPS = ("pin", "read", "operate", "gate, stage", "commit", "follow, report")
BY_PACKAGE: dict[str, list[tuple[int, int, list[str], str]]] = {
    "orchestration": [
        (0, 5, ["asset.py: the one op of an asset", "calls the steps of a Run"], AMBER),
        (5, 1, ["materialized():", "metadata, pictures"], AMBER),
    ],
    "runs": [
        (0, 1, ["Run.pin", "pin.py → Arrival"], BLUE),
        (1, 1, ["Run.read", "read_source.py"], BLUE),
        (2, 1, ["Run.operate", "process, look up"], BLUE),
        (3, 3, ["Run.commit", "gate.py counts and checks, commit_document.py"], BLUE),
    ],
    "sources": [
        (0, 1, ["Source.pin", "→ Pinned"], BLUE),
        (1, 1, ["Pinned.read", "and the formats"], BLUE),
    ],
    "core": [
        (0, 1, ["Processor.plan", "→ RunPlan"], BLUE),
        (1, 1, ["source_records.py", "of a source"], BLUE),
        (2, 1, ["Processor", ".results"], BLUE),
        (3, 1, ["Processor", ".state_after"], BLUE),
    ],
    "storage": [
        (0, 1, ["last commit:", "positions"], BLUE),
        (1, 1, ["rows of", "input logs"], BLUE),
        (2, 1, ["views, state", "of the last run"], BLUE),
        (3, 1, ["stage_*:", "attempts/"], BLUE),
        (4, 1, ["commit: one", "Delta commit"], GREEN),
        (5, 1, ["catch_up: view,", "quarantine"], BLUE),
    ],
}
"""By package what it does in which steps of a run: the first of them, how many, and in words."""


def architecture() -> str:
    left, step, row = 92, 128, 54
    drawn = [
        text(left + number * step + (step - 8) / 2, 14, one, "middle", GREY)
        for number, one in enumerate(STEPS)
    ]
    for number, (package, boxes) in enumerate(BY_PACKAGE.items()):
        top = 24 + number * row
        drawn.append(label(top + 26, package))
        drawn += [
            _box(left + first * step, top, steps * step - 8, lines, colour)
            for first, steps, lines, colour in boxes
        ]
    return svg(W, 24 + row * len(BY_PACKAGE), "which package does what in each step of a run", drawn)


DRAWINGS: dict[str, Callable[[], str]] = {
    one.__name__: one
    for one in (
        *(versions, out_of_order, deletions, grace, retention, known, corrections, log_and_view, run),
        *(hops, architecture),
    )
}


def drawing(name: str) -> str:
    if name not in DRAWINGS:
        raise ValueError(f"expected one of {sorted(DRAWINGS)}, got {name!r}")
    return f'<div class="timeline">{DRAWINGS[name]()}</div>'
