// A lab's page: the editor, the results of a run, the player, tabs and hints.

import { download, drawBoard, drawLaptop, el, keep as keepOf, kept as keptOf, next } from "./board.js";
import { makeEditor } from "./editor.js";
import { $, makePython, page, say } from "./python.js";

const lab = await (await fetch("lab.json")).json();
const kept = (name, otherwise) => keptOf(lab.id, name, otherwise);
function keep(name, value) {
  if (!keepOf(lab.id, name, value)) say("This browser stores nothing: download your code before you leave.");
}
const narrow = matchMedia("(max-width: 899px)");
let begun = "";
const python = makePython(lab.id, { run, receive, hangs: () => `${begun || "The file"} does not end` });

function receive(message) {
  if ("row" in message) {
    if (message.row.begun) begun = message.row.begun;
    else showTest(message.row);
  } else if ("verdict" in message) {
    show(page.verdict = message.verdict);
  } else if ("played" in message) {
    const { problem } = message.played;
    if (problem !== undefined) return say(`Your part could not serve the chats: ${problem}`);
    say("Your part has served six chats.");
    own = true;
    play({ ...message.played, play: true, speed: 5 }, "Your part in the engine: it decides who computes, and the embedded model's letters come in that order.");
    go("play");
  } else if (!played) {
    play(message.ready, "This is the reference's run. Run the tests to see your own.");
  }
}

function run() {
  if (narrow.matches) go("results");
  begun = "";
  clear();
  say("The tests are running.");
  const columns = Math.max(40, Math.min(100, Math.floor(($("results").clientWidth - 40) / 7.5)));
  python.ask({ source: editor.text, columns, scale: page.scale });
}

/** Let the engine write with the reader's own part. */
function demonstrate() {
  if (!python.free) return;
  begun = "Your part";
  say("Your part serves six chats.");
  python.ask({ demo: editor.text });
}

// -------------------------------------------------------------------------------------------- the results

let rows = [];

function clear() {
  rows = [];
  for (const id of ["marks", "tests", "report", "tasks"]) $(id).replaceChildren();
  for (const id of ["name", "all", "tasks", "onward"]) $(id).hidden = true;
  $("verdict").textContent = "";
  $("verdict").className = "";
  editor.mark(null);
}

function showTest(row) {
  rows.push(row);
  const state = row.passed ? "passed" : "failed";
  $("marks").append(el("li", "", { class: state, title: row.claim }));
  const item = el("li", "", { class: state });
  item.append(el("span", row.passed ? "passes: " : "fails: ", { class: "state" }), row.claim);
  if (!row.passed) item.append(el("small", row.said.slice(0, 300)));
  $("tests").append(item);
  $("all").hidden = false;
  const failed = rows.filter((test) => !test.passed);
  $("verdict").textContent = `${rows.length - failed.length} pass${failed.length ? `, ${failed.length} fail` : ""} so far.`;
  if (failed.length === 1 && failed[0] === row) $("report").replaceChildren(el("p", `${row.claim} ${row.said}`));
}

function show(verdict) {
  const failed = rows.filter((row) => !row.passed).length;
  $("report").replaceChildren();
  $("verdict").className = verdict.done ? "good" : verdict.started === false ? "" : "bad";
  const all = verdict.done ? `All ${rows.length} tests pass.` : `${failed} of ${rows.length} tests ${failed === 1 ? "fails" : "fail"}.`;
  $("verdict").textContent = verdict.problem
    ? problem(verdict)
    : all + (!verdict.done && lab.tasks.length > 1 ? ` Next: ${verdict.next}.` : "");
  if (!verdict.player) stale("This is the run of an earlier file; the one in the editor now has none to show.");
  say(verdict.started === false ? "Nothing is written yet." : verdict.problem ? "Your file has a problem." : all);
  if (!verdict.tasks || verdict.problem) return;
  const done = verdict.tasks.filter((task) => task.done).length;
  if (done > Number(kept("done", 0))) keep("done", done);
  drawBoard($("board"), lab.id);
  if (verdict.done) onward();
  if (verdict.tasks.length > 1) {
    $("tasks").hidden = false;
    for (const task of verdict.tasks) {
      const item = el("li", "", { class: task.done ? "passed" : task.name === verdict.next ? "failed" : "open" });
      item.append(el("code", task.name), ` ${task.status}`);
      $("tasks").append(item);
    }
  }
  if (verdict.name) {
    const [title, hint] = $("name").children;
    title.firstChild.textContent = `This looks like: ${verdict.name.title}`;
    hint.textContent = verdict.name.hint;
    $("name").hidden = false;
  }
  if (verdict.report) report(verdict);
  if (verdict.player) {
    const { step, traces } = verdict.player;
    const beside = traces.length > 1 ? "Yours beside the reference" : "Your run";
    const parted = step !== null, same = verdict.done ? "." : ". The failed test has no run to play; in this one your decisions are the reference's.";
    own = true;
    play(verdict.player, beside + (parted ? `, opened at step ${step}, the first that differs.` : same));
    if (parted || verdict.done) choose("play");
  }
}

/** After a pass: the text to read, the next lab, and the reader's own function at work. */
function onward() {
  const following = next(lab.id);
  $("verdict").append(" ", el("a", "Read on under Afterwards.", { href: "#after" }));
  $("next").hidden = !following;
  if (following) Object.assign($("next"), { href: following.href, textContent: `Next: ${following.id} ${following.title}` });
  $("board").open = true;
  $("onward").hidden = false;
}

/** The problem of the whole file and its line: all tests would report the same. */
function problem({ problem: text, line, started }) {
  const begun = started !== false, words = text.replace(/^lab-\d+: /, "");
  const hole = editor.text.split("\n").findIndex((line) => line.includes("raise NotImplementedError"));
  const at = begun ? line : hole + 1;
  $("marks").replaceChildren();
  $("all").hidden = true;
  if (begun) editor.mark(at, words);
  if (at) $("report").append(toLine(at));
  if (at && begun && !narrow.matches) editor.go(at); // on a phone the sentence is read first
  if (!begun) return `${words}. Write your code in place of the NotImplementedError, then run the tests again.`;
  return words + (/[.?!]$/.test(words) ? "" : ".");
}

function toLine(line) {
  const there = el("button", `Go to line ${line}`);
  there.onclick = () => { go("write"); editor.go(line); };
  return there;
}

/** The most informative failure, by its sections. */
function report({ test, report: text, line, next }) {
  const [head, ...sections] = text.split(/^--- (.*) ---$/m);
  const title = el("h3", "The most informative failure");
  const parts = head.trim().split(/\n\n+/), at = parts.findIndex((part) => /^\S+\.py:\d+: in /.test(part)), said = at < 0 ? 1 : at;
  $("report").append(title, ...parts.slice(0, said).map((words) => el("p", words.replaceAll("\n", " "))),
    el("p", test, { class: "test" }), lines(parts.slice(said).join("\n\n")));
  for (let n = 0; n + 1 < sections.length; n += 2) {
    if (sections[n] === "step through it") {
      const open = el("button", "Step through it in the player");
      open.onclick = () => { go("play"); $("play").focus(); };
      $("report").append(open);
      continue;
    }
    const name = sections[n][0].toUpperCase() + sections[n].slice(1);
    $("report").append(el("h3", name), lines(sections[n + 1].replace(/^\n+|\s+$/g, "")));
  }
  if (line) {
    title.append(" ", toLine(line));
    editor.mark(line, `${next}: the most informative failure came through here`);
  }
}

function lines(text) {
  const block = el("pre", "", { tabindex: "0" });
  for (const line of text.split("\n")) block.append(el("span", line, /^(E |> )/.test(line) ? { class: "wrong" } : {}), "\n");
  return block;
}

// ---------------------------------------------------------------------------------------------------- the player

let played = null, own = false, listening = false;

/** Say that the run in the player is not that of the file as it is now. */
function stale(words) {
  if (!own) return;
  $("playing").textContent = words;
  $("play").classList.add("stale");
}

function play(payload, words) {
  if (!payload) return;
  played = payload;
  $("play").classList.remove("stale");
  $("playing").textContent = words;
  if (listening) $("player").contentWindow.postMessage({ type: "mini-engine-trace", ...payload }, "*");
}

addEventListener("message", ({ source, data }) => {
  if (source !== $("player").contentWindow) return;
  if (data?.type === "mini-engine-ready") {
    listening = true;
    if (played) play(played, $("playing").textContent);
  } else if (data?.type === "mini-engine-failed") {
    $("playing").textContent = `This run cannot be played: ${data.message}`;
  }
});

// ------------------------------------------------------------------------------------------------ tabs and hints

const tabs = [...document.querySelectorAll("[role=tab]")];

function choose(id) {
  for (const tab of tabs) { // beside the editor, if there is room
    const mine = tab.getAttribute("aria-controls") === id;
    tab.setAttribute("aria-selected", mine);
    tab.tabIndex = mine ? 0 : -1;
    $(tab.getAttribute("aria-controls")).classList.toggle("chosen", mine);
  }
}

/** Show a part of the page; on a phone it replaces the others. */
function go(id) {
  for (const pane of document.querySelectorAll(".pane")) pane.classList.toggle("current", pane.id === id);
  for (const link of document.querySelectorAll(".jump a")) {
    if (link.hash === `#${id}`) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  if (tabs.some((tab) => tab.getAttribute("aria-controls") === id)) choose(id);
}

document.querySelector(".labs [aria-current]").scrollIntoView({ block: "nearest", inline: "center" });

for (const [number, tab] of tabs.entries()) {
  tab.onclick = () => go(tab.getAttribute("aria-controls"));
  tab.onkeydown = ({ key }) => {
    const to = { ArrowRight: number + 1, ArrowLeft: number - 1, Home: 0, End: -1 }[key];
    if (to === undefined) return;
    const other = tabs.at(to % tabs.length);
    other.click();
    other.focus();
  };
}
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href^='#']");
  if (!link || !$(link.hash.slice(1))?.matches(".pane")) return;
  event.preventDefault();
  go(link.hash.slice(1));
  scrollTo(0, 0);
});

for (const task of lab.tasks) {
  const box = el("div", "", { class: "task" }), more = el("button");
  const shown = () => Math.min(task.hints.length, Number(kept(`hints/${task.name}`, 0)));
  const draw = () => {
    const hints = task.hints.slice(0, shown()).map((hint, n) => el(n + 1 === task.hints.length ? "pre" : "p", hint));
    more.textContent = `Show hint ${shown() + 1} of ${task.hints.length}`;
    more.hidden = shown() === task.hints.length;
    more.setAttribute("aria-label", `${more.textContent} for ${task.name}`);
    box.replaceChildren(el("h3", task.name), ...hints, more);
  };
  more.onclick = () => {
    keep(`hints/${task.name}`, shown() + 1);
    draw();
    const last = [...box.querySelectorAll("p, pre")].pop();
    last.tabIndex = -1;
    last.focus();
  };
  draw();
  $("hints").append(box);
}

// ------------------------------------------------------------------------------------------- the file, and a start

const editor = makeEditor($("editor"), kept("starter.py", lab.starter), { run: python.toggle, changed: (text) => keep("starter.py", text) });
Object.assign(page, { editor });
if ($("own")) $("own").onclick = demonstrate;
$("download").onclick = () => download(`${lab.id}-starter.py`, editor.text, "text/x-python");
$("upload").onclick = () => $("file").click();
$("file").onchange = async () => {
  const [file] = $("file").files;
  $("file").value = "";
  if (!file) return;
  if (file.size > 500_000) return say(`${file.name} has ${file.size} bytes: it cannot be a starter.py.`);
  editor.text = await file.text();
  say(`${file.name} is in the editor. Undo brings your earlier text back.`);
};
$("reset").onclick = () => {
  editor.text = lab.starter;
  say("The file is restored. Undo (Ctrl+Z in the editor) brings yours back.");
};
// What the keyboard of a phone hides behind two more taps; the editor keeps the focus, and the keyboard stays.
for (const [label, name, action] of [
  ["⇥", "Indent", () => editor.command("indentMore")], ["⇤", "Outdent", () => editor.command("indentLess")],
  ...["()", "[]", "{}", '""'].map((pair) => [pair, `Insert ${pair}`, () => editor.type(pair[0], pair[1])]),
  ...[":", "=", "_", ".", "#"].map((sign) => [sign, `Insert ${sign}`, () => editor.type(sign)]), ["↶", "Undo", () => editor.command("undo")],
]) {
  const button = el("button", label, { "aria-label": name });
  button.onpointerdown = (event) => event.preventDefault();
  button.onclick = action;
  $("keys").append(button);
}
drawBoard($("board"), lab.id);
drawLaptop($("laptop"));
document.body.classList.add("awake");
go(editor.text === lab.starter ? "read" : "write");
choose("read");
$("player").src = new URL("player/shell.html", import.meta.url); // now that the listener is set
python.start();
