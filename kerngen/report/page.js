"use strict";
// The page reads and prints as it is; this adds what a pointer can ask: a mark's row, an order of rows, fewer figures.
const byId = (id) => document.getElementById(id);

// ---- a mark tells the row of the table that it stands for

const NEAR = 24; // pixels on screen
const tip = byId("tip");
const marksOf = new WeakMap();

function readMarks(svg) {
  const found = [];
  for (const path of svg.querySelectorAll(".marks[data-first]")) {
    const first = Number(path.dataset.first);
    const points = path.getAttribute("d").split("M").slice(1);
    points.forEach((p, i) => {
      const [x, y] = p.replace("h0", "").split(" ").map(Number);
      found.push({ x, y, row: first + i });
    });
  }
  for (const bar of svg.querySelectorAll(".bar[data-row]")) {
    found.push({ bar, row: Number(bar.dataset.row) });
  }
  return found;
}

// Rows keep the number that they were written with, however they are sorted.
for (const body of document.querySelectorAll("tbody")) {
  [...body.rows].forEach((row, i) => { row.dataset.at = i; });
}

function say(figure, at) {
  const row = figure.querySelector(`tbody tr[data-at="${at}"]`);
  if (!row) return false;
  const heads = figure.querySelectorAll("thead th");
  tip.replaceChildren();
  [...row.cells].forEach((cell, i) => {
    if (!cell.textContent) return;
    const line = document.createElement("div");
    const name = document.createElement("b");
    name.textContent = heads[i].textContent + ": ";
    line.append(name, cell.textContent);
    tip.append(line);
  });
  return true;
}

function forget() {
  tip.hidden = true;
  for (const ring of document.querySelectorAll(".near")) ring.remove();
}

function point(event) {
  const svg = event.currentTarget;
  if (!marksOf.has(svg)) marksOf.set(svg, readMarks(svg));
  const matrix = svg.getScreenCTM();
  let best = null;
  let least = NEAR;
  for (const mark of marksOf.get(svg)) {
    let away;
    if (mark.bar) {
      away = mark.bar === event.target ? 0 : Infinity;
    } else {
      away = Math.hypot(matrix.a * mark.x + matrix.e - event.clientX, matrix.d * mark.y + matrix.f - event.clientY);
    }
    if (away < least) [best, least] = [mark, away];
  }
  forget();
  if (best === null || !say(svg.closest("figure"), best.row)) return;
  if (!best.bar) {
    const ring = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    for (const [name, value] of [["class", "near"], ["cx", best.x], ["cy", best.y], ["r", 5]]) ring.setAttribute(name, value);
    svg.append(ring);
  }
  tip.hidden = false;
  const room = tip.getBoundingClientRect();
  const left = Math.max(4, Math.min(event.clientX + 14, innerWidth - room.width - 4));
  const below = event.clientY + 18;
  tip.style.left = `${left}px`;
  tip.style.top = `${Math.max(4, below + room.height < innerHeight ? below : event.clientY - room.height - 14)}px`;
}

for (const svg of document.querySelectorAll("svg")) {
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", forget);
}
addEventListener("scroll", forget, { passive: true });

// ---- tables sort by a column, numbers as numbers, what is empty last

function sort(table, at, isNumber) {
  const head = table.tHead.rows[0].cells[at];
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const th of table.tHead.rows[0].cells) th.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = (row) => row.cells[at].textContent;
  const compare = isNumber ? (a, b) => Number(key(a)) - Number(key(b)) : (a, b) => key(a).localeCompare(key(b));
  const rows = [...table.tBodies[0].rows];
  rows.sort((a, b) => (key(a) === "") - (key(b) === "") || (down ? -compare(a, b) : compare(a, b)));
  table.tBodies[0].append(...rows);
}

for (const table of document.querySelectorAll("table")) {
  [...table.tHead.rows[0].cells].forEach((th, i) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = th.textContent;
    button.addEventListener("click", () => sort(table, i, th.classList.contains("number")));
    th.replaceChildren(button);
  });
}

// ---- one kernel, one device

function narrow() {
  const wanted = { kernel: byId("kernel").value, device: byId("device").value };
  let shown = 0;
  const figures = document.querySelectorAll("figure");
  for (const figure of figures) {
    figure.hidden = Object.entries(wanted).some(([name, value]) => value && figure.dataset[name] && figure.dataset[name] !== value);
    shown += !figure.hidden;
  }
  byId("narrowed").textContent = wanted.kernel || wanted.device ? `${shown} of ${figures.length} figures` : "";
}

const form = byId("narrow");
if (form) {
  form.hidden = false;
  form.addEventListener("change", narrow);
  form.addEventListener("submit", (event) => event.preventDefault());
}
