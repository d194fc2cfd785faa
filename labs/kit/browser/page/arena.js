// The arena's page: the editor, the worker that plays its policy, the tables and the chart.

import { makeEditor } from "./editor.js";

// For tests: quiet and scale as in page.js.
window.arenaPage = { quiet: 60_000, scale: 1, get editor() { return editor; } };
const $ = (id) => document.getElementById(id);
const { policies, ...known } = await (await fetch("arena.json")).json();
const say = (text) => { $("status").textContent = text; };

function el(tag, text = "", attributes = {}, space = "http://www.w3.org/1999/xhtml") {
  const element = document.createElementNS(space, tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// ------------------------------------------------------------------------------------------- Python in its worker

let worker, ready = false, running = false, waiting = false, watch;

function start() {
  ready = false;
  worker = new Worker(new URL("worker.js?lab=arena", import.meta.url), { type: "module" });
  worker.onerror = (event) => ended(`Python could not start: ${event.message ?? "see the console"}.`, false);
  worker.onmessage = ({ data: { row, verdict, broken } }) => {
    if (row) {
      listen();
      say(`Your policy plays ${row.begun}.`);
    } else if (verdict) {
      runs(false);
      show(verdict);
    } else if (broken) {
      ended(`Python ended: ${broken.trim().split("\n").pop().slice(0, 200)}.`, ready);
    } else {
      ready = true;
      say("Python is ready.");
      if (waiting) run();
    }
  };
}

function run() {
  if (running) return ended("Stopped. Python starts again.");
  waiting = !ready;
  if (waiting) return say("Python is loading. Your policy plays when it is ready.");
  runs(true);
  worker.postMessage({ source: editor.text, columns: 80, scale: arenaPage.scale });
  listen();
}

function listen() {
  clearTimeout(watch);
  watch = setTimeout(() => ended("Your policy does not end. Python was stopped and starts again."), arenaPage.quiet);
}

function ended(why, again = true) {
  worker.terminate();
  runs(waiting = false);
  say(why);
  if (again) start();
}

function runs(now) {
  clearTimeout(watch);
  running = now;
  $("run").textContent = now ? "Stop" : "Run";
  $("run").classList.toggle("stop", now);
  $("results").setAttribute("aria-busy", now);
}

// ----------------------------------------------------------------------------------------------------- the results

function show(verdict) {
  const { foul, ranking } = verdict;
  const mine = foul ? null : ranking.find(([name]) => name === "yours");
  $("verdict").className = foul ? "bad" : "good";
  $("verdict").textContent = foul ? `No score. ${foul}` : `${mine[1]} goodput, ${mine[2]} fairness${mine[3] ? ": on the front" : ""}.`;
  say(foul ? "Your policy has no score." : "Your policy has played.");
  draw(foul ? known : verdict);
  if (innerWidth < 900) $("results").scrollIntoView();
}

function table(rows) {
  const whole = el("table");
  for (const [at, cells] of rows.entries()) {
    const row = el("tr", "", cells[0] === "yours" ? { class: "yours" } : {});
    for (const [n, cell] of cells.entries()) row.append(el(cell && !(at && n) ? "th" : "td", cell));
    whole.append(row);
  }
  return whole;
}

/** The tables, and goodput over fairness with the line of the best. */
function draw({ ranking, games, points, front }) {
  $("ranking").replaceChildren(table(ranking));
  $("games").replaceChildren(table(games));
  const svg = (tag, text, attributes) => el(tag, text, attributes, "http://www.w3.org/2000/svg");
  const all = points.map(([, , fairness]) => fairness), low = Math.min(...all) - 0.004, high = Math.max(...all) + 0.008;
  const x = (fairness) => 40 + 380 * (fairness - low) / (high - low), y = (goodput) => 230 - 200 * goodput;
  const steps = front.map(([fairness, goodput], n) => `${n ? "H" : `M${x(fairness)} 230 H`}${x(fairness)} V${y(goodput)}`);
  const parts = [svg("path", "", { class: "front", d: `${steps.join(" ")} H40` })];
  for (const share of [0, 0.5, 1]) {
    parts.push(svg("path", "", { class: "grid", d: `M40 ${y(share)} H480` }), svg("text", `${100 * share}%`, { x: 34, y: y(share) + 4, "text-anchor": "end" }));
  }
  parts.push(svg("text", "fairness →", { x: 480, y: 250, "text-anchor": "end" }), svg("text", "goodput ↑", { x: 4, y: 14 }));
  for (const [name, kind, fairness, goodput] of points) {
    const point = svg("circle", "", { class: kind, cx: x(fairness), cy: y(goodput), r: kind === "yours" ? 7 : 4.5 });
    point.append(svg("title", `${name}: ${Math.round(100 * goodput)}% goodput, ${Math.round(100 * fairness)}% fairness`));
    parts.push(point);
    const best = front.some(([f, g]) => f === fairness && g === goodput);
    const side = kind === "yours" ? { x: x(fairness) - 10, y: y(goodput) - 6, "text-anchor": "end" } : { x: x(fairness) + 8, y: y(goodput) - 6 };
    if (best || ["yours", "fcfs"].includes(name)) parts.push(svg("text", name, side));
  }
  $("chart").replaceChildren(...parts);
}

// ------------------------------------------------------------------------------------------------------- the file

const key = "mini-engine/arena/policy.py";
let text = policies.steady;
try { text = localStorage.getItem(key) ?? text; } catch { /* this browser stores nothing */ }
const keep = (now) => { try { localStorage.setItem(key, now); } catch { say("This browser stores nothing: download your policy."); } };
const editor = makeEditor($("editor"), text, { run, changed: keep, label: "policy.py: your policy" });
$("begin").append(el("option", "a shipped policy", { value: "" }), ...Object.keys(policies).map((name) => el("option", name)));
$("begin").onchange = () => {
  if (policies[$("begin").value]) editor.text = policies[$("begin").value];
  $("begin").value = "";
  say("Undo (Ctrl+Z in the editor) brings your policy back.");
};
$("run").onclick = run;
addEventListener("keydown", (event) => {
  if ((event.ctrlKey || event.metaKey) && event.key === "Enter" && !event.defaultPrevented) run();
});
$("download").onclick = () => {
  const address = URL.createObjectURL(new Blob([editor.text], { type: "text/x-python" }));
  el("a", "", { href: address, download: "policy.py" }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
};
draw(known);
start();
