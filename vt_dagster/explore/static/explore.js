"use strict";
// Zoom, sliders, the grace line, and tables that can be sorted. The pages work without this script too, with links and forms.

const by = (id) => document.getElementById(id);
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const moment = (micros) => {
  const date = new Date(Math.round(micros / 1000));
  return isNaN(date) ? "" : date.toISOString().slice(0, 19).replace("T", " ");
};

// ---------------------------------------------------------------- a timeline that one can zoom into

let view = [0, 1]; // the visible part of a drawing, as shares of its time

function place(drawing) {
  const [from, to] = view;
  const at = (share) => ((share - from) / (to - from)) * 100;
  const show = (element, seen) => element.setAttribute("visibility", seen ? "visible" : "hidden");
  const pixel = 100 / drawing.querySelector("line.axis").getBoundingClientRect().width; // in percent
  for (const bar of drawing.querySelectorAll("rect[data-a]")) {
    const a = +bar.dataset.a, b = +bar.dataset.b;
    const start = at(clamp(a, from, to)), end = at(clamp(b, from, to));
    bar.setAttribute("x", `${start}%`);
    bar.setAttribute("width", `${Math.max(1.5 * pixel, end - start - 0.7 * pixel)}%`);
    show(bar, a <= to && b >= from);
  }
  for (const mark of drawing.querySelectorAll("svg.at")) {
    mark.setAttribute("x", `${at(+mark.dataset.a)}%`);
    show(mark, mark.dataset.a >= from && mark.dataset.a <= to);
  }
  for (const cursor of drawing.querySelectorAll(".cursor")) {
    if (cursor.dataset.a === "") continue;
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, `${at(+cursor.dataset.a)}%`);
    show(cursor, cursor.dataset.a >= from && cursor.dataset.a <= to);
  }
  const low = +drawing.dataset.low, high = +drawing.dataset.high;
  drawing.querySelectorAll(".tick").forEach((tick, i) => {
    const parts = moment(low + (high - low) * (from + ((to - from) * i) / 2)).split(" ");
    tick.children[0].textContent = parts[0];
    tick.children[1].textContent = parts[1] || "";
  });
}

function zoom(drawing, factor, around = 0.5) {
  const [from, to] = view, width = clamp((to - from) * factor, 1e-5, 1);
  const start = clamp(from + (to - from - width) * around, 0, 1 - width);
  view = [start, start + width];
  place(drawing);
}

function shift(drawing, part) {
  const width = view[1] - view[0], start = clamp(view[0] + part * width, 0, 1 - width);
  view = [start, start + width];
  place(drawing);
}

const KEYS = {
  "+": (drawing) => zoom(drawing, 0.6), "=": (drawing) => zoom(drawing, 0.6),
  "-": (drawing) => zoom(drawing, 1 / 0.6), 0: (drawing) => zoom(drawing, 1e6),
  ArrowLeft: (drawing) => shift(drawing, -0.2), ArrowRight: (drawing) => shift(drawing, 0.2),
};

function timeline(drawing) {
  const share = (event) => {
    const box = drawing.querySelector("line.axis").getBoundingClientRect();
    return clamp((event.clientX - box.left) / box.width, 0, 1);
  };
  drawing.addEventListener("keydown", (event) => {
    if (KEYS[event.key] && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      KEYS[event.key](drawing);
    }
  });
  drawing.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      shift(drawing, Math.sign(event.deltaX || event.deltaY) * 0.1);
    } else {
      zoom(drawing, event.deltaY > 0 ? 1.25 : 0.8, share(event));
    }
  }, { passive: false });
  place(drawing);
}

// ------------------------------------------------------------- tables that one can sort and filter

const NUMBER = /^[-+]?[\d,]+(\.\d+)?(e[-+]?\d+)?$/i;
const collator = new Intl.Collator("en", { numeric: true });

// What a cell is sorted by: its exact value, where it shows a shorter one; null = it shows none.
function sortedBy(row, column) {
  const cell = row.cells[column];
  const exact = column === 0 ? row.dataset.x : cell && (cell.dataset.sort || cell.title);
  const text = exact || (cell ? cell.textContent.trim() : "");
  return text === "" || text === "–" || text === "null" ? null : text;
}

function compare(one, other) {
  const numbers = [one, other].map((text) => (NUMBER.test(text) ? +text.replaceAll(",", "") : NaN));
  if (numbers.some(isNaN)) return isNaN(numbers[1]) - isNaN(numbers[0]) || collator.compare(one, other);
  return numbers[0] - numbers[1] || collator.compare(one, other);
}

// Up, down, and as the page had them.
function sort(table, rows, column) {
  const heads = [...table.tHead.rows[0].cells], head = heads[column];
  const next = { ascending: "descending", descending: null };
  const order = head.getAttribute("aria-sort") in next ? next[head.getAttribute("aria-sort")] : "ascending";
  heads.forEach((one) => one.removeAttribute("aria-sort"));
  if (order) head.setAttribute("aria-sort", order);
  const sign = order === "descending" ? -1 : 1, sorted = [...rows];
  if (order) {
    sorted.sort((one, other) => {
      const [a, b] = [sortedBy(one, column), sortedBy(other, column)];
      return a === null || b === null ? (a === null) - (b === null) : sign * compare(a, b);
    });
  }
  table.tBodies[0].append(...sorted);
}

function tools(table) {
  const rows = [...table.tBodies[0].rows];
  if (rows.length < 2) return;
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(table, rows, column));
    head.append(button);
  });
  const line = document.createElement("p"), label = document.createElement("label");
  const text = document.createElement("input"), count = document.createElement("output");
  line.className = "filter";
  text.type = "search";
  label.append(`filter these ${rows.length} rows `, text);
  line.append(label, count);
  table.parentElement.before(line);
  text.addEventListener("input", () => {
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const content = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => content.includes(word));
    }
    count.textContent = words.length ? `${rows.filter((row) => !row.hidden).length} shown` : "";
  });
}

// ---------------------------------------------------------------------- as of, and as known at

let waiting = null, requests = 0;
const filters = []; // of the tables that a move of a slider replaces

async function show(form) {
  const number = ++requests;
  const query = [...new FormData(form)].filter(([, value]) => value !== "");
  const address = `${form.getAttribute("action")}?${new URLSearchParams(query)}`;
  const answer = await fetch(address);
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  if (number !== requests) return; // a later request has been sent: drop this response
  const found = page.getElementById("shown") || page.querySelector("main");
  by("shown").querySelectorAll("[type=search]").forEach((text, i) => { filters[i] = text.value; });
  by("shown").replaceChildren(...found.childNodes);
  by("shown").querySelectorAll("table").forEach(tools);
  by("shown").querySelectorAll("[type=search]").forEach((text, i) => {
    text.value = filters[i] || "";
    text.dispatchEvent(new Event("input"));
  });
  const newer = page.getElementById("times");
  if (newer) {
    if (newer.dataset.low !== form.dataset.low) view = [0, 1];
    Object.assign(form.dataset, { low: newer.dataset.low, high: newer.dataset.high });
    by("around").value = page.getElementById("around").value;
    slide(form);
  }
  history.replaceState(null, "", address);
  by("shown").querySelectorAll(".timeline").forEach(timeline);
}

function soon(form) {
  clearTimeout(waiting);
  waiting = setTimeout(() => show(form), 120);
}

// A time without an offset is UTC, as everywhere.
const asTime = (text) => {
  const iso = text.replace(" ", "T");
  return Date.parse(/(Z|[+-]\d\d:?\d\d)$/.test(iso) ? iso : `${iso}Z`) * 1000;
};

function slide(form) {
  if (!by("as_of")) return;
  const low = +form.dataset.low, high = +form.dataset.high, given = asTime(by("as_of").value.trim());
  by("as_of_slider").value = isNaN(given) ? 1000 : ((given - low) / (high - low)) * 1000;
}

function times(form) {
  const text = by("as_of"), slider = by("as_of_slider");
  if (text) {
    slide(form);
    slider.hidden = false;
    slider.addEventListener("input", () => {
      const low = +form.dataset.low, high = +form.dataset.high, share = +slider.value / 1000;
      text.value = share >= 1 ? "" : moment(low + (high - low) * share);
      const drawing = document.querySelector(".timeline");
      drawing.querySelectorAll(".cursor").forEach((cursor) => { cursor.dataset.a = share; });
      place(drawing);
      soon(form);
    });
    text.addEventListener("change", () => soon(form));
  }
  const known = by("known"), runs = by("known_slider"), last = known.options.length - 1;
  runs.max = last; // the newest run is the first option, "now" before it
  runs.value = last - known.selectedIndex;
  runs.hidden = false;
  const tell = () => runs.setAttribute("aria-valuetext", known.selectedOptions[0].textContent);
  runs.addEventListener("input", () => {
    known.selectedIndex = last - +runs.value;
    tell();
    soon(form);
  });
  known.addEventListener("change", () => {
    runs.value = last - known.selectedIndex;
    tell();
    soon(form);
  });
  tell();
}

// --------------------------------------------------------------------------------- the grace line

function costs(svg) {
  const slider = by("grace_slider"), line = by("grace"), rows = [...by("choices").tBodies[0].rows];
  const heads = [...by("choices").tHead.rows[0].cells].map((cell) => cell.textContent);
  const choose = (place) => {
    slider.value = place;
    line.setAttribute("x", `${rows[place].dataset.x}%`);
    rows.forEach((row, i) => row.classList.toggle("chosen", i === place));
    const cells = [...rows[place].cells].map((cell) => cell.textContent);
    by("cost").textContent =
      `${cells[0]}: ${cells[2]} of ${cells[1]} ${heads[2]} (${cells[3]}), ${cells[4]} late` +
      (cells[5] === "–" ? "" : `, at most ${cells[5]} wait`);
  };
  const nearest = (event) => {
    const box = svg.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * 100;
    const far = rows.map((row) => Math.abs(+row.dataset.x - x));
    choose(far.indexOf(Math.min(...far)));
  };
  svg.addEventListener("pointerdown", (event) => {
    svg.setPointerCapture(event.pointerId);
    nearest(event);
  });
  svg.addEventListener("pointermove", (event) => {
    if (svg.hasPointerCapture(event.pointerId)) nearest(event);
  });
  slider.hidden = false;
  slider.addEventListener("input", () => choose(+slider.value));
  choose(+svg.dataset.chosen);
}

document.querySelectorAll("table").forEach(tools);
document.querySelectorAll(".timeline").forEach(timeline);
if (by("times")) times(by("times"));
if (by("costs")) costs(by("costs"));
