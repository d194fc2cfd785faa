"use strict";
// Controls: step, play, follow, difference, theme, keys. `player` is what the tests talk to.

const player = {
  step: 0, followed: "", playing: false, numSteps: 0, panes: [], departing: [],
  first: 0, // the number of the first step: a trace may begin in the middle of a run

  go(step) {
    this.step = Math.max(0, Math.min(this.numSteps - 1, step));
    this.render();
  },

  follow(id) {
    this.followed = id;
    $("follow").value = id;
    this.redraw();
  },

  followNext(by) {
    const index = ids.indexOf(this.followed) + by;
    this.follow(ids[(index + ids.length) % ids.length]);
  },

  /** To the next (or previous) step in which the two traces differ. */
  goDifference(by) {
    const steps = by > 0 ? this.departing : [...this.departing].reverse();
    const next = steps.find((step) => (step - this.step) * by > 0);
    if (next !== undefined) this.go(next);
  },

  play(on) {
    this.playing = on;
    clearInterval(this.timer);
    $("play").textContent = on ? "Pause" : "Play";
    // A screen reader cannot keep up with a film; it speaks again when the film stops.
    for (const pane of this.panes) pane.find(".log").setAttribute("aria-live", on ? "off" : "polite");
    if (!on) return;
    if (this.step === this.numSteps - 1) this.go(0);
    this.timer = setInterval(() => {
      this.go(this.step + 1);
      if (this.step === this.numSteps - 1) this.play(false);
    }, 1000 / $("speed").value);
  },

  theme(name) {
    document.documentElement.dataset.theme = name;
    $("theme").textContent = name === "dark" ? "Light" : "Dark";
    this.redraw();
  },

  redraw() {
    for (const pane of this.panes) pane.drawRun();
    this.render();
  },

  render() {
    const record = this.panes.map((pane) => pane.fold.steps[this.step]).find(Boolean);
    $("slider").value = this.step;
    const place = `${this.first + this.step} of ${this.first + this.numSteps - 1}`;
    $("slider").setAttribute("aria-valuetext", `step ${place}`);
    $("readout").textContent = `Step ${place}`;
    $("readout").title = `from ${record.t} to ${record.t_end} ${this.panes[0].fold.trace.header.unit}`;
    for (const name of ["first", "back"]) $(name).disabled = this.step === 0;
    for (const name of ["forward", "last"]) $(name).disabled = this.step === this.numSteps - 1;
    for (const pane of this.panes) pane.render(this.step, this.followed);
    if (this.panes.length > 1) showDifference();
  },

  tints: new Map(),
  tint: (id) => player.tints.get(id),
};

const $ = (id) => document.getElementById(id);
const ids = [];

function start() {
  const { traces, step, follow } = JSON.parse($("data").textContent);
  player.numSteps = Math.max(...traces.map((trace) => trace.steps.length));
  player.first = (traces.find((trace) => trace.steps.length)).steps[0].step;
  if (traces.length > 1) {
    for (let i = 0; i < player.numSteps; i++) {
      if (differences(traces[0].steps[i], traces[1].steps[i]).length) player.departing.push(i);
    }
  }
  player.panes = traces.map((trace, number) => new Pane(trace, number, player));
  ids.push(...new Set(player.panes.flatMap((pane) => [...pane.fold.lives.keys()])));
  $("panes").append(...player.panes.map((pane) => pane.root));
  ids.forEach((id, i) => player.tints.set(id, OWNERS[i % OWNERS.length]));
  document.title = `${traces.map((trace) => trace.name).join(" and ")} - trace player`;
  $("slider").max = player.numSteps - 1;
  $("follow").append(...ids.map((id) => el("option", { value: id }, id)));
  $("difference").hidden = traces.length < 2;
  document.querySelector("#keys .two").hidden = traces.length < 2;
  const wanted = new URLSearchParams(location.hash.slice(1));
  player.followed = [wanted.get("follow"), follow].find((id) => ids.includes(id)) ?? ids[0];
  $("follow").value = player.followed;
  player.step = Math.max(0, Math.min(player.numSteps - 1, Number(wanted.get("step") ?? step ?? 0) - player.first || 0));
  connect();
  player.theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

function connect() {
  const click = (id, action) => $(id).addEventListener("click", action);
  click("first", () => player.go(0));
  click("back", () => player.go(player.step - 1));
  click("play", () => player.play(!player.playing));
  click("forward", () => player.go(player.step + 1));
  click("last", () => player.go(player.numSteps - 1));
  click("next-difference", () => player.goDifference(1));
  click("previous-difference", () => player.goDifference(-1));
  click("theme", toggleTheme);
  click("help", () => $("keys").showModal());
  $("slider").addEventListener("input", () => player.go(Number($("slider").value)));
  $("speed").addEventListener("change", () => player.play(player.playing));
  $("follow").addEventListener("change", () => player.follow($("follow").value));
  document.addEventListener("keydown", onKey);
  window.addEventListener("resize", () => player.redraw());
}

function toggleTheme() {
  player.theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
}

function onKey(event) {
  const on = event.target;
  if (event.ctrlKey || event.metaKey || event.altKey || $("keys").open || on.matches("select")) return;
  const leap = event.shiftKey ? 10 : 1;
  const moves = {
    ArrowRight: () => player.go(player.step + leap),
    ArrowLeft: () => player.go(player.step - leap),
    Home: () => player.go(0),
    End: () => player.go(player.numSteps - 1),
  };
  const letters = {
    f: () => player.followNext(event.shiftKey ? -1 : 1),
    n: () => player.goDifference(event.shiftKey ? -1 : 1),
    t: toggleTheme,
    "?": () => $("keys").showModal(),
  };
  let action = moves[event.key];
  // Space presses the button that has the focus; anywhere else it plays.
  if (event.key === " " && !on.matches("button")) action = () => player.play(!player.playing);
  if ($("letters").checked) action ??= letters[event.key.toLowerCase()];
  if (!action) return;
  event.preventDefault();
  action();
}

function showDifference() {
  const [ours, theirs] = player.panes.map((pane) => pane.fold.steps[player.step]);
  const fields = differences(ours, theirs), step = player.first + player.step;
  const total = player.departing.length;
  $("difference-summary").textContent = !total
    ? "Both traces decide the same in every step."
    : `${fields.length ? `Step ${step} differs.` : `In step ${step} both decide the same.`} The first of ${count(total, "step")} that differ is step ${player.first + player.departing[0]}.`;
  $("next-difference").disabled = !player.departing.some((step) => step > player.step);
  $("previous-difference").disabled = !player.departing.some((step) => step < player.step);
  const head = el("tr", {}, el("th", { scope: "col" }, "field"), ...player.panes.map((pane) => el("th", { scope: "col" }, pane.fold.trace.name)));
  $("difference-table").replaceChildren(...(fields.length ? [head] : []), ...fields.map((field) =>
    el("tr", {}, el("th", { scope: "row" }, COMPARED[field]), el("td", {}, told(ours, field)), el("td", {}, told(theirs, field)))));
}

function told(record, field) {
  if (!record) return "no such step";
  const value = record[field];
  if (field === "scheduled") return value.map(([id, n]) => `${id} ${n}`).join(", ") || "nothing";
  if (field === "new_tokens") return Object.entries(value).map(([id, token]) => `${id} ${token}`).join(", ") || "none";
  if (field === "events") return value.map((event) => `${event.id} ${event.type}${event.reason ? ` ${event.reason}` : ""}`).join(", ") || "none";
  return String(value);
}

function fail(message) {
  $("failure").hidden = false;
  $("failure").textContent = `This trace cannot be shown: ${message}. Its records contradict each other, or a field is missing.`;
}

window.player = player;
window.addEventListener("error", (event) => fail(event.message));
start();
