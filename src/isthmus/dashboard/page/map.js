// The fleet: regions, their devices, and the links that the plan uses.
import { $, bits, element, fill, flops, number, share, size, time } from "./text.js";

const SIGNS = { lost: "✕", left: "→", paused: "‖" };
const MOST_LABELS = 16;

// A box for each region: on a circle, or in rows where there are many or the page is narrow.
function boxesOf(regions, width) {
  const narrow = width < 560, names = Object.keys(regions);
  const cell = names.some((name) => regions[name].length > 12) ? 46 : narrow ? 66 : 88;
  const boxes = names.map((name) => {
    const devices = regions[name], most = Math.floor((width - 40) / cell);
    const columns = Math.max(1, Math.min(Math.ceil(Math.sqrt(devices.length * (narrow ? 1 : 1.3))), most));
    const h = Math.ceil(devices.length / columns) * (cell + 4) + 30;
    return { name, devices, columns, w: Math.max(columns * cell + 16, 90), h };
  });
  const n = boxes.length;
  if (narrow || n > 10) {
    let x = 0, y = 8, line = 0;
    boxes.forEach((box, k) => {
      if (narrow ? k : x + box.w > width) [x, y, line] = [0, y + line + 44, 0];
      Object.assign(box, { x: narrow && k % 2 ? width - box.w - 6 : x + 6, y });
      [x, line] = [x + box.w + 24, Math.max(line, box.h)];
    });
    return { boxes, cell, height: y + line + 8 };
  }
  const high = Math.max(...boxes.map((box) => box.h)), wide = Math.max(...boxes.map((box) => box.w));
  const height = Math.max(n > 2 ? 2.25 * high : high + 90, Math.min(440, width / 2));
  boxes.forEach((box, k) => {
    const turn = n === 2 ? Math.PI * (k + 1) : 2 * Math.PI * k / n - Math.PI / 2 - (n === 4 ? Math.PI / 4 : 0);
    box.x = width / 2 + Math.cos(turn) * (n === 1 ? 0 : (width - wide) / 2 - 8) - box.w / 2;
    box.y = height / 2 + Math.sin(turn) * (n < 3 ? 0 : (height - high) / 2 - 8) - box.h / 2;
  });
  return { boxes, cell, height };
}

const seen = (tip, more) => ({ tabindex: 0, role: "img", "aria-label": tip, "data-tip": tip, ...more });

function linkOf(link, [a, b], radius, most) {
  const dx = b.x - a.x, dy = b.y - a.y, trim = (radius + 5) / (Math.hypot(dx, dy) || 1);
  const bend = a.region === b.region ? 0 : 0.16;
  const cx = (a.x + b.x) / 2 - dy * bend, cy = (a.y + b.y) / 2 + dx * bend;
  const state = { used: "", slow: ": slower than planned", broken: ": broken" }[link.state];
  const measured = link.share == null ? "nothing yet" : `${bits(link.measured_per_s)} (${share(link.share)})`;
  const tip = `${link.ends.join(" – ")}${state}\nplanned ${bits(link.planned_per_s)}, ${time(link.latency_s)} latency
measured ${measured}\n${size(link.bytes)} in the last step; ${link.what}`;
  const d = `M${a.x + dx * trim} ${a.y + dy * trim}Q${cx} ${cy} ${b.x - dx * trim} ${b.y - dy * trim}`;
  const width = 1.6 + 3.4 * Math.sqrt(link.bytes / most);
  const more = { class: `link ${link.state}`, d, style: { "stroke-width": width }, "data-link": link.ends.join("|") };
  return { drawn: element("path", seen(tip, more)), tip, x: (a.x + 2 * cx + b.x) / 4, y: (a.y + 2 * cy + b.y) / 4 };
}

function labelOf(link, { tip, x, y }, width) {
  const mbit = (x) => number(8e-6 * x, 2), sign = link.state === "slow" ? "▼ " : "";
  const rate = `${link.share == null ? "" : `${mbit(link.measured_per_s)} of `}${mbit(link.planned_per_s)} Mbit/s`;
  const text = link.state === "broken" ? "✕ broken" : sign + rate, w = text.length * 6.4 + 14;
  const at = Math.min(width - w / 2 - 2, Math.max(w / 2 + 2, x));
  return element("g", { class: "label", "data-tip": tip },
    element("rect", { x: at - w / 2, y: y - 10, width: w, height: 20, rx: 10 }),
    element("text", { x: at, y: y + 4, "text-anchor": "middle" }, text));
}

function deviceOf(device, { x, y }, radius, cell) {
  const ring = 2 * Math.PI * radius, works = device.state === "working" || device.state === "done";
  const tip = [
    `${device.name}: ${device.state}`,
    device.stages.length ? `stage ${device.stages.join(", ")}` : "",
    [flops(device.flops_per_s), device.hardware].filter(Boolean).join(", "),
    Math.abs(device.believed - 1) > 0.02 ? `measured ${share(device.believed)} of that` : "",
    device.busy != null ? `busy ${share(device.busy)} of the last step` : "",
  ].filter(Boolean).join("\n");
  const arc = `M${x} ${y - radius}A${radius} ${radius} 0 1 1 ${x - 0.01} ${y - radius}`;
  const name = device.name.length * 6 > cell ? `${device.name.slice(0, cell / 6 - 1)}…` : device.name;
  return element("g", seen(tip, { class: `device ${device.state}`, "data-device": device.name }),
    element("circle", { class: "disc", cx: x, cy: y, r: radius }),
    element("circle", { class: "ring", cx: x, cy: y, r: radius }),
    works ? element("path", { class: "busy", d: arc, "stroke-dasharray": `${ring * (device.busy ?? 0)} ${ring}` }) : null,
    element("text", { class: "stage", x, y: y + 5 }, SIGNS[device.state] ?? (device.stages.join("+") || "–")),
    cell > 50 ? element("text", { class: "name", x, y: y + radius + 15 }, name) : null);
}

export function drawMap(at) {
  const width = Math.max(280, $("map").clientWidth), { boxes, cell, height } = boxesOf(at.regions, width);
  const where = {}, radius = cell * 0.27, most = Math.max(1, ...at.links.map((link) => link.bytes));
  for (const box of boxes) {
    box.devices.forEach((device, k) => {
      const x = box.x + 8 + (box.w - 16) / box.columns * (k % box.columns + 0.5);
      const y = box.y + 28 + (cell + 4) * (Math.floor(k / box.columns) + 0.42);
      where[device.name] = { x, y, region: box.name };
    });
  }
  const ends = (link) => link.ends.map((name) => where[name]), far = ([a, b]) => a.region !== b.region;
  const links = at.links.map((link) => linkOf(link, ends(link), radius, most));
  const labels = at.links.map((link, k) => far(ends(link)) ? labelOf(link, links[k], width) : null);
  fill("map", element("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": "Map of the fleet" },
    ...boxes.map((box) => element("rect", { class: "region", x: box.x, y: box.y, width: box.w, height: box.h, rx: 12 })),
    ...boxes.map((box) => element("text", { class: "place", x: box.x + 11, y: box.y + 19 }, box.name)),
    ...links.map((link) => link.drawn),
    ...boxes.flatMap((box) => box.devices.map((device) => deviceOf(device, where[device.name], radius, cell))),
    ...(links.length > MOST_LABELS ? [] : labels)));
  const { step_s: step, bottleneck } = at.predicted;
  $("map-note").textContent = `${at.planner} plan ${at.plans || ""}: a step should take ${time(step)}; limited by ${bottleneck}`;
}
