"use strict";
// One run, several side by side, or the list of runs: by the address. The server says what was; nothing is computed here.
const $ = (id) => document.getElementById(id);
const query = new URLSearchParams(location.search);
const chosen = { runs: query.getAll("run"), moment: null, step: null, span: null };
let run = null, at = null, bars = null, charts = {}, pending = false, again = "";

// What people read

const number = (x, digits = 3) => x == null || !isFinite(x) ? "–" : Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en") : String(+x.toPrecision(digits));
const scaled = (x, base, names) => { if (x == null) return "–"; let k = 0; while (Math.abs(x) >= base && k < names.length - 1) { x /= base; k++; } return `${number(x)} ${names[k]}`; };
const size = (x) => scaled(x, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
const bits = (x) => x == null ? "–" : scaled(8 * x, 1000, ["bit/s", "kbit/s", "Mbit/s", "Gbit/s"]);
const flops = (x) => scaled(x, 1000, ["FLOPS", "kFLOPS", "MFLOPS", "GFLOPS", "TFLOPS", "PFLOPS"]);
const share = (x) => x == null ? "–" : `${Math.round(100 * x)} %`;
const time = (s) => s == null || !isFinite(s) ? "–" : s < 1e-3 ? `${number(1e6 * s)} µs` : s < 1 ? `${number(1e3 * s)} ms` : s < 120 ? `${number(s)} s` : s < 7200 ? `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s` : `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min`;
const clock = (s) => [s / 3600, s / 60 % 60, s % 60].map((x) => String(Math.floor(x)).padStart(2, "0")).join(":");

// Elements: text is always text, whatever names a file holds

function element(tag, attributes = {}, ...children) {
  const drawn = ["svg", "g", "circle", "rect", "path", "line", "text"].includes(tag);
  const made = drawn ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, set] of Object.entries(value)) made.style.setProperty(key, set);
    else if (value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}
const rounded = (x) => x.toFixed(1);
const fill = (id, ...children) => $(id).replaceChildren(...children);
const table = (columns, rows) => element("table", {}, element("thead", {}, element("tr", {}, ...columns.map(([name, kind]) => element("th", { class: kind, scope: "col" }, name)))), element("tbody", {}, ...rows));
const row = (cells, attributes = {}) => element("tr", attributes, ...cells.map(([content, kind, title]) => element("td", { class: kind, title }, content ?? "–")));
const pill = (state) => element("span", { class: `pill ${state}` }, state);

async function ask(what, parameters = {}) {
  const answer = await fetch(`/api/${what}?${new URLSearchParams(Object.entries(parameters).filter(([, value]) => value != null))}`);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}
const say = (text) => { $("problem").textContent = text; $("problem").hidden = !text; };

// Charts

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
function chart(id, series, data, options = {}) {
  const place = $(id), key = JSON.stringify(series);
  if (charts[id]?.key === key) { charts[id].marker = options.marker; charts[id].plot.setData(data); return; }
  charts[id]?.plot.destroy();
  const kept = charts[id] = { key, marker: options.marker };
  const axis = { stroke: colour("soft"), grid: { stroke: colour("faint"), width: 1 }, ticks: { show: false }, font: `${Math.round(parseFloat(getComputedStyle(document.documentElement).fontSize) * .75)}px system-ui` };
  const mark = (plot) => {
    if (kept.marker == null || kept.marker < plot.scales.x.min || kept.marker > plot.scales.x.max) return;
    const x = plot.valToPos(kept.marker, "x", true), { top, height } = plot.bbox, pen = plot.ctx;
    pen.save(); pen.strokeStyle = colour("ink"); pen.setLineDash([4, 4]); pen.beginPath(); pen.moveTo(x, top); pen.lineTo(x, top + height); pen.stroke(); pen.restore();
  };
  kept.plot = new uPlot({
    width: place.clientWidth, height: place.clientHeight - 34, padding: [10, 10, 0, 0], scales: { x: { time: false }, y: options.range ? { range: options.range } : {} },
    axes: [axis, { ...axis, size: 62, values: (_, ticks) => ticks.map((x) => options.shown ? options.shown(x) : number(x)) }],
    series: [{ label: options.x ?? "step" }, ...series.map(([label, name, dash, gaps]) => ({ label, stroke: colour(name), width: 2, dash, spanGaps: !gaps, points: { show: dash == null && data[0].length < 40, size: 5 }, value: (_, x) => x == null ? "–" : options.shown ? options.shown(x) : number(x, 4) }))],
    bands: options.bands, legend: { live: true }, cursor: { drag: { x: true, y: false } }, hooks: { draw: [mark] },
  }, data, place);
}
const redraw = () => { for (const { plot } of Object.values(charts)) plot.destroy(); charts = {}; if (run) show(); };
function joined(...curves) { // several curves over the steps of all
  return uPlot.join(curves.map(({ step, loss }) => [step, loss]));
}

// The map: regions, their devices, and the links that the plan uses

function places(regions, width) {
  const cell = regions.some((r) => r.devices.length > 12) ? 46 : width < 560 ? 66 : 88, tall = width < 560;
  const boxes = regions.map((r) => {
    const columns = Math.max(1, Math.min(Math.ceil(Math.sqrt(r.devices.length * (tall ? 1 : 1.3))), Math.floor((width - 40) / cell)));
    return { r, columns, w: Math.max(columns * cell + 16, 90), h: Math.ceil(r.devices.length / columns) * (cell + 4) + 30 };
  });
  const n = boxes.length, high = Math.max(...boxes.map((b) => b.h)), wide = Math.max(...boxes.map((b) => b.w));
  let height;
  if (tall || n > 10) {
    let x = 0, y = 8, line = 0;
    boxes.forEach((b, k) => {
      if (tall ? k : x + b.w > width) { x = 0; y += line + 44; line = 0; }
      b.x = tall ? (n === 1 ? (width - b.w) / 2 : k % 2 ? width - b.w - 6 : 6) : x; b.y = y; x += b.w + 24; line = Math.max(line, b.h);
    });
    height = y + line + 8;
  } else {
    height = Math.max(n > 2 ? 2.25 * high : high + 90, Math.min(440, width * .5));
    boxes.forEach((b, k) => {
      const turn = n === 2 ? Math.PI * (k + 1) : 2 * Math.PI * k / n - Math.PI / 2 - (n === 4 ? Math.PI / 4 : 0);
      b.x = width / 2 + Math.cos(turn) * (n === 1 ? 0 : (width - wide) / 2 - 8) - b.w / 2; b.y = height / 2 + Math.sin(turn) * (n < 3 ? 0 : (height - high) / 2 - 8) - b.h / 2;
    });
  }
  return { boxes, height, cell };
}
function drawMap() {
  const width = Math.max(280, $("map").clientWidth), { boxes, height, cell } = places(at.regions, width), where = {}, radius = cell * .27;
  for (const b of boxes) b.r.devices.forEach((d, k) => { where[d.name] = { x: b.x + 8 + (b.w - 16) / b.columns * (k % b.columns + .5), y: b.y + 28 + (cell + 4) * (Math.floor(k / b.columns) + .42), region: b.r.name }; });
  const most = Math.max(1, ...at.links.map((l) => l.bytes)), lines = [], labels = [];
  for (const l of at.links) {
    const [a, b] = l.ends.map((name) => where[name]), dx = b.x - a.x, dy = b.y - a.y, long = Math.hypot(dx, dy) || 1, trim = (radius + 5) / long, bend = a.region === b.region ? 0 : .16;
    const [x1, y1, x2, y2] = [a.x + dx * trim, a.y + dy * trim, b.x - dx * trim, b.y - dy * trim], cx = (x1 + x2) / 2 - dy * bend, cy = (y1 + y2) / 2 + dx * bend;
    const state = { used: "", slow: "slower than planned", broken: "broken" }[l.state];
    const tip = `${l.ends.join(" – ")}${state ? `: ${state}` : ""}\nplanned ${bits(l.planned_per_s)}, ${time(l.latency_s)} latency\nmeasured ${l.measured_per_s == null ? "nothing yet" : `${bits(l.measured_per_s)} (${share(l.share)})`}\n${size(l.bytes)} in the last step; ${l.what}`;
    lines.push(element("path", { class: `link ${l.state}`, d: `M${rounded(x1)} ${rounded(y1)}Q${rounded(cx)} ${rounded(cy)} ${rounded(x2)} ${rounded(y2)}`, style: { "stroke-width": 1.6 + 3.4 * Math.sqrt(l.bytes / most) }, tabindex: 0, role: "img", "aria-label": tip, "data-tip": tip, "data-link": l.ends.join("|") }));
    if (a.region !== b.region && at.links.length <= 16) {
      const text = l.state === "broken" ? "✕ broken" : `${l.state === "slow" ? "▼ " : ""}${l.measured_per_s == null ? "" : `${number(8e-6 * l.measured_per_s, 2)} of `}${number(8e-6 * l.planned_per_s, 2)} Mbit/s`, w = text.length * 6.4 + 14;
      const x = Math.min(width - w / 2 - 2, Math.max(w / 2 + 2, (x1 + 2 * cx + x2) / 4)), y = (y1 + 2 * cy + y2) / 4;
      labels.push(element("g", { class: "label", "data-tip": tip }, element("rect", { x: x - w / 2, y: y - 10, width: w, height: 20, rx: 10 }), element("text", { x, y: y + 4, "text-anchor": "middle" }, text)));
    }
  }
  const regions = boxes.map((b) => element("g", {}, element("rect", { class: "region", x: b.x, y: b.y, width: b.w, height: b.h, rx: 12 }), element("text", { class: "soft", x: b.x + 11, y: b.y + 19, style: { "font-size": ".8rem" } }, b.r.name)));
  const devices = boxes.flatMap((b) => b.r.devices.map((d) => {
    const { x, y } = where[d.name], ring = 2 * Math.PI * radius, sign = { lost: "✕", left: "→", paused: "‖" }[d.state];
    const tip = `${d.name}: ${d.state}${d.stages.length ? `\nstage ${d.stages.join(", ")}` : ""}\n${flops(d.flops_per_s)}${d.believed && Math.abs(d.believed - 1) > .02 ? `, measured ${share(d.believed)} of it` : ""}${d.hardware ? `, ${d.hardware}` : ""}${d.busy != null ? `\nbusy ${share(d.busy)} of the last step` : ""}`;
    return element("g", { class: `device ${d.state}`, tabindex: 0, role: "img", "aria-label": tip, "data-tip": tip, "data-device": d.name },
      element("circle", { class: "disc", cx: x, cy: y, r: radius }), element("circle", { class: "ring", cx: x, cy: y, r: radius }),
      d.state === "working" || d.state === "done" ? element("path", { class: "busy", d: `M${x} ${y - radius}A${radius} ${radius} 0 1 1 ${x - .01} ${y - radius}`, "stroke-dasharray": `${ring * (d.busy ?? 0)} ${ring}` }) : null,
      element("text", { x, y: y + 5, "text-anchor": "middle", style: { "font-size": ".85rem", "font-weight": 600 } }, sign ?? (d.stages.join("+") || "–")),
      cell > 50 ? element("text", { class: "soft", x, y: y + radius + 15, "text-anchor": "middle", style: { "font-size": ".72rem" } }, d.name.length * 6 > cell ? `${d.name.slice(0, cell / 6 - 1)}…` : d.name) : null);
  }));
  fill("map", element("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": "Map of the fleet" }, ...regions, ...lines, ...devices, ...labels));
  $("map-note").textContent = `${at.planner} plan ${at.plans || ""}: a step should take ${time(at.predicted_step_s)}; limited by ${at.bottleneck}`;
  fill("map-legend", ...[["blue", "solid", "link in use"], ["amber", "dashed", "slower than planned ▼"], ["red", "dotted", "broken ✕"]].map(([name, kind, text]) => element("span", {}, element("i", { style: { "border-color": `var(--${name})`, "border-top-style": kind } }), text)), element("span", {}, "number: stage · ring: busy share · dashed circle: unused"));
}

// Stages, events, rounds

const meter = (x, of, name, planned) => element("span", { class: "meter" }, element("span", { style: { width: `${Math.min(100, 100 * (x ?? 0) / (of || 1))}%`, background: `var(--${name})` } }), planned != null ? element("u", { style: { left: `${Math.min(100, 100 * planned / (of || 1))}%` } }) : null);
function drawStages() {
  fill("stages", table([["stage"], ["device"], ["layers"], ["weights", "n"], ["memory"], ["busy"]], at.stages.map((s) => row([
    [run.replicas > 1 ? `${s.replica}.${s.number}` : String(s.number)], [`${s.device}${s.state === "lost" ? " ✕ lost" : ""}`], [`${s.first_op} … ${s.last_op}`, "ops", `${s.first_op} … ${s.last_op}`], [size(s.parameter_bytes), "n"],
    [element("span", { "data-tip": `planned ${size(s.memory_bytes)} of ${size(s.memory_available_bytes)}${s.peak_bytes ? `\nmeasured ${size(s.peak_bytes)}${s.resident ? " (whole process)" : ""}` : ""}` }, meter(s.peak_bytes && !s.resident ? s.peak_bytes : s.memory_bytes, s.memory_available_bytes, "green"), `${size(s.memory_bytes)} of ${size(s.memory_available_bytes)}`)],
    [element("span", { "data-tip": `busy ${share(s.busy)}, planned ${share(s.predicted_busy)} (the line)` }, meter(s.busy, 1, "blue", s.predicted_busy), `${share(s.busy)}`)],
  ], { class: s.state }))));
}
const SIGNS = { lost: "✕", joined: "+", left: "→", planned: "◆", back: "↩", saved: "▪", began: "▶", ended: "■", note: "·" };
function drawEvents() {
  const now = at.moment;
  const list = run.marks.map((m) => element("li", {}, element("button", { class: `${m.kind}${m.moment > now ? " future" : ""}`, "data-moment": m.moment, onclick: () => go(m.moment) },
    element("time", {}, clock(m.at_s)), element("span", { "aria-hidden": true }, SIGNS[m.kind] ?? "·"), element("span", {}, [{ lost: `${m.device} is lost`, joined: `${m.device} joined`, left: `${m.device} has left`, back: `goes on after step ${m.step}`, saved: `checkpoint of step ${m.step}`, began: m.step > 0 ? `resumed after step ${m.step}` : "the run begins", ended: "the run ended" }[m.kind], m.text].filter(Boolean).join(": ")))));
  fill("events", ...list);
  const last = [...list].reverse().find((item) => !item.querySelector(".future"));
  last?.firstChild.classList.add("now");
  if (last) $("events").scrollTop = last.offsetTop - $("events").offsetTop - $("events").clientHeight / 2;
}
function drawRounds() {
  const r = run.rounds, marker = { marker: at.step, x: "round" };
  chart("loss", [["held-out loss", "orange"], ["accuracy", "blue"]].slice(0, r.accuracy.some((x) => x != null) ? 2 : 1), [r.round, r.loss, r.accuracy].slice(0, r.accuracy.some((x) => x != null) ? 3 : 2), marker);
  chart("spread", [["mean + deviation", "line"], ["mean − deviation", "line"], ["mean", "green"], ["worst tenth", "red", [6, 4]]], [r.round, r.high, r.low, r.mean, r.worst], { ...marker, shown: share, bands: [{ series: [1, 2], fill: `${colour("green")}22` }] });
  chart("times", [["measured", "blue"], ["forecast", "orange", [6, 4]]], [r.round, r.makespan_s, r.planned_s], { ...marker, shown: time });
  fill("rounds", table([["round"], ["clients", "n"], ["time", "n"], ["forecast", "n"], ["stolen", "n"], ["refused", "n"], ["missing", "n"], ["late", "n"], ["closed by"]], [...r.table].reverse().map((t) => row([
    [String(t.round)], [t.clients, "n"], [time(t.makespan_s), "n"], [time(t.planned_s), "n"], [t.stolen, "n"], [t.refused.length, "n", t.refused.join("\n")], [t.missing, "n"], [t.late, "n"], [t.closed_by]], { "data-round": t.round }))));
}

// The timeline

const NAMES = { F: "forward", B: "backward", update: "update", E: "evaluation", forward: "activations", backward: "gradients", client: "client", other: "other" };
function drawTimeline() {
  if (!bars || bars.problem) { fill("bars", element("p", { class: "soft" }, bars?.problem ?? "")); $("timeline-note").textContent = ""; return; }
  const width = Math.max(280, $("bars").clientWidth), names = width < 560 ? 74 : 150, scale = (width - names - 6) / (bars.to_s - bars.from_s), line = 17, kinds = new Set();
  let y = 4;
  const lanes = [], drawn = [], words = [], hits = [];
  for (const [title, part] of [["predicted", bars.predicted], ["measured", bars.measured]]) {
    if (!part?.rows.length) continue;
    words.push(element("text", { x: 0, y: y + 13, style: { "font-size": ".82rem", "font-weight": 620 } }, title), element("text", { class: "soft", x: names, y: y + 13, style: { "font-size": ".78rem" } }, time(part.step_s)));
    y += 22;
    for (const r of part.rows) {
      const box = { x: names, y, width: width - names - 6, height: line - 3 }, paths = {};
      lanes.push(element("rect", { class: "lane", rx: 3, ...box }));
      words.push(element("text", { class: "soft", x: r.track === "compute" ? 0 : 14, y: y + 11, style: { "font-size": ".7rem" } }, r.track === "compute" ? r.device : r.track));
      for (const [start, end, name, micro, , count, busy] of r.bars) {
        const kind = NAMES[name] ? name : "other", x = Math.max(names, names + (start - bars.from_s) * scale), w = Math.max(.7, names + (Math.min(end, bars.to_s) - bars.from_s) * scale - x), h = (line - 3) * (count > 1 ? Math.max(.2, busy) : 1);
        kinds.add(kind); (paths[kind] ??= []).push(`M${rounded(x)} ${rounded(y + line - 3 - h)}h${w.toFixed(2)}v${rounded(h)}h${(-w).toFixed(2)}z`);
        if (w > 26 && count === 1 && micro >= 0 && r.bars.length < 400) words.push(element("text", { class: "inside", x: x + w / 2, y: y + 11, "text-anchor": "middle", style: { "font-size": ".66rem" } }, name.length < 3 ? `${name}${micro}` : micro));
      }
      drawn.push(...Object.entries(paths).map(([kind, d]) => element("path", { class: kind, d: d.join(""), "data-part": title, "data-kind": kind })));
      hits.push(element("rect", { fill: "transparent", "data-row": JSON.stringify([title, r.device, r.track]), ...box }));
      y += line;
    }
    y += 12;
  }
  if (bars.planned_s != null) {
    const x = names + bars.planned_s * scale;
    words.push(element("line", { class: "forecast", x1: x, x2: x, y1: 20, y2: y }), element("text", { x: x - 5, y: 14, "text-anchor": "end", style: { "font-size": ".75rem" } }, `forecast ${time(bars.planned_s)}`));
  }
  fill("bars", element("svg", { viewBox: `0 0 ${width} ${y}`, height: y, role: "img", "aria-label": "Predicted and measured bars" }, ...lanes, ...drawn, ...words, ...hits));
  const [p, m] = [bars.predicted?.step_s, bars.measured?.step_s];
  $("timeline-note").textContent = p && m ? `predicted ${time(p)}, measured ${time(m)} (predicted ${p < m ? "less" : "more"} by ${share(Math.abs(p - m) / m)})` : "";
  fill("bar-legend", ...Object.keys(NAMES).filter((kind) => kinds.has(kind)).map((kind) => element("span", {}, element("b", { style: { background: `var(--${{ F: "blue", B: "amber", update: "green", E: "pink", forward: "sky", backward: "orange", client: "blue", other: "soft" }[kind]})` } }), NAMES[kind])));
}
async function askBars() {
  if (!run?.moments || run.problem) return;
  const step = chosen.step ?? Math.max(1, at?.step || 1);
  $("step").value = step;
  const width = Math.max(280, $("bars").clientWidth), [from, to] = chosen.span ?? [];
  bars = await ask("timeline", { run: chosen.runs[0], step, from, to, columns: Math.round(width) });
  bars.round = run.kind === "federated";
  drawTimeline();
}
function zoom(factor, middle = .5) {
  if (!bars || bars.from_s == null) return;
  const long = bars.to_s - bars.from_s, pivot = bars.from_s + middle * long;
  chosen.span = [pivot - middle * long * factor, pivot + (1 - middle) * long * factor]; askBars();
}
function move(part) { if (bars?.from_s != null) { const by = part * (bars.to_s - bars.from_s); chosen.span = [bars.from_s + by, bars.to_s + by]; askBars(); } }
function pick(step) { chosen.step = Math.max(1, step); chosen.span = null; askBars(); }

// All of a run

function figures() {
  const f = run.kind === "federated", r = at.round, last = r?.table?.[0];
  const cells = f ? [["round", `${at.step} of ${run.of}`], ["held-out loss", number(r?.loss?.[0], 4)], ["accuracy", share(r?.accuracy?.[0])], ["clients", last?.clients, `${last?.refused.length ?? 0} refused, ${last?.stolen ?? 0} stolen, ${last?.missing ?? 0} missing`], ["round time", time(last?.makespan_s), `forecast ${time(last?.planned_s)}`], ["bytes", size(r?.bytes?.[0])]]
    : [["step", `${at.step} of ${run.of}`], ["loss", number(at.loss, 4)], ["held-out loss", number(at.heldout, 4)], [run.speed_curve.unit || "speed", number(at.per_s)], ["step time", run.comparison ? time(run.comparison.measured_step_s) : bars?.measured ? time(bars.measured.step_s) : "–", `predicted ${time(run.comparison?.predicted_step_s ?? at.predicted_step_s)}`], ["bytes per step", size(at.step_bytes), `${size(at.sent_bytes)} in all`]];
  if (run.privacy?.epsilon != null) cells.push(["epsilon", number(run.privacy.epsilon), `at delta ${run.privacy.delta}${run.privacy.rounds ? `, ${run.privacy.rounds} rounds` : ""}`]);
  fill("figures", ...cells.map(([name, value, more]) => element("div", { "data-figure": name }, element("dt", {}, name), element("dd", {}, String(value ?? "–")), element("small", { title: more }, more ?? ""))));
}
function show() {
  document.title = `${run.state === "running" ? "● " : ""}${run.name} – Isthmus`;
  $("title").textContent = run.name; $("state").className = `pill ${run.state}`; $("state").textContent = run.state;
  $("facts").textContent = [run.model, run.place, run.folder, run.unread ? `${run.unread} lines could not be read` : ""].filter(Boolean).join(" · ");
  $("run").hidden = $("slider").hidden = !!run.problem || !run.moments;
  say(run.problem || (run.moments ? "" : "The run has begun, and nothing is done yet: devices are being called."));
  if ($("run").hidden) return;
  const federated = run.kind === "federated";
  $("run").classList.toggle("federated-run", federated);
  for (const [kind, is] of [["federated", federated], ["pipeline", !federated]]) for (const card of document.querySelectorAll(`.card.${kind}`)) card.hidden = !is;
  document.querySelector(".card.events").hidden = federated; $("step-unit").textContent = federated ? "round" : "step";
  figures();
  if (federated) drawRounds(); else {
    const { speed_curve: speed } = run, marker = { marker: at.step };
    chart("loss", [["training", "blue"], ["held out", "orange", [7, 4]]], joined(run.loss_curve, run.heldout_curve), marker);
    $("speed-title").textContent = speed.unit || "Speed";
    chart("speed", [[speed.unit || "speed", "green"]], [speed.step, speed.per_s], { ...marker, range: (_, __, top) => [0, (top || 1) * 1.1] });
    chart("bytes", [["sent by all devices", "pink"]], [speed.step, speed.bytes], { ...marker, shown: size, range: (_, __, top) => [0, (top || 1) * 1.1] });
    if (at.regions) { drawMap(); drawStages(); }
    drawEvents();
  }
  const last = run.moments - 1, slider = $("moment");
  slider.max = last; slider.value = at.moment;
  fill("ticks", ...run.marks.filter((m) => ["lost", "planned", "joined", "left", "ended"].includes(m.kind)).map((m) => element("i", { class: m.kind, style: { left: `${100 * m.moment / Math.max(1, last)}%` } })));
  $("when").textContent = federated ? `round ${at.step} of ${run.of}` : `${run.timed ? `${clock(at.at_s ?? 0)} · ` : ""}step ${at.step}`;
  slider.setAttribute("aria-valuetext", $("when").textContent);
  $("live").setAttribute("aria-pressed", chosen.moment == null); $("live").textContent = run.state === "running" ? "live" : "end";
}
async function refresh(whole = true) { // one at a time: what comes meanwhile is asked for once more
  if (pending) { again = whole ? "whole" : again || "part"; return; }
  pending = true;
  try {
    if (whole || !run) run = await ask("run", { run: chosen.runs[0] });
    if (!run.problem && run.moments) at = await ask("at", { run: chosen.runs[0], moment: chosen.moment });
    show();
    if (!chosen.span) await askBars();
    if (at && run.moments) figures();
  } catch (error) { say(error.message); } finally {
    pending = false;
    if (again) { const what = again; again = ""; refresh(what === "whole"); }
  }
}
function go(moment) {
  chosen.moment = moment == null || moment >= run.moments - 1 ? null : Math.max(0, moment); chosen.step = null; chosen.span = null;
  refresh(false);
}
function goEvent(way) {
  const found = run.marks.filter((m) => way > 0 ? m.moment > at.moment : m.moment < at.moment);
  if (found.length) go(found.at(way > 0 ? 0 : -1).moment);
}

// Several runs, and the list

async function compare() {
  const runs = await Promise.all(chosen.runs.map((name) => ask("run", { run: name })));
  $("title").textContent = `${runs.length} runs side by side`; $("compare").hidden = false;
  const rows = [["state", (r) => pill(r.state)], ["done", (r) => `${r.done} of ${r.of} ${r.unit}`], ["loss", (r) => number(r.loss ?? r.rounds?.loss.findLast((x) => x != null), 4)], ["held-out loss", (r) => number(r.heldout_curve?.loss.at(-1), 4)], ["speed", (r) => `${number(r.speed_curve?.per_s.findLast((x) => x != null))} ${r.speed_curve?.unit ?? ""}`], ["step, measured", (r) => time(r.comparison?.measured_step_s)], ["step, predicted", (r) => time(r.comparison?.predicted_step_s)], ["devices lost", (r) => String(r.marks?.filter((m) => m.kind === "lost").length ?? "–")]];
  const losses = runs.flatMap((r) => r.kind === "federated" ? r.rounds?.loss ?? [] : r.loss_curve?.loss ?? []).filter((x) => x != null), range = [Math.min(...losses) * .95, Math.max(...losses) * 1.02];
  fill("compare", ...runs.map((r, k) => element("section", { class: "card compared" }, element("h2", {}, element("a", { href: `?run=${encodeURIComponent(chosen.runs[k])}` }, r.name)), r.problem ? element("p", {}, r.problem) : element("div", { class: "chart", id: `compared-${k}` }), table([["figure"], ["", "n"]], rows.map(([name, get]) => row([[name], [r.problem ? "–" : get(r), "n"]]))))));
  runs.forEach((r, k) => { if (!r.problem) r.kind === "federated" ? chart(`compared-${k}`, [["loss", "orange"]], [r.rounds.round, r.rounds.loss], { range: () => range, x: "round" }) : chart(`compared-${k}`, [["training", "blue"], ["held out", "orange", [7, 4]]], joined(r.loss_curve, r.heldout_curve), { range: () => range }); });
}
async function list() {
  const { runs, fleet } = await ask("runs");
  if (runs.length === 1 && !fleet) { chosen.runs = [runs[0].id]; follow(runs[0].id, () => refresh()); return refresh(); }
  const chosenNow = new Set([...document.querySelectorAll("#list input:checked")].map((box) => box.value));
  $("title").textContent = fleet ? "Fleet" : "Runs"; $("list").hidden = false; $("facts").textContent = fleet?.folder ?? "";
  if (fleet) { $("state").className = `pill ${fleet.coordinator ? "running" : "away"}`; $("state").textContent = fleet.coordinator ? "serving" : "no coordinator serves it"; }
  const here = fleet?.coordinator, open = (names) => { location.search = names.map((name) => `run=${encodeURIComponent(name)}`).join("&"); };
  const links = here ? [...here.links, ...here.relayed.filter((l) => !here.links.some((k) => k.devices.join() === l.devices.join())).map((l) => ({ relayed: true, ...l }))] : [];
  fill("list", ...[
    here && element("section", { class: "card" }, element("h2", {}, "Devices here"), element("div", { class: "scroll" }, table([["device"], ["hardware"], [""], ["id"]], here.devices.map((d) => row([[d.name], [d.hardware], [d.working ? "at work" : "idle"], [d.id]]))))),
    links.length ? element("section", { class: "card" }, element("h2", {}, "Links in use"), table([["link"], ["way"], ["latency", "n"], ["relayed", "n"]], links.map((l) => row([[l.devices.join(" – ")], [l.relayed ? "relayed" : "direct"], [time(l.latency_s), "n"], [l.relayed ? size(l.carried_bytes) : "–", "n"]])))) : null,
    fleet && element("section", { class: "card" }, element("h2", {}, "Jobs"), table([["job", "n"], ["name"], ["state"], ["took", "n"], [""]], fleet.jobs.map((j) => row([[j.number, "n"], [j.run ? element("a", { href: `?run=${encodeURIComponent(j.run)}` }, j.name) : j.name], [pill(j.state)], [time(j.took_s), "n"], [j.detail]])))),
    element("section", { class: "card" }, element("h2", {}, "Runs"), runs.length ? element("div", { class: "scroll" }, table([[""], ["run"], ["state"], ["done"], ["loss", "n"], ["where"]], runs.map((r) => row([[element("input", { type: "checkbox", value: r.id, "aria-label": `compare ${r.id}` })], [element("a", { href: `?run=${encodeURIComponent(r.id)}` }, r.id)], [pill(r.state)], [r.problem || `${r.done} of ${r.of} ${r.unit}`], [number(r.loss, 4), "n"], [r.place]])))) : element("p", {}, "There is no run here yet. `isthmus train` begins one, and it will appear."),
      runs.length > 1 ? element("button", { id: "side-by-side", onclick: () => { const names = [...document.querySelectorAll("#list input:checked")].map((box) => box.value); if (names.length) open(names); } }, "Show the chosen ones side by side") : null),
  ].filter(Boolean));
  for (const box of document.querySelectorAll("#list input")) box.checked = chosenNow.has(box.value);
}
function follow(name, changed) {
  const source = new EventSource(`/api/changes?run=${encodeURIComponent(name)}`);
  let timer = null, seen = false;
  source.addEventListener("changed", () => { if (!seen) { seen = true; return; } clearTimeout(timer); timer = setTimeout(changed, 150); });
  source.onerror = () => { $("state").className = "pill away"; $("state").textContent = "the page's server does not answer"; seen = false; };
  source.onopen = () => { if ($("state").textContent.startsWith("the page")) changed(); };
}

// Hands

const tip = (text, x, y) => { const t = $("tip"); t.hidden = !text; if (!text) return; t.textContent = text; t.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - t.offsetWidth - 8))}px`; t.style.top = `${y + 18 + t.offsetHeight > innerHeight ? y - t.offsetHeight - 10 : y + 18}px`; };
function underPointer(target, event) {
  if (!target.dataset.row) return target.closest?.("[data-tip]")?.dataset.tip;
  const [part, device, track] = JSON.parse(target.dataset.row), box = target.getBoundingClientRect(), s = bars.from_s + (event.clientX - box.left) / box.width * (bars.to_s - bars.from_s);
  const found = bars[part].rows.find((r) => r.device === device && r.track === track)?.bars.find(([start, end]) => start <= s && s <= end);
  return found && (found[5] > 1 ? `${device}: ${found[5]} spans, mostly ${NAMES[found[2]] ?? found[2]}, ${share(found[6])} busy` : `${device}: ${NAMES[found[2]] ?? found[2]}${found[3] >= 0 ? ` ${found[3]}` : ""}${found[4] ? `, ${track === "send" ? "to " : ""}${found[4]}` : ""}\n${time(found[1] - found[0])}, from ${time(Math.max(0, found[0]))}`);
}
addEventListener("pointermove", (e) => tip(e.target.closest ? underPointer(e.target, e) : "", e.clientX, e.clientY));
addEventListener("focusin", (e) => { const box = e.target.getBoundingClientRect?.(); tip(e.target.dataset?.tip, box?.right ?? 0, box?.top ?? 0); });
addEventListener("keydown", (e) => {
  if (e.target.matches?.("input[type=number], input[type=checkbox], select") || e.ctrlKey || e.metaKey || e.altKey) return;
  if (e.key === "t") return $("theme").click();
  if (e.key === "?") return $("help").showModal();
  if (!run || $("run").hidden || $("help").open) return;
  const inBars = document.activeElement === $("bars"), acts = { "[": () => $("step-back").click(), "]": () => $("step-on").click(), "+": () => zoom(.5), "=": () => zoom(.5), "-": () => zoom(2), 0: () => pick(bars.step), Home: () => go(0), End: () => go(null),
    ArrowLeft: () => inBars ? move(-.25) : e.shiftKey ? goEvent(-1) : go(at.moment - 1), ArrowRight: () => inBars ? move(.25) : e.shiftKey ? goEvent(1) : go(at.moment + 1) };
  if (acts[e.key]) { e.preventDefault(); acts[e.key](); }
});
function theme(name) { document.documentElement.dataset.theme = name; redraw(); }
document.documentElement.dataset.theme = localStorage.getItem("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
$("theme").onclick = () => { const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; localStorage.setItem("theme", name); theme(name); };
$("keys").onclick = () => $("help").showModal();
$("moment").oninput = (e) => go(+e.target.value);
$("back").onclick = () => go(at.moment - 1); $("on").onclick = () => go(at.moment + 1); $("live").onclick = () => go(null);
$("step").onchange = (e) => pick(+e.target.value); $("step-back").onclick = () => pick(+$("step").value - 1); $("step-on").onclick = () => pick(+$("step").value + 1);
$("zoom-in").onclick = () => zoom(.5); $("zoom-out").onclick = () => zoom(2); $("zoom-all").onclick = () => pick(+$("step").value);
$("bars").addEventListener("wheel", (e) => { if (!bars?.to_s) return; e.preventDefault(); const box = $("bars").getBoundingClientRect(); e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY) ? move(Math.sign(e.deltaX || e.deltaY) * .15) : zoom(e.deltaY > 0 ? 1.3 : .77, Math.min(1, Math.max(0, (e.clientX - box.left) / box.width))); }, { passive: false });
let drag = null;
$("bars").addEventListener("pointerdown", (e) => { drag = e.clientX; });
addEventListener("pointerup", (e) => { if (drag != null && Math.abs(e.clientX - drag) > 5) move((drag - e.clientX) / $("bars").clientWidth); drag = null; });
let resized = null;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => { redraw(); if (bars) askBars(); }, 120); });
(async () => {
  try {
    if (chosen.runs.length > 1) await compare();
    else if (chosen.runs.length === 1) { follow(chosen.runs[0], () => refresh()); await refresh(); }
    else { await list(); if (!chosen.runs.length) follow("", () => list()); }
  } catch (error) { say(error.message); }
})();
