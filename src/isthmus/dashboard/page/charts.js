// Curves, by uPlot.
/* global uPlot */
import { $, number } from "./text.js";

const shown = new Map();
const WHOLE = [0, 1, 2, 3, 4, 5, 6].flatMap((k) => [1, 2, 5].map((x) => x * 10 ** k)); // steps have no halves
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// `series` are [label, colour, dash]. Options: marker (a position), text (of a value), range, bands, x (its label).
export function chart(id, series, data, options = {}) {
  const place = $(id), key = JSON.stringify(series), before = shown.get(id);
  if (before?.key === key) {
    before.marker = options.marker;
    before.plot.setData(data);
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
    axes: [{ ...axis, incrs: WHOLE }, { ...axis, size: 62, values: (_, ticks) => ticks.map(text) }],
    series: [
      { label: options.x ?? "step" },
      ...series.map(([label, name, dash]) =>
        ({ label, stroke: colour(name), width: 2, dash, spanGaps: true, points, value: (_, x) => text(x) })),
    ],
    bands: options.bands,
    cursor: { drag: { x: true, y: false } },
    hooks: { draw: [(plot) => mark(plot, kept.marker)] },
  }, data, place);
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
