// What the page shows is in its address: one run, several side by side, or the list. The server says what was.
import { forget } from "./charts.js";
import { drawMap } from "./map.js";
import { drawCurves, drawEvents, drawFigures, drawRounds, drawStages, drawTicks } from "./run.js";
import { drawCompared, drawList } from "./runs.js";
import { $, clock, element, fill } from "./text.js";
import { barText, drawTimeline } from "./timeline.js";

const page = { runs: new URLSearchParams(location.search).getAll("run"), moment: null, step: null, span: null };
globalThis.page = page; // for tests

async function ask(what, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value != null);
  const answer = await fetch(`/api/${what}?${new URLSearchParams(given)}`);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}
function say(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}
function showState(state, text = state) {
  $("state").className = `pill ${state}`;
  $("state").textContent = text;
}

// One run

function show() {
  const { run, at } = page, federated = run.unit === "round", kinds = { federated, pipeline: !!at?.regions };
  document.title = `${run.state === "running" ? "● " : ""}${run.name} – Isthmus`;
  $("title").textContent = run.name;
  showState(run.state);
  const unread = run.unread ? `${run.unread} lines could not be read` : "";
  $("facts").textContent = [run.model, run.place, run.folder, unread].filter(Boolean).join(" · ");
  $("run").hidden = $("slider").hidden = !run.moments;
  say(run.problem || (run.moments ? "" : "The run has begun, and nothing is done yet: devices are being called."));
  if (!run.moments) return;
  $("run").className = federated ? "federated-run" : "pipeline-run";
  for (const [kind, is] of Object.entries(kinds)) for (const card of document.querySelectorAll(`.${kind}`)) card.hidden = !is;
  $("step-unit").textContent = run.unit;
  drawFigures(run, at, page.bars);
  drawCurves(run, at);
  drawEvents(run, at, go);
  if (federated) drawRounds(run);
  if (at.regions) drawMap(at);
  if (at.stages) drawStages(at.stages);
  drawTicks(run);
  $("moment").max = run.moments - 1;
  $("moment").value = at.moment;
  $("when").textContent = `${clock(at.at_s ?? 0)} · ${run.unit} ${at.step}`;
  $("moment").setAttribute("aria-valuetext", $("when").textContent);
  $("live").setAttribute("aria-pressed", page.moment == null);
  $("live").textContent = run.state === "running" ? "live" : "end";
}
async function askBars() {
  const { from, to } = page.span ?? {}, step = page.step ?? Math.max(1, page.at.step);
  const columns = Math.round(Math.max(280, $("bars").clientWidth) / 2);
  page.bars = await ask("timeline", { run: page.runs[0], moment: page.moment, step, from, to, columns });
  $("step").value = step;
  if (!page.bars.problem) return drawTimeline(page.bars);
  fill("bars", element("p", { class: "soft" }, page.bars.problem));
  $("timeline-note").textContent = "";
}
let asking = false, again = null;
async function refresh(whole = true) { // one at a time: what comes meanwhile is asked for once more
  if (asking) {
    again ||= whole;
    return;
  }
  asking = true;
  try {
    if (whole) page.run = await ask("run", { run: page.runs[0] });
    if (page.run.moments) page.at = await ask("at", { run: page.runs[0], moment: page.moment });
    show();
    if (page.run.moments && !page.span) await askBars();
    if (page.run.moments) drawFigures(page.run, page.at, page.bars);
  } catch (error) {
    say(error.message);
  } finally {
    asking = false;
    const once = again;
    again = null;
    if (once != null) refresh(once);
  }
}
function go(moment) {
  const last = moment == null || moment >= page.run.moments - 1;
  Object.assign(page, { moment: last ? null : Math.max(0, moment), step: null, span: null });
  refresh(false);
}
function goEvent(way) {
  const found = page.run.marks.filter((mark) => way * (mark.moment - page.at.moment) > 0);
  if (found.length) go(found.at(way > 0 ? 0 : -1).moment);
}
function look(from, to) {
  page.span = { from, to };
  askBars();
}
function zoom(factor, middle = 0.5) {
  const { from_s: from, to_s: to } = page.bars, pivot = from + middle * (to - from);
  look(pivot - (pivot - from) * factor, pivot + (to - pivot) * factor);
}
function move(part) {
  const by = part * (page.bars.to_s - page.bars.from_s);
  look(page.bars.from_s + by, page.bars.to_s + by);
}
function pick(step) {
  Object.assign(page, { step: Math.max(1, step), span: null });
  askBars();
}

// Following, and other views

function follow(name, changed) {
  const source = new EventSource(`/api/changes?run=${encodeURIComponent(name)}`);
  let timer = null, seen = false; // the first event is of what was asked for already
  source.addEventListener("changed", () => {
    clearTimeout(timer);
    if (seen) timer = setTimeout(changed, 150);
    seen = true;
  });
  source.onerror = () => showState("away", "the page's server does not answer");
  return source;
}
async function list() {
  const found = await ask("runs");
  if (found.runs.length !== 1 || found.fleet) return drawList(found);
  page.runs = [found.runs[0].id];
  $("list").hidden = true;
  return start();
}
async function start() {
  page.follows?.close();
  if (page.runs.length > 1) {
    drawCompared(await Promise.all(page.runs.map((run) => ask("run", { run }))), page.runs);
  } else {
    const changed = page.runs.length ? () => refresh() : () => list().catch((error) => say(error.message));
    page.follows = follow(page.runs[0] ?? "", changed);
    await (page.runs.length ? refresh() : list());
  }
}

// Pointer and keys

function tip(text, x, y) {
  const shown = $("tip");
  shown.hidden = !text;
  if (!text) return;
  shown.textContent = text;
  const below = y + 18 + shown.offsetHeight <= innerHeight;
  shown.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - shown.offsetWidth - 8))}px`;
  shown.style.top = `${below ? y + 18 : y - shown.offsetHeight - 10}px`;
}
addEventListener("pointermove", ({ target, clientX, clientY }) => {
  const text = target.dataset?.track ? barText(page.bars, target, clientX) : target.closest?.("[data-tip]")?.dataset.tip;
  tip(text, clientX, clientY);
});
addEventListener("focusin", ({ target }) => {
  const { right = 0, top = 0 } = target.getBoundingClientRect?.() ?? {};
  tip(target.dataset?.tip, right, top);
});
const inBars = () => document.activeElement === $("bars");
const KEYS = {
  "[": () => pick(+$("step").value - 1),
  "]": () => pick(+$("step").value + 1),
  "+": () => zoom(0.5),
  "-": () => zoom(2),
  0: () => pick(+$("step").value),
  Home: () => go(0),
  End: () => go(null),
  ArrowLeft: ({ shiftKey }) => inBars() ? move(-0.25) : shiftKey ? goEvent(-1) : go(page.at.moment - 1),
  ArrowRight: ({ shiftKey }) => inBars() ? move(0.25) : shiftKey ? goEvent(1) : go(page.at.moment + 1),
};
addEventListener("keydown", (event) => {
  if (event.target.matches?.("input:not([type=range])") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "t") $("theme").click();
  else if (event.key === "?") $("help").showModal();
  else if (KEYS[event.key] && !$("run").hidden && !$("help").open) {
    event.preventDefault();
    KEYS[event.key](event);
  }
});
$("keys").onclick = () => $("help").showModal();
$("moment").oninput = ({ target }) => go(+target.value);
$("step").onchange = ({ target }) => pick(+target.value);
for (const button of document.querySelectorAll("[data-key]")) button.onclick = (event) => KEYS[button.dataset.key](event);
$("bars").addEventListener("wheel", (event) => {
  if (page.bars?.to_s == null) return;
  event.preventDefault();
  const { left, width } = $("bars").getBoundingClientRect();
  if (event.shiftKey || event.deltaX) move(Math.sign(event.deltaX || event.deltaY) * 0.15);
  else zoom(event.deltaY > 0 ? 1.3 : 0.77, (event.clientX - left) / width);
}, { passive: false });
let held = null;
$("bars").onpointerdown = ({ clientX }) => { held = clientX; };
addEventListener("pointerup", ({ clientX }) => {
  if (held != null && Math.abs(clientX - held) > 5) move((held - clientX) / $("bars").clientWidth);
  held = null;
});

// Light and dark, size

function redraw() {
  forget();
  if (page.run?.moments) show();
  if (page.bars?.measured) askBars();
}
const dark = localStorage.getItem("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
document.documentElement.dataset.theme = dark;
$("theme").onclick = () => {
  const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("theme", document.documentElement.dataset.theme = name);
  if (page.runs.length > 1) location.reload();
  redraw();
};
let resized = null;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(page.runs.length > 1 ? () => location.reload() : redraw, 120);
});
start().catch((error) => say(error.message));
