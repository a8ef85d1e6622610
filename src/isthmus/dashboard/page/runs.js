// The list of runs, a fleet, and several runs side by side.
import { chart } from "./charts.js";
import { figureText, losses, lossSeries } from "./run.js";
import { $, element, fill, number, pill, runLink, size, table, time } from "./text.js";

const card = (title, ...content) => element("section", { class: "card" }, element("h2", {}, title), ...content);
const picked = () => [...document.querySelectorAll("#list input:checked")].map((box) => box.value);
const done = (run) => run.problem || `${run.done} of ${run.of} ${run.unit}s`;

function fleetCards({ coordinator, jobs }) {
  const { devices = [], links = [], relayed = [] } = coordinator ?? {}, pair = (link) => link.devices.join(" – ");
  const known = links.map(pair), probed = relayed.filter((link) => !known.includes(pair(link)));
  const all = [...links, ...probed.map((link) => ({ ...link, relayed: true }))];
  const drawnLinks = all.map((link) => {
    const carried = link.relayed ? size(link.carried_bytes) : "–";
    return { cells: [pair(link), link.relayed ? "relayed" : "direct", time(link.latency_s), carried] };
  });
  return [
    coordinator && card("Devices here", table([["device"], ["hardware"], [""], ["id"]],
      devices.map((d) => ({ cells: [d.name, d.hardware, d.working ? "at work" : "idle", d.id] })))),
    drawnLinks.length && card("Links in use",
      table([["link"], ["way"], ["latency", "n"], ["relayed", "n"]], drawnLinks)),
    card("Jobs", table([["job", "n"], ["name"], ["state"], ["took", "n"], [""]], jobs.map((job) => ({
      cells: [job.number, job.run ? runLink(job.run, job.name) : job.name, pill(job.state), time(job.took_s), job.detail],
    })))),
  ];
}

function runsCard(runs) {
  if (!runs.length) return card("Runs", "There is no run here yet. `isthmus train` begins one, and it will appear.");
  const before = picked();
  const rows = runs.map((run) => {
    const box = element("input", { type: "checkbox", value: run.id, "aria-label": `compare ${run.id}` });
    box.checked = before.includes(run.id);
    return { cells: [box, runLink(run.id, run.id), pill(run.state), done(run), number(run.loss, 4), run.place] };
  });
  const open = () => { location.search = picked().map((name) => `run=${encodeURIComponent(name)}`).join("&"); };
  return card("Runs", table([[""], ["run"], ["state"], ["done"], ["loss", "n"], ["where"]], rows),
    element("button", { id: "side-by-side", onclick: open }, "Show the chosen ones side by side"));
}

export function drawList({ runs, fleet }) {
  $("list").hidden = false;
  $("title").textContent = fleet ? "Fleet" : "Runs";
  $("facts").textContent = fleet?.folder ?? "";
  if (fleet) $("state").replaceWith(fleetState(fleet.coordinator));
  fill("list", ...(fleet ? fleetCards(fleet) : []), runsCard(runs));
}
function fleetState(coordinator) {
  const made = pill(coordinator ? "running" : "away");
  made.id = "state";
  made.textContent = coordinator ? "serving" : "no coordinator serves it";
  return made;
}

const FIGURES = [
  ["state", (run) => pill(run.state)],
  ["done", done],
  ["loss", (run) => number(run.loss, 4)],
  ["held-out loss", (run) => number(run.heldout[1].at(-1), 4)],
  ["speed", (run) => figureText(run, "tokens_per_s") ?? figureText(run, "samples_per_s")],
  ["step, measured", (run) => time(run.comparison?.measured_step_s)],
  ["step, predicted", (run) => time(run.comparison?.predicted_step_s)],
  ["devices lost", (run) => String(run.marks.filter((mark) => mark.kind === "lost").length)],
];
export function drawCompared(runs, ids) {
  $("title").textContent = `${runs.length} runs side by side`;
  $("compare").hidden = false;
  const curves = runs.map((run) => run.problem ? [[]] : losses(run));
  const all = curves.flatMap(([, ...values]) => values.flat()).filter((x) => x != null);
  const range = () => [Math.min(...all) * 0.95, Math.max(...all) * 1.02];
  fill("compare", ...runs.map((run, k) => {
    const figures = () => table([["figure"], ["", "n"]], FIGURES.map(([name, get]) => ({ cells: [name, get(run)] })));
    const content = run.problem ? [run.problem] : [element("div", { class: "chart", id: `compared-${k}` }), figures()];
    const made = card(runLink(ids[k], run.name), ...content);
    made.classList.add("compared");
    return made;
  }));
  runs.forEach((run, k) => {
    if (run.problem) return;
    chart(`compared-${k}`, lossSeries, curves[k], { range, x: run.unit });
  });
}
