// The arena's page: the editor, the policy that plays, the tables and the chart.

import { download, el, keep, kept } from "./board.js";
import { makeEditor } from "./editor.js";
import { $, makePython, page, say } from "./python.js";

const { policies, ...known } = await (await fetch("arena.json")).json();
const python = makePython("arena", {
  run() {
    Object.assign($("verdict"), { textContent: "Your policy plays.", className: "" });
    python.ask({ source: editor.text, columns: 80, scale: page.scale });
  },
  receive({ row, verdict }) {
    if (row) say(`Your policy plays ${row.begun}.`);
    else if (verdict) show(verdict);
  },
  hangs: () => "Your policy does not end",
});

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
    parts.push(svg("path", "", { class: "grid", d: `M40 ${y(share)} H480` }), svg("text", `${100 * share}%`, { x: 38, y: y(share) + 4, "text-anchor": "end" }));
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

const stored = (text) => keep("arena", "policy.py", text) || say("This browser stores nothing: download your policy.");
const editor = makeEditor($("editor"), kept("arena", "policy.py", policies.steady), { run: python.toggle, changed: stored, label: "policy.py: your policy" });
Object.assign(page, { editor });
$("begin").append(el("option", "a shipped policy", { value: "" }), ...Object.keys(policies).map((name) => el("option", name)));
$("begin").onchange = () => {
  if (policies[$("begin").value]) editor.text = policies[$("begin").value];
  $("begin").value = "";
  say("Undo (Ctrl+Z in the editor) brings your policy back.");
};
$("download").onclick = () => download("policy.py", editor.text, "text/x-python");
draw(known);
python.start();
