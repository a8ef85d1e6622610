// What people read, and elements. Text is always text, whatever names a file holds.

export const $ = (id) => document.getElementById(id);

export function number(x, digits = 3) {
  if (x == null || !isFinite(x)) return "–";
  return Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en") : String(+x.toPrecision(digits));
}
function scaled(x, base, names) {
  if (x == null) return "–";
  const k = Math.max(0, Math.min(names.length - 1, Math.floor(Math.log(Math.abs(x) || 1) / Math.log(base))));
  return `${number(x / base ** k)} ${names[k]}`;
}
export const size = (x) => scaled(x, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
export const bits = (x) => scaled(x == null ? x : 8 * x, 1000, ["bit/s", "kbit/s", "Mbit/s", "Gbit/s"]);
export const flops = (x) => scaled(x, 1000, ["FLOPS", "kFLOPS", "MFLOPS", "GFLOPS", "TFLOPS", "PFLOPS"]);
export const share = (x) => x == null ? "–" : `${Math.round(100 * x)} %`;
export function time(s) {
  if (s == null || !isFinite(s)) return "–";
  if (s < 1) return s < 1e-3 ? `${number(1e6 * s)} µs` : `${number(1e3 * s)} ms`;
  if (s < 60) return `${number(s)} s`;
  return s < 3600 ? `${number(s / 60)} min` : s < 86400 ? `${number(s / 3600)} h` : `${number(s / 86400)} d`;
}
export const clock = (s) => [s / 3600, s / 60 % 60, s % 60].map((x) => String(Math.floor(x)).padStart(2, "0")).join(":");

const DRAWN = ["svg", "g", "circle", "rect", "path", "line", "text"];
export function element(tag, attributes = {}, ...children) {
  const drawn = DRAWN.includes(tag);
  const made = drawn ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, set] of Object.entries(value)) made.style.setProperty(key, set);
    else if (value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}
export const fill = (id, ...children) => $(id).replaceChildren(...children.filter((child) => child));
export const pill = (state) => element("span", { class: `pill ${state}` }, state);
export const runLink = (id, text) => element("a", { href: `?run=${encodeURIComponent(id)}` }, text);

// A table: `columns` are [heading, class]; each row is {cells, ...attributes}, where a cell is a text or an element.
export function table(columns, rows) {
  const heads = columns.map(([name, kind]) => element("th", { class: kind, scope: "col" }, name));
  const lines = rows.map(({ cells, ...attributes }) =>
    element("tr", attributes, ...cells.map((cell, k) => element("td", { class: columns[k][1] }, cell ?? "–"))));
  return element("div", { class: "scroll" },
    element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...lines)));
}
