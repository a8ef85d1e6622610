// One run: figures, curves, stages, events and federated rounds.
/* global uPlot */
import { chart, colour, fromZero } from "./charts.js";
import { $, clock, element, fill, number, share, size, table, time } from "./text.js";

export function drawFigures(run, at, bars) {
  const cells = figureCells(run, at, bars);
  const { epsilon, delta, rounds } = run.privacy ?? {};
  if (epsilon != null) cells.push(["epsilon", number(epsilon), `at delta ${delta}${rounds ? `, ${rounds} rounds` : ""}`]);
  fill("figures", ...cells.map(([name, value, more = ""]) => element("div", { "data-figure": name },
    element("dt", {}, name), element("dd", {}, String(value ?? "–")), element("small", { title: more }, more))));
}
function figureCells(run, at, bars) {
  const { loss, figures = {} } = at.last, compared = run.comparison, { refused = 0, reassigned = 0, missing = 0 } = figures;
  const more = {
    step_s: `predicted ${time(compared?.predicted_step_s ?? at.predicted?.step_s ?? bars?.planned_s)}`,
    clients: `${refused} refused, ${reassigned} reassigned, ${missing} missing`,
  };
  const measured = { ...figures, step_s: compared?.measured_step_s ?? figures.step_s ?? bars?.measured?.step_s };
  return [
    [run.unit, `${at.step} of ${run.of}`],
    ...(loss == null ? [] : [["loss", number(loss, 4)]]),
    ["held-out loss", number(at.heldout, 4)],
    ...Object.entries(at.metrics ?? {}).map(([name, value]) => [name, metricText(name, value)]),
    ...Object.entries(at.round?.evaluation.clients ?? {}).map(([name, c]) =>
      [`${name} of clients`, metricText(name, c.mean), `worst tenth ${metricText(name, c.worst_decile)}, of ${c.clients}`]),
    ...Object.entries(run.figures).filter(([name]) => name !== "loss").map(([name, { label, kind }]) =>
      [label, KINDS[kind](measured[name]), more[name]]),
  ];
}
const KINDS = { time, bytes: size, loss: (x) => number(x, 4), count: number, number };
export function figureText(run, name) {
  const { label, kind, curve } = run.figures?.[name] ?? {};
  return label && `${KINDS[kind](curve[1].at(-1))} ${label}`;
}

const isShare = (name) => name.endsWith("accuracy");
const metricText = (name, value) => isShare(name) ? share(value) : number(value, 4);
export const lossSeries = [["training", "blue"], ["held out", "orange", [7, 4]]];
export const losses = (run) => uPlot.join([run.train, run.heldout]);
// The loss, then a card for each metric and for each number of the steps.
export function drawCurves(run, at) {
  const options = { marker: at.step, x: run.unit };
  const names = [...Object.keys(run.metrics), ...run.rounds.flatMap((r) => Object.keys(r.evaluation.clients ?? {}))];
  const [, series, columns, bands, note] = evaluationOf(run, "loss");
  chart("loss", series, columns, { ...options, bands });
  $("loss-note").textContent = note;
  const metrics = [...new Set(names)].filter((name) => name !== "loss").map((name) => evaluationOf(run, name));
  const figures = Object.entries(run.figures).filter(([name]) => name !== "loss").map(([, { label, kind, curve }]) =>
    [label, [[label, "green"]], curve, [], "", { range: fromZero, text: KINDS[kind] }]);
  drawCards([...metrics, ...figures], options);
}
// One card each, before the timeline: [name, series, columns, bands, note, options].
function drawCards(shown, options) {
  for (const card of [...document.querySelectorAll(".card.metric")].slice(shown.length)) card.remove();
  for (const [number, [name, series, columns, bands, note, more]] of shown.entries()) {
    const id = `metric-${number}`;
    if (!$(id)) {
      document.querySelector(".card.timeline").before(element("section", { class: "card metric" },
        element("h2", { id: `${id}-title` }), element("div", { class: "chart", id })));
    }
    fill(`${id}-title`, name, " ", element("small", {}, note ?? ""));
    chart(id, series, columns, { ...options, bands, text: (value) => metricText(name, value), ...more });
  }
}

function meter(x, of, name, planned) {
  const part = (x) => `${Math.min(100, 100 * (x ?? 0) / (of || 1))}%`;
  const bar = element("span", { style: { width: part(x), background: `var(--${name})` } });
  return element("span", { class: "meter" }, bar, planned == null ? null : element("u", { style: { left: part(planned) } }));
}
function memoryOf(stage) {
  const planned = `${size(stage.memory_bytes)} of ${size(stage.memory_available_bytes)}`, { peak } = stage;
  const measured = peak ? `\nmeasured ${size(peak.peak_bytes)}${peak.resident ? " (whole process)" : ""}` : "";
  const tip = { "data-tip": `planned ${planned}${measured}` };
  return element("span", tip, meter(stage.memory_bytes, stage.memory_available_bytes, "green"), planned);
}
function busyOf(stage) {
  const tip = { "data-tip": `busy ${share(stage.busy)}, planned ${share(stage.predicted_busy)} (the line)` };
  return element("span", tip, meter(stage.busy, 1, "blue", stage.predicted_busy), share(stage.busy));
}
export function drawStages(stages) {
  const several = stages.some((stage) => stage.replica), ops = (stage) => `${stage.first_op} … ${stage.last_op}`;
  const columns = [["stage"], ["device"], ["layers", "ops"], ["weights", "n"], ["memory"], ["busy"]];
  fill("stages", table(columns, stages.map((stage) => ({
    class: stage.state,
    cells: [
      several ? `${stage.replica}.${stage.number}` : String(stage.number),
      stage.device + (stage.state === "lost" ? " ✕ lost" : ""),
      element("span", { title: ops(stage) }, ops(stage)),
      size(stage.parameter_bytes),
      memoryOf(stage),
      busyOf(stage),
    ],
  }))));
}

const SIGNS = {
  lost: "✕", joined: "+", left: "→", planned: "◆", back: "↩", saved: "▪", began: "▶", ended: "■", note: "·",
};
function said({ kind, device, step, text }) {
  const words = {
    lost: `${device} is lost`, joined: `${device} joined`, left: `${device} has left`, back: `goes on after step ${step}`,
    saved: `checkpoint of step ${step}`, began: step > 0 ? `resumed after step ${step}` : "the run begins",
    ended: "the run ended",
  };
  return [words[kind], text].filter(Boolean).join(": ");
}
export function drawEvents(run, at, go) {
  const list = run.marks.map((mark) => {
    const kind = `${mark.kind}${mark.moment > at.moment ? " future" : ""}`;
    return element("li", {}, element("button", { class: kind, onclick: () => go(mark.moment) },
      element("time", {}, clock(mark.at_s)),
      element("span", { "aria-hidden": true }, SIGNS[mark.kind]), element("span", {}, said(mark))));
  });
  fill("events", ...list);
  const last = list.findLast((item) => !item.querySelector(".future")), box = $("events");
  if (!last) return;
  last.firstChild.classList.add("now");
  box.scrollTop = last.offsetTop - box.offsetTop - box.clientHeight / 2;
}
const TICKS = ["lost", "planned", "joined", "left", "ended"];
export function drawTicks(run) {
  fill("ticks", ...run.marks.filter((mark) => TICKS.includes(mark.kind)).map((mark) =>
    element("i", { class: mark.kind, style: { left: `${100 * mark.moment / Math.max(1, run.moments - 1)}%` } })));
}

const MOST_SITES = 10, SITES = ["blue", "pink", "sky", "ink", "amber"];
// An evaluation of held-out samples, beside training, and of clients, each on its own data.
function evaluationOf(run, name) {
  const held = name === "loss" ? run.heldout : run.metrics[name] ?? [[], []];
  const rounds = run.rounds.map((r) => r.round);
  const clients = (get) => [rounds, run.rounds.map((r) => {
    const found = r.evaluation.clients?.[name];
    return (found && get(found)) ?? null;
  })];
  const each = [...new Set(run.rounds.flatMap((r) => Object.keys(r.evaluation.clients?.[name]?.each ?? {})))];
  const sites = each.length > MOST_SITES ? [] : each;
  const found = [
    [["", "soft"], clients((c) => c.mean + c.deviation)],
    [["", "soft"], clients((c) => c.mean - c.deviation)],
    ...(name === "loss" ? [[lossSeries[0], run.train]] : []),
    [["mean of clients", "green"], clients((c) => c.mean)],
    [["worst tenth", "red", [6, 4]], clients((c) => c.worst_decile)],
    [["held out", "orange", ...(name === "loss" ? [[7, 4]] : [])], held],
    ...sites.map((site, n) => [
      [/^\d+$/.test(site) ? `client ${site}` : site, SITES[n % SITES.length], n < SITES.length ? [2, 3] : [8, 3]],
      clients((c) => c.each?.[site])]),
  ].filter(([, [, values]]) => values.some((x) => x != null));
  const bands = found[0]?.[0][0] === "" ? [{ series: [1, 2], fill: `${colour("green")}22` }] : [];
  const note = bands.length ? "clients on their own data; shaded: their mean, one deviation up and down" : "";
  const columns = found.length ? uPlot.join(found.map(([, curve]) => curve)) : [[]];
  return [name, found.map(([series]) => series), columns, bands, note];
}
export function drawRounds(run) {
  const counts = ["clients", "time", "forecast", "reassigned", "refused", "missing", "late"].map((name) => [name, "n"]);
  fill("rounds", table([["round"], ...counts, ["ended by"]], run.rounds.slice(-300).reverse().map((r) => ({
    "data-tip": r.refused.length ? r.refused.join("\n") : null,
    cells: [String(r.round), r.clients, time(r.makespan_s), time(r.planned_s), r.stolen, r.refused.length, r.missing,
      r.late, r.closed_by],
  }))));
}
