// The component: controls, and one pane per trace. It is in a shadow root below the given element, has no global
// name, and gets its data from outside: new Player(element, options).load({ traces, step, follow, theme, veil, said }).

const PAUSE = 400; // ms between two reports of the place: browsers limit changes of the address
const MANY_NAMES = 24; // with more requests, one is found by typing its name
const SIZED = 200; // the steps whose differences make the room for their table
const CLOSEST = 24; // the fewest steps that zooming shows

class Player {
  /** Options: embedded (no heading, no theme of its own), keys (the target of key events), stylesheet (its address, if
   *  the style is not included), onMove({ step, follow }). */
  constructor(element, options = {}) {
    this.options = options;
    this.host = el("div", { class: "mini-engine-player", "data-lm-suppress-shortcuts": "true" });
    this.host.player = this;
    this.host.classList.toggle("embedded", Boolean(options.embedded));
    this.root = this.host.attachShadow({ mode: "open" });
    const markup = document.createElement("template");
    markup.innerHTML = MARKUP; // ours, not a trace's
    this.root.append(markup.content);
    Object.assign(this, { panes: [], ids: [], divergences: [], differing: [], kinds: new Map(), tints: new Map() });
    Object.assign(this, { step: 0, numSteps: 0, first: 0, followed: "", playing: false, seen: 0, window: null });
    element.append(this.host);
    this.style();
    this.connect();
  }

  style() {
    if (this.options.stylesheet) {
      const link = el("link", { rel: "stylesheet", href: this.options.stylesheet });
      link.addEventListener("load", () => this.redraw());
      this.root.prepend(link);
    } else {
      const sheet = new CSSStyleSheet();
      sheet.replaceSync(STYLE);
      this.root.adoptedStyleSheets = [sheet];
    }
  }

  part(id) {
    return this.root.getElementById(id);
  }

  /** Show one or two traces, or the engines of a cluster, one above the other. The followed request stays followed. */
  load({ traces, step = null, follow = null, theme = null, veil = false, said = "", cluster = false }) {
    this.play(false);
    this.cluster = cluster;
    this.host.classList.toggle("cluster", cluster);
    this.part("said").textContent = said;
    this.part("said").hidden = !said;
    this.part("failure").hidden = true;
    this.tints.clear();
    this.panes = [];
    traces.forEach((trace, number) => {
      try {
        this.panes.push(trace.header.trace === "mini-engine-ops" ? new OpsPane(trace, number, this) : new Pane(trace, number, this));
      } catch (error) {
        console.error(error);
        this.fail(error.message, trace.name);
      }
    });
    this.part("panes").replaceChildren(...this.panes.map((pane) => pane.root));
    if (!this.panes.length) return;
    const runs = this.panes.map((pane) => pane.run);
    const begun = runs.filter((run) => run.steps.length);
    this.first = Math.min(...(begun.length ? begun : runs).map((run) => run.first));
    for (const run of runs) if (!run.steps.length) run.first = this.first;
    if (cluster) this.align(runs);
    else this.numSteps = Math.max(1, ...runs.map((run) => run.first + run.steps.length - this.first));
    Object.assign(this, { window: null, veil, seen: veil ? 0 : Infinity });
    this.ids = [...new Set(runs.flatMap((run) => [...run.lives.keys()]))];
    this.ids.forEach((id, i) => this.tints.set(id, OWNERS[i % OWNERS.length]));
    this.compare(runs);
    this.offer();
    const known = (id) => this.ids.includes(id), start = Number(step ?? this.first) - this.first;
    const there = (id) => ((span) => span?.[0] <= start && start <= span?.[1])(this.span(id));
    this.followed = [follow, step === null ? "" : this.concerned(start), this.followed, this.ids.find(there), ...this.ids].find(known) ?? "";
    this.followField.value = this.followed;
    const wanted = step === null && follow !== null ? (this.span(this.followed)?.[0] ?? 0) : start;
    this.step = Math.max(0, Math.min(this.numSteps - 1, wanted || 0));
    this.theme(theme);
  }

  /** The player's count for a cluster: the moments at which the step of any engine begins. */
  align(runs) {
    this.first = 0;
    this.moments = [...new Set(runs.flatMap((run) => run.steps.map(({ t }) => t)))].sort((a, b) => a - b);
    this.numSteps = this.moments.length;
    for (const pane of this.panes) pane.align(this.moments);
  }

  compare(runs) {
    const two = !this.cluster && runs.length > 1 && runs[0].constructor === runs[1].constructor;
    const [side] = this.panes;
    this.host.classList.toggle("two", two);
    this.host.classList.toggle("ops", side.noun === "operation");
    this.part("difference").hidden = !two;
    this.divergences = two ? side.divergences(runs) : [];
    this.differing = [];
    for (let step = 0; two && step < this.numSteps; step++) {
      if (side.differences(...this.records(step)).length) this.differing.push(step);
    }
    if (two) this.makeRoom();
  }

  /** Fill the lists: names to follow, kinds of events. */
  offer() {
    const many = this.ids.length > MANY_NAMES;
    this.followField?.remove();
    this.followField = el(many ? "input" : "select", { id: "follow", "aria-label": "Follow", ...(many ? { type: "search", list: "names", placeholder: "request", autocomplete: "off" } : {}) });
    const options = this.ids.map((id) => el("option", { value: id }, many ? "" : id));
    (many ? this.part("names") : this.followField).replaceChildren(...options);
    this.followField.addEventListener("change", () => this.search(this.followField.value));
    if (many) this.followField.addEventListener("focus", () => this.followField.select());
    this.part("follow-field").append(this.followField);
    this.part("follow-field").hidden = !this.ids.length;

    this.kinds = new Map();
    for (const pane of this.panes) {
      for (const [kind, steps] of pane.kinds()) {
        const known = this.kinds.get(kind) ?? [];
        this.kinds.set(kind, known.concat(steps.map((step) => pane.placeOf(step))));
      }
    }
    for (const [kind, steps] of this.kinds) this.kinds.set(kind, [...new Set(steps)].sort((a, b) => a - b));
    const chosen = this.part("kind").value;
    this.part("kind").replaceChildren(
      ...[...this.kinds].map(([kind, steps]) => el("option", { value: kind }, `${kind} (${steps.length})`)),
      el("option", { value: "", title: "a change of state of the followed request" }, "change of state"));
    this.part("kind").value = this.kinds.has(chosen) ? chosen : ([...this.kinds.keys()][0] ?? "");
  }

  /** Each pane's record of a step; undefined if its run has none. */
  records(step) {
    return this.panes.map((pane) => pane.run.steps[pane.indexAt(step)]);
  }

  go(step) {
    this.step = Math.max(0, Math.min(this.numSteps - 1, step));
    this.render();
    this.moved();
  }

  /** Go to a place as in an address: the number of a step, a request, or both. The move is not reported, and a
   *  pending report is dropped. */
  goTo({ step = null, follow = null }) {
    clearTimeout(this.pending);
    this.pending = null;
    this.quiet = true;
    const index = Number(step) - this.first;
    const moves = step !== null && step !== "" && Number.isInteger(index) && index !== this.step;
    if (this.ids.includes(follow) && follow !== this.followed) this.follow(follow, { jump: step === null });
    if (moves) this.go(index);
    this.quiet = false;
  }

  /** Follow a request. If this step does not have it, go to the nearest step that does. */
  follow(id, { jump = true } = {}) {
    this.followed = id;
    this.followField.value = id;
    const [from, to] = this.span(id) ?? [this.step, this.step];
    if (jump) this.step = Math.max(from, Math.min(to, this.step));
    this.redraw();
    for (const pane of this.panes) pane.reveal(id);
    this.moved();
  }

  /** The request of that name, or the first whose name contains it. */
  search(text) {
    const wanted = text.trim().toLowerCase();
    const id = this.ids.find((id) => id === text) ?? this.ids.find((id) => wanted && id.toLowerCase().includes(wanted));
    this.followField.setCustomValidity?.(id === undefined ? `no request is called ${text}` : "");
    this.followField.reportValidity?.();
    if (id !== undefined) this.follow(id);
  }

  followNext(by) {
    const index = this.ids.indexOf(this.followed) + by;
    if (this.ids.length) this.follow(this.ids[(index + this.ids.length) % this.ids.length]);
  }

  /** The first and the last step of a request, in either run. */
  span(id) {
    const spans = this.panes.map((pane) => pane.span(id)).filter(Boolean);
    return spans.length ? [Math.min(...spans.map((span) => span[0])), Math.max(...spans.map((span) => span[1]))] : null;
  }

  /** The steps that hold an event of the chosen kind. */
  events() {
    const kind = this.part("kind").value;
    if (kind) return this.kinds.get(kind) ?? [];
    return [...new Set(this.panes.flatMap((pane) => (pane.run.lives.get(this.followed) ?? []).map(({ step }) => pane.placeOf(step))))].sort((a, b) => a - b);
  }

  goAlong(steps, by) {
    const next = by > 0 ? steps.find((step) => step > this.step) : steps.findLast((step) => step < this.step);
    if (next !== undefined) this.go(next);
  }

  goEvent(by) {
    this.goAlong(this.events(), by);
  }

  goDifference(by) {
    this.goAlong(this.divergences.map(({ step }) => step), by);
    const id = this.concerned(this.step);
    if (id !== undefined) this.follow(id, { jump: false });
  }

  /** The request on which the two decide differently in a step, or whose state begins to differ. */
  concerned(step) {
    const here = this.divergences.find((one) => one.step === step);
    const decided = here && (here.decision || here.over) ? this.panes[0].partedOn(...this.records(step)) : undefined;
    return decided ?? here?.lives[0]?.id;
  }

  /** Show a quarter of the visible steps, or four times as many; 0: all. */
  zoom(factor) {
    const size = this.window ? this.window.to - this.window.from : this.numSteps;
    const wanted = factor ? Math.max(CLOSEST, Math.round(size * factor)) : Infinity;
    this.window = wanted < this.numSteps ? { from: 0, to: wanted } : null;
    if (this.window) this.centre();
    this.redraw();
  }

  /** Move the visible part of the run to the current step. */
  centre() {
    const size = this.window.to - this.window.from;
    const from = Math.max(0, Math.min(this.numSteps - size, this.step - Math.floor(size / 2)));
    this.window = { from, to: from + size };
  }

  play(on) {
    this.playing = on;
    clearInterval(this.timer);
    this.part("play").textContent = on ? "Pause" : "Play";
    // A screen reader cannot keep up while the run plays; it reads again when it stops.
    for (const pane of this.panes) pane.find(".log").setAttribute("aria-live", on ? "off" : "polite");
    if (!on) return;
    if (this.step === this.numSteps - 1) this.go(0);
    this.timer = setInterval(() => {
      this.go(this.step + 1);
      if (this.step === this.numSteps - 1) this.play(false);
    }, 1000 / this.part("speed").value);
  }

  /** "light", "dark", or null for the system's. */
  theme(name) {
    const shown = name ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    this.chosenTheme = name;
    this.host.dataset.theme = shown;
    this.part("theme").textContent = shown === "dark" ? "Light" : "Dark";
    if (this.options.keys === document) document.documentElement.style.colorScheme = shown; // the page is ours
    this.redraw();
  }

  redraw() {
    if (!this.panes.length || !this.host.clientWidth) return; // not visible yet
    for (const pane of this.panes) pane.measure();
    this.drawRuns();
    this.render();
  }

  drawRuns() {
    const whole = { from: 0, to: this.numSteps };
    const marks = this.divergences.map(({ step }) => step);
    const two = this.host.classList.contains("two");
    for (const pane of this.panes) {
      const sides = two ? this.panes : [pane];
      pane.drawRun({ sides, ...(this.window ?? whole), whole: !this.window, seen: this.seen, offset: pane.offset, marks, followed: this.followed });
    }
  }

  render() {
    if (this.veil && this.seen <= this.step) {
      this.seen = this.step + 1;
      this.drawRuns();
    }
    if (this.window && (this.step < this.window.from || this.step >= this.window.to)) {
      this.centre();
      this.drawRuns();
    }
    const record = this.records(this.step).find(Boolean), { noun } = this.panes[0];
    const place = this.cluster ? `${Number(this.moments[this.step].toFixed(1))} ${this.panes[0].run.trace.header.unit}`
      : `${noun} ${this.first + this.step} of ${this.first + this.numSteps - 1}`;
    const slider = this.part("slider");
    slider.max = this.numSteps - 1;
    slider.value = this.step;
    slider.setAttribute("aria-valuetext", place);
    this.part("readout").textContent = capital(place);
    this.part("readout").title = record?.t === undefined ? "" : this.cluster ? `step ${this.step} of all engines together` : `from ${record.t} to ${record.t_end} ${this.panes[0].run.trace.header.unit}`;
    const events = this.events(), begun = this.divergences;
    const dead = {
      first: this.step === 0, back: this.step === 0,
      forward: this.step === this.numSteps - 1, last: this.step === this.numSteps - 1,
      "previous-event": !(events[0] < this.step), "next-event": !(events.at(-1) > this.step),
      "previous-difference": !(begun[0]?.step < this.step), "next-difference": !(begun.at(-1)?.step > this.step),
    };
    for (const [id, is] of Object.entries(dead)) this.part(id).disabled = is;
    for (const pane of this.panes) pane.render(pane.indexAt(this.step), this.followed);
    if (!this.part("difference").hidden) this.showDifference();
  }

  tint = (id) => this.tints.get(id);

  /** Report the place: at once if the last report was long ago, else after the pause. */
  moved() {
    if (!this.options.onMove || this.quiet || this.pending) return;
    const rest = (this.reported ?? -PAUSE) + PAUSE - performance.now();
    if (rest <= 0) this.report();
    else this.pending = setTimeout(() => this.report(), rest);
  }

  report() {
    this.pending = null;
    this.reported = performance.now();
    this.options.onMove({ step: this.first + this.step, follow: this.followed });
  }

  showDifference() {
    this.part("difference-summary").textContent = this.summary(this.step);
    this.part("difference-table").replaceChildren(...this.table(this.fields(this.step)));
  }

  /** Hold the room for the longest summary and the longest value of each field, unseen below those that are shown. */
  makeRoom() {
    const longest = new Map();
    let said = "";
    for (const step of [...new Set([...this.divergences.map((one) => one.step), ...this.differing])].slice(0, SIZED)) {
      const words = this.summary(step);
      if (words.length > said.length) said = words;
      for (const [field, ...texts] of this.fields(step)) {
        const size = Math.max(...texts.map(({ length }) => length));
        if (size > (longest.get(field)?.size ?? -1)) longest.set(field, { size, texts });
      }
    }
    this.part("summary-room").textContent = said;
    this.part("table-room").replaceChildren(...this.table([...longest].map(([field, { texts }]) => [field, ...texts])));
  }

  /** What differs in a step: [[name of the field, in the first run, in the second]]. */
  fields(step) {
    const [side] = this.panes, records = this.records(step);
    if (!records.every(Boolean)) return [];
    return side.differences(...records).map((field) => [side.fieldName(field), ...side.fieldTexts(...records, field)]);
  }

  table(fields) {
    const names = this.panes.map((pane) => el("th", { scope: "col" }, pane.run.trace.name));
    const head = el("tr", {}, el("th", { scope: "col" }, "what differs"), ...names);
    return [...(fields.length ? [head] : []), ...fields.map(([name, ...texts]) =>
      el("tr", {}, el("th", { scope: "row" }, name), ...texts.map((text) => el("td", {}, text))))];
  }

  /** The differences of a step, in sentences. */
  summary(step) {
    const { noun } = this.panes[0], { length } = this.divergences, here = this.divergences.find((one) => one.step === step);
    if (!length) return `Both decide the same in every ${noun}.`;
    const where = length > 1 ? `first of ${length} differences` : "only difference";
    return [
      here ? `Difference ${this.divergences.indexOf(here) + 1} of ${length}.` : "", ...this.explain(here, step),
      here ? "" : `The ${where} begins in ${noun} ${this.first + this.divergences[0].step}.`,
      this.differing.length > 1 ? `${this.differing.length} ${noun}s differ in all.` : "",
    ].filter(Boolean).join(" ");
  }

  explain(here, step) {
    const [side] = this.panes, names = this.panes.map((pane) => pane.run.trace.name), [ours, theirs] = names;
    const records = this.records(step), at = `${side.noun} ${this.first + step}`;
    const over = names.filter((_, i) => !records[i]);
    if (!here && over.length) return [`${over[0]} is over.`];
    if (!here) return [this.differing.includes(step) ? `${capital(at)} differs, as a consequence.` : `In ${at} both decide the same.`];
    const lines = [];
    if (here.over) lines.push(`${capital(at)} differs: ${over[0]} is over.`);
    if (here.decision) lines.push(`${capital(at)} differs: from equal state the two decide differently.`);
    for (const { id, states } of here.lives.slice(0, MANY)) {
      lines.push(`The state of ${id} begins to differ: ${inWord(states[0])} in ${ours}, ${inWord(states[1])} in ${theirs}.`);
    }
    if (here.lives.length > MANY) lines.push(`So do the states of ${here.lives.length - MANY} more.`);
    return lines;
  }

  fail(message, name = "") {
    const box = this.part("failure");
    box.hidden = false;
    box.textContent = `This trace cannot be shown${name ? ` (${name})` : ""}: ${message}. Its records contradict each other, or a field is missing.`;
  }

  connect() {
    const click = (id, action) => this.part(id).addEventListener("click", action);
    click("first", () => this.go(0));
    click("back", () => this.go(this.step - 1));
    click("play", () => this.play(!this.playing));
    click("forward", () => this.go(this.step + 1));
    click("last", () => this.go(this.numSteps - 1));
    click("next-event", () => this.goEvent(1));
    click("previous-event", () => this.goEvent(-1));
    click("next-difference", () => this.goDifference(1));
    click("previous-difference", () => this.goDifference(-1));
    click("theme", () => this.toggleTheme());
    click("help", () => this.part("keys").showModal());
    this.root.querySelector(".skip").addEventListener("click", (event) => {
      event.preventDefault(); // the log is in the shadow root, where no address leads
      this.panes[0]?.find(".log").focus();
    });
    this.part("slider").addEventListener("input", () => this.go(Number(this.part("slider").value)));
    this.part("speed").addEventListener("change", () => this.play(this.playing));
    this.part("kind").addEventListener("change", () => this.render());
    const away = { signal: (this.gone = new AbortController()).signal };
    (this.options.keys ?? this.host).addEventListener("keydown", (event) => this.onKey(event), away);
    for (const query of ["(prefers-color-scheme: dark)", "(forced-colors: active)"]) {
      matchMedia(query).addEventListener("change", () => this.theme(this.chosenTheme ?? null), away);
    }
    // Drawn when it has a size: a widget is placed after it was created.
    let width = 0;
    this.sizes = new ResizeObserver(() => width !== (width = this.host.clientWidth) && this.redraw());
    this.sizes.observe(this.host);
  }

  destroy() {
    this.play(false);
    clearTimeout(this.pending);
    this.sizes.disconnect();
    this.gone.abort();
    this.host.remove();
  }

  toggleTheme() {
    this.theme(this.host.dataset.theme === "dark" ? "light" : "dark");
  }

  onKey(event) {
    const on = event.composedPath()[0];
    if (event.ctrlKey || event.metaKey || event.altKey || this.part("keys").open || !this.panes.length) return;
    if (on.matches?.("select, input[type=search]")) return;
    const leap = event.shiftKey ? 10 : 1;
    const moves = {
      ArrowRight: () => this.go(this.step + leap),
      ArrowLeft: () => this.go(this.step - leap),
      Home: () => this.go(0),
      End: () => this.go(this.numSteps - 1),
    };
    const back = event.shiftKey ? -1 : 1;
    const letters = {
      f: () => this.followNext(back),
      e: () => this.goEvent(back),
      n: () => this.goDifference(back),
      "+": () => this.zoom(1 / 4),
      "-": () => this.zoom(4),
      "?": () => this.part("keys").showModal(),
    };
    if (!this.options.embedded) letters.t = () => this.toggleTheme();
    let action = moves[event.key];
    // Space presses the button that has the focus; anywhere else it plays.
    if (event.key === " " && !on.matches?.("button")) action = () => this.play(!this.playing);
    if (this.part("letters").checked) action ??= letters[event.key.toLowerCase()];
    if (!action) return;
    event.preventDefault();
    action();
  }
}
