// Predicted and measured bars of a step, one above the other on one scale.
import { $, element, fill, share, time } from "./text.js";

const LINE = 17;
const KINDS = {
  F: ["forward", "blue"], B: ["backward", "amber"], W: ["weight gradients", "red"], update: ["update", "green"], E: ["evaluation", "pink"],
  forward: ["activations", "sky"], backward: ["gradients", "orange"], client: ["client", "blue"], other: ["other", "soft"],
};
const named = (name) => KINDS[name]?.[0] ?? name;

export function drawTimeline(bars) {
  const wide = Math.max(280, $("bars").clientWidth), names = wide < 560 ? 74 : 150, width = wide - names - 6;
  const x = (s) => names + Math.max(0, Math.min(1, (s - bars.from_s) / (bars.to_s - bars.from_s))) * width;
  const drawn = [], hits = [], kinds = new Set();
  let y = 4;
  for (const title of ["predicted", "measured"]) {
    const part = bars[title];
    if (!part?.rows.length) continue;
    drawn.push(element("text", { class: "part", x: 0, y: y + 13 }, title));
    drawn.push(element("text", { class: "soft", x: names, y: y + 13 }, time(part.step_s)));
    y += 22;
    const top = y;
    for (const row of part.rows) {
      const box = { x: names, y, width, height: LINE - 3 }, main = row.track === "compute";
      drawn.push(element("rect", { class: "lane", rx: 3, ...box }));
      drawn.push(element("text", { class: "soft row", x: main ? 0 : 14, y: y + 11 }, main ? row.device : row.track));
      drawn.push(...barsOf(title, row, x, y, kinds));
      hits.push(element("rect", { class: "hit", "data-part": title, "data-row": row.device, "data-track": row.track, ...box }));
      y += LINE;
    }
    const end = x(part.step_s);
    drawn.push(element("line", { class: "end", "data-part": title, x1: end, x2: end, y1: top, y2: y }));
    y += 12;
  }
  if (bars.planned_s != null) {
    const at = x(bars.planned_s);
    drawn.push(element("line", { class: "forecast", x1: at, x2: at, y1: 20, y2: y }));
    drawn.push(element("text", { class: "soft", x: at - 5, y: 14, "text-anchor": "end" }, `forecast ${time(bars.planned_s)}`));
  }
  const view = { viewBox: `0 0 ${wide} ${y}`, height: y, role: "img", "aria-label": "Predicted and measured bars" };
  fill("bars", element("svg", view, ...drawn, ...hits));
  const p = bars.predicted?.step_s, m = bars.measured?.step_s, less = p < m ? "less" : "more";
  const off = p && m ? ` (predicted ${less} by ${share(Math.abs(p - m) / m)})` : "";
  $("timeline-note").textContent = off && `predicted ${time(p)}, measured ${time(m)}${off}`;
  const legend = Object.entries(KINDS).filter(([kind]) => kinds.has(kind)).map(([, [name, colour]]) =>
    element("span", {}, element("b", { style: { background: `var(--${colour})` } }), name));
  fill("bar-legend", ...legend);
}

// One path for each kind: thousands of bars are a few elements.
function barsOf(part, row, x, y, kinds) {
  const paths = {}, numbers = [];
  for (const [start, end, name, micro, , count, busy] of row.bars) {
    const kind = KINDS[name] ? name : "other", left = x(start), w = Math.max(0.7, x(end) - left);
    const h = (LINE - 3) * (count > 1 ? Math.max(0.2, busy) : 1), top = y + LINE - 3 - h;
    kinds.add(kind);
    (paths[kind] ??= []).push(`M${left.toFixed(1)} ${top.toFixed(1)}h${w.toFixed(2)}v${h.toFixed(1)}h${(-w).toFixed(2)}z`);
    if (w < 26 || micro < 0 || row.bars.length > 400) continue;
    const text = name.length < 3 ? `${name}${micro}` : micro;
    numbers.push(element("text", { class: "inside", x: left + w / 2, y: y + 11 }, text));
  }
  const made = Object.entries(paths).map(([kind, d]) =>
    element("path", { class: kind, d: d.join(""), "data-part": part, "data-kind": kind }));
  return [...made, ...numbers];
}

// What the pointer is at.
export function barText(bars, target, clientX) {
  const { part, row: device, track } = target.dataset, box = target.getBoundingClientRect();
  const s = bars.from_s + (clientX - box.left) / box.width * (bars.to_s - bars.from_s);
  const row = bars[part].rows.find((found) => found.device === device && found.track === track);
  const bar = row?.bars.find(([start, end]) => start <= s && s <= end);
  if (!bar) return "";
  const [start, end, name, micro, other, count, busy] = bar;
  if (count > 1) return `${device}: ${count} spans, mostly ${named(name)}, ${share(busy)} busy`;
  const whom = other ? `, ${track === "send" ? "to " : ""}${other}` : "";
  return `${device}: ${named(name)}${micro >= 0 ? ` ${micro}` : ""}${whom}\n${time(end - start)}, from ${time(Math.max(0, start))}`;
}
