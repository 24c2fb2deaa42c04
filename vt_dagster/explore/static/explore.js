"use strict";
// Zoom, sliders and the grace line. The pages work without this script too, with links and forms.

const by = (id) => document.getElementById(id);
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const moment = (micros) => {
  const date = new Date(Math.round(micros / 1000));
  return isNaN(date) ? "" : date.toISOString().slice(0, 19).replace("T", " ");
};

// ---------------------------------------------------------------- a timeline that one can zoom into

let view = [0, 1]; // the visible part of a drawing, as shares of its time

function place(svg) {
  const left = +svg.dataset.left, width = +svg.dataset.width;
  const [from, to] = view;
  const x = (share) => left + ((share - from) / (to - from)) * width;
  const inside = (share) => share >= from && share <= to;
  for (const bar of svg.querySelectorAll("rect[data-a]")) {
    const a = +bar.dataset.a, b = +bar.dataset.b;
    const start = x(clamp(a, from, to)), end = x(clamp(b, from, to));
    bar.setAttribute("x", start);
    bar.setAttribute("width", Math.max(1.5, end - start - 0.7));
    bar.setAttribute("visibility", b < from || a > to ? "hidden" : "visible");
  }
  for (const mark of svg.querySelectorAll("path.mark")) {
    mark.setAttribute("transform", `translate(${x(+mark.dataset.a)} ${mark.dataset.y})`);
    mark.setAttribute("visibility", inside(+mark.dataset.a) ? "visible" : "hidden");
  }
  const cursor = svg.querySelector(".cursor");
  if (cursor.dataset.a !== "") {
    cursor.setAttribute("transform", `translate(${x(+cursor.dataset.a)} 0)`);
    cursor.setAttribute("visibility", inside(+cursor.dataset.a) ? "visible" : "hidden");
  }
  const low = +svg.dataset.low, high = +svg.dataset.high;
  svg.querySelectorAll(".tick").forEach((tick, i) => {
    tick.textContent = moment(low + (high - low) * (from + ((to - from) * i) / 2));
  });
}

function zoom(svg, factor, around = 0.5) {
  const [from, to] = view, width = clamp((to - from) * factor, 1e-5, 1);
  const start = clamp(from + (to - from - width) * around, 0, 1 - width);
  view = [start, start + width];
  place(svg);
}

function shift(svg, part) {
  const width = view[1] - view[0], start = clamp(view[0] + part * width, 0, 1 - width);
  view = [start, start + width];
  place(svg);
}

const KEYS = {
  "+": (svg) => zoom(svg, 0.6), "=": (svg) => zoom(svg, 0.6), "-": (svg) => zoom(svg, 1 / 0.6),
  ArrowLeft: (svg) => shift(svg, -0.2), ArrowRight: (svg) => shift(svg, 0.2),
  0: (svg) => zoom(svg, 1e6),
};

function timeline(svg) {
  const share = (event) => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    return clamp(((event.clientX - box.left) * scale - +svg.dataset.left) / +svg.dataset.width, 0, 1);
  };
  svg.addEventListener("keydown", (event) => {
    if (KEYS[event.key] && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      KEYS[event.key](svg);
    }
  });
  svg.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      shift(svg, Math.sign(event.deltaX || event.deltaY) * 0.1);
    } else {
      zoom(svg, event.deltaY > 0 ? 1.25 : 0.8, share(event));
    }
  }, { passive: false });
  place(svg);
}

// ---------------------------------------------------------------------- as of, and as known at

let waiting = null, asked = 0;

async function show(form) {
  const number = ++asked;
  const query = [...new FormData(form)].filter(([, value]) => value !== "");
  const address = `${form.getAttribute("action")}?${new URLSearchParams(query)}`;
  const answer = await fetch(address);
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  if (number !== asked) return; // a later request has been sent: drop this response
  const found = page.getElementById("shown") || page.querySelector("main");
  by("shown").replaceChildren(...found.childNodes);
  const newer = page.getElementById("times");
  if (newer) {
    if (newer.dataset.low !== form.dataset.low) view = [0, 1];
    Object.assign(form.dataset, { low: newer.dataset.low, high: newer.dataset.high });
    by("around").value = page.getElementById("around").value;
    slide(form);
  }
  history.replaceState(null, "", address);
  document.querySelectorAll(".timeline").forEach(timeline);
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
      const cursor = document.querySelector(".cursor");
      cursor.dataset.a = share;
      place(cursor.ownerSVGElement);
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
    line.setAttribute("transform", `translate(${rows[place].dataset.x} 0)`);
    rows.forEach((row, i) => row.classList.toggle("chosen", i === place));
    const told = [...rows[place].cells].map((cell) => cell.textContent);
    by("cost").textContent =
      `${told[0]}: ${told[2]} of ${told[1]} ${heads[2]} (${told[3]}), ${told[4]} late` +
      (told[5] === "–" ? "" : `, at most ${told[5]} wait`);
  };
  const nearest = (event) => {
    const box = svg.getBoundingClientRect(), frame = svg.viewBox.baseVal;
    const x = ((event.clientX - box.left) / box.width) * frame.width + frame.x;
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

document.querySelectorAll(".timeline").forEach(timeline);
if (by("times")) times(by("times"));
if (by("costs")) costs(by("costs"));
