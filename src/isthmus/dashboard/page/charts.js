// Curves, by uPlot.
/* global uPlot */
import { $, number } from "./text.js";

const shown = new Map();
const WHOLE = [0, 1, 2, 3, 4, 5, 6].flatMap((k) => [1, 2, 5].map((x) => x * 10 ** k)); // steps have no halves
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// `series` are [label, colour, dash]; one without a label is an edge of a band.
// Options: marker (a position), text (of a value), range, bands, x (its label).
export function chart(id, series, data, options = {}) {
  const place = $(id), key = JSON.stringify(series), before = shown.get(id);
  if (before?.key === key) {
    before.marker = options.marker;
    before.plot.setData(data);
    sayValues(before.plot, options.marker);
    return;
  }
  before?.plot.destroy();
  const kept = { key, marker: options.marker };
  shown.set(id, kept);
  const text = (x) => x == null ? "–" : options.text ? options.text(x) : number(x, 4);
  const px = Math.round(parseFloat(getComputedStyle(document.documentElement).fontSize) * 0.75);
  const grid = { stroke: colour("faint"), width: 1 };
  const axis = { stroke: colour("soft"), grid, ticks: { show: false }, font: `${px}px system-ui` };
  const points = { show: data[0].length < 40, size: 5 };
  kept.plot = new uPlot({
    width: place.clientWidth,
    height: place.clientHeight - 34,
    padding: [10, 10, 0, 0],
    scales: { x: { time: false }, y: options.range ? { range: options.range } : {} },
    axes: [{ ...axis, incrs: WHOLE, size: 30 }, { ...axis, size: 62, values: (_, ticks) => ticks.map(text) }],
    series: [
      { label: options.x ?? "step" },
      ...series.map(([label, name, dash]) =>
        ({ label, class: label ? null : "edge", stroke: colour(name), width: label ? 2 : 0, dash, spanGaps: true,
          points: label ? points : { show: false }, value: (_, x) => text(x) })),
    ],
    bands: options.bands,
    cursor: { drag: { x: true, y: false } },
    hooks: { draw: [(plot) => mark(plot, kept.marker)], setCursor: [(plot) => sayValues(plot, kept.marker)] },
  }, data, place);
  sayValues(kept.plot, kept.marker);
}
// Under the chart: the values at the pointer, or else the last ones up to the moment that is shown.
function sayValues(plot, at) {
  if (plot.cursor.idx != null) return;
  const shownYet = (k, values) => values[k] != null && (at == null || plot.data[0][k] <= at);
  plot.setLegend({ idxs: plot.data.map((values) => values.findLastIndex((_, k) => shownYet(k, values)))
    .map((k) => k < 0 ? null : k) }, false);
}
export const fromZero = (_, __, top) => [0, (top || 1) * 1.1];
export function forget() {
  for (const { plot } of shown.values()) plot.destroy();
  shown.clear();
}
function mark(plot, at) {
  if (at == null || at < plot.scales.x.min || at > plot.scales.x.max) return;
  const x = plot.valToPos(at, "x", true), { top, height } = plot.bbox, pen = plot.ctx;
  pen.save();
  pen.strokeStyle = colour("ink");
  pen.setLineDash([4, 4]);
  pen.beginPath();
  pen.moveTo(x, top);
  pen.lineTo(x, top + height);
  pen.stroke();
  pen.restore();
}
