"use strict";
const page = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement, views = new Map(), hidden = new Set();
const select = id => document.getElementById(id);
const system = matchMedia("(prefers-color-scheme: dark)");
let chosen = null; // the reader's own theme, else the system's

// Rows come as columns, and texts as places in a list, which is a third of the size.
function unpack(table) {
  const columns = Object.entries(table.columns).map(([key, c]) => [key, c.texts ? c.places.map(i => c.texts[i]) : c]);
  return Array.from({ length: table.length }, (_, i) => Object.fromEntries(columns.map(([key, c]) => [key, c[i]])));
}
for (const figure of page.figures)
  for (const [name, table] of Object.entries(figure.spec.datasets)) figure.spec.datasets[name] = unpack(table);

function set(spec, name, value) {
  for (const entry of spec.params) if (entry.name === name) entry.value = value;
}

function prepared(figure) {
  const { datasets, ...rest } = figure.spec;
  const spec = { ...structuredClone(rest), datasets };
  set(spec, "hidden", [...hidden]);
  if (matchMedia("(pointer: coarse)").matches) { // a finger on a figure scrolls the page
    spec.params = spec.params.filter(entry => entry.name !== "zoom");
  }
  if (figure.name === "final-by-state" && innerWidth < 700) { // labels need room; the legend has them, too
    spec.layer = spec.layer.filter(layer => layer.mark.type !== "text");
  }
  if (figure.name === "curves") {
    set(spec, "metric", select("metric").value);
    set(spec, "axis", select("axis").value);
    for (const { encoding } of spec.layer) {
      encoding.x.title = select("axis").selectedOptions[0].text;
      encoding.y.title = select("metric").value;
      encoding.y.scale = select("log").checked ? { type: "log" } : { zero: false };
    }
  }
  return spec;
}

async function draw(figure) {
  const mode = root.dataset.theme, place = document.querySelector(`#${CSS.escape(figure.name)} .chart`);
  views.get(figure.name)?.finalize();
  const options = { actions: false, renderer: "svg", config: page.themes[mode], tooltip: { theme: mode } };
  views.set(figure.name, await vegaEmbed(place, prepared(figure), options));
}

function theme() {
  root.dataset.theme = chosen ?? (system.matches ? "dark" : "light");
  return Promise.all(page.figures.map(draw));
}

function curves() {
  return Promise.all(page.figures.filter(figure => figure.name === "curves").map(draw));
}

for (const button of document.querySelectorAll("#legend button")) {
  button.addEventListener("click", () => {
    const group = button.dataset.group, shown = hidden.has(group);
    button.setAttribute("aria-pressed", String(shown));
    if (shown) hidden.delete(group); else hidden.add(group);
    for (const { view } of views.values()) view.signal("hidden", [...hidden]).runAsync();
  });
}

for (const id of ["metric", "axis", "log"]) select(id)?.addEventListener("change", curves);
select("reset")?.addEventListener("click", curves);
select("theme").addEventListener("click", () => {
  chosen = root.dataset.theme === "dark" ? "light" : "dark";
  theme();
});
system.addEventListener("change", theme);

// A click on a heading sorts by it, a second one the other way round; cells without a value stay last.
for (const head of document.querySelectorAll("thead th")) {
  head.querySelector("button").addEventListener("click", () => {
    const column = head.cellIndex, body = head.closest("table").tBodies[0];
    const down = head.getAttribute("aria-sort") === "ascending", sign = down ? -1 : 1;
    for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = row => {
      const cell = row.cells[column];
      return cell.dataset.order === undefined ? cell.textContent : Number(cell.dataset.order);
    };
    const rows = Array.from(body.rows).sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
      return sign * (typeof x === "number" ? x - y : x.localeCompare(y));
    });
    body.append(...rows);
  });
}

window.ready = theme();
