// A trace's pane. Everything is text nodes and attributes, never markup made from the trace. Lists have only the
// rows that are in view.

const ROW = 31; // pixels, as in player.css
const NARROW = 0.015; // share of the budget: smaller pieces are drawn together
const LETTERS = { waiting: "W", idle: "I", prefill: "P", decode: "D", preempted: "X", finished: "F" };
const TAGS = {
  arrive: "arrives", room: "memory", preempt: "preempted", decode: "decodes", grow: "grows", prefill: "prefills",
  admit: "admitted", idle: "idle", wait: "waits", finish: "finishes", end: "end",
};

/** The common part of the panes of traces and operation logs: a name, a chart to click, a log, lists. */
class Side {
  constructor(template, run, number, player) {
    Object.assign(this, { run, player });
    this.root = player.part(template).content.firstElementChild.cloneNode(true);
    const name = this.find(".name");
    name.textContent = run.trace.name;
    name.id = `name-${number}`;
    this.root.setAttribute("aria-labelledby", name.id);
    for (const part of this.root.querySelectorAll("section[aria-label]")) part.ariaLabel += `, ${name.textContent}`;
    this.find(".log").id = `log-${number}`;
    this.root.addEventListener("click", (event) => {
      const row = event.target.closest(".row[data-id]");
      if (row) player.follow(row.dataset.id);
    });
    const chart = this.find(".chart");
    chart.addEventListener("pointerdown", (event) => {
      if (!(event.buttons & 1)) return;
      const id = this.idAt(event);
      if (id !== undefined) player.follow(id, { jump: false });
      player.go(this.stepAt(event));
    });
    chart.addEventListener("pointermove", (event) => event.buttons & 1 && player.go(this.stepAt(event)));
  }

  find(selector) {
    return this.root.querySelector(selector);
  }

  /** The index of this run's first step in the player's count. */
  get offset() {
    return this.run.first - this.player.first;
  }

  /** The run's step at a place of the player, and the place at which a step begins, or the run ends. In a cluster
   *  `moments` has both, because each engine's steps take their own time; else the two differ by `offset`. */
  indexAt = (place) => (this.moments ? this.moments.indexes[place] : place - this.offset);
  placeOf = (index) => (this.moments ? this.moments.places[index] ?? this.moments.indexes.length : index + this.offset);

  align(moments) {
    const { steps } = this.run, indexes = [], places = [];
    for (const [place, t] of moments.entries()) {
      const last = indexes.at(-1) ?? -1, next = steps[last + 1]?.t <= t ? last + 1 : last;
      if (next > last) places.push(place);
      indexes.push(next);
    }
    this.moments = { indexes, places };
    this.close(true);
  }

  /** Show an engine of a cluster with all its cards, or its run and its meters only. */
  close(closed) {
    this.closed = closed;
    this.root.classList.toggle("closed", closed);
    this.find(".more").textContent = closed ? "Details" : "Less";
    this.find(".more").setAttribute("aria-expanded", !closed);
  }

  /** The first and the last step of a request, in the player's count. */
  span(id) {
    const life = this.run.lives.get(id);
    if (!life?.length) return null;
    const end = life.at(-1).state === "finished" ? life.at(-1).step - 1 : this.run.steps.length - 1;
    return [this.placeOf(life[0].step), this.placeOf(Math.max(life[0].step, end))];
  }

  stepAt(event) {
    const x = event.clientX - this.find(".chart").getBoundingClientRect().left;
    return this.scale.from + Math.floor((x - this.scale.left) / this.scale.column);
  }

  /** The request of the row of the chart that was clicked. */
  idAt(event) {
    const { top, rowHeight, ids } = this.scale;
    return ids[Math.floor((event.clientY - this.find(".chart").getBoundingClientRect().top - top) / rowHeight)];
  }

  placeHead() {
    const { left, column, from } = this.scale;
    this.find(".playhead").style.cssText = `left:${left + (this.player.step - from) * column - 1}px;width:${Math.max(column + 2, 4)}px`;
  }

  /** The log's sentences, with a cue as long as the last one is out of view. */
  showLog(spoken, lines, followed) {
    const log = this.find(".log");
    const items = lines.map(({ kind, ids, text }) =>
      el("li", { class: ids.includes(followed) ? "followed" : "" }, el("span", { class: `tag ${kind}` }, TAGS[kind] ?? kind), el("span", {}, text)));
    log.replaceChildren(el("li", { class: "spoken" }, spoken), ...items);
    for (const item of log.children) item.setAttribute("role", "presentation"); // a log is no list
    if (this.scrolled) log.scrollTop = 0;
    const cue = this.find(".cue");
    if (!cue) return;
    this.watch ??= new IntersectionObserver((seen) => (cue.hidden = seen.at(-1).intersectionRatio > 0.95), { root: log, threshold: [0, 0.95, 1] });
    this.watch.disconnect();
    if (items.length) this.watch.observe(items.at(-1));
  }

  measure() {
    this.colours = palette(this.root);
    // Measured only here: reading a size between two changes makes the browser lay out twice.
    this.poolWidth = this.find(".pool-card .pool").clientWidth;
    this.barWidth = this.find(".budget .bar")?.clientWidth;
    for (const rows of this.lists) rows.height = rows.box.clientHeight;
  }

  /** Scroll a request's rows into view. */
  reveal(id) {
    for (const rows of this.lists) rows.reveal(id);
  }
}

class Pane extends Side {
  constructor(trace, number, player) {
    super("pane", new Fold(trace), number, player);
    this.fold = this.run;
    this.texts = trace.texts;
    this.find(".config").textContent = settings(trace.header);
    this.root.style.setProperty("--rows", Math.max(4, Math.min(6, trace.header.config.max_num_seqs)));
    this.root.querySelectorAll("marker").forEach((marker) => (marker.id = `tip-${number}`));
    this.root.style.setProperty("--tip", `url(#tip-${number})`);
    const forks = trace.steps.some(({ events }) => events.some((event) => event.num_forked_tokens));
    this.root.classList.toggle("caching", forks || Boolean(trace.header.config.prefix_caching));
    this.root.classList.toggle("idling", [...this.fold.lives.values()].flat().some(({ state }) => state === "idle"));
    this.find(".texts-card").hidden = !this.texts;
    this.root.classList.toggle("with-texts", Boolean(this.texts));
    this.waiting = new Rows(this.find(".waiting-card .rows"), "Waiting requests", (view) => this.waitingRow(view));
    this.running = new Rows(this.find(".running-card .rows"), "Running requests", (view) => this.runningRow(view));
    this.lines = new Rows(this.find(".texts-card .rows"), "Texts so far", (view) => this.textRow(view));
    this.lists = [this.waiting, this.running, this.lines];
    this.find(".pool-card canvas").addEventListener("click", (event) => this.clickPool(event));
    this.find(".log").addEventListener("scroll", (event) => (this.scrolled = event.target.scrollTop > 0));
    this.find(".more").addEventListener("click", () => {
      this.close(!this.closed);
      player.redraw();
    });
    this.find(".closer").addEventListener("click", () => player.zoom(1 / 4));
    this.find(".wider").addEventListener("click", () => player.zoom(4));
    this.find(".all").addEventListener("click", () => player.zoom(0));
  }

  noun = "step";
  divergences = divergences;
  differences = differences;
  partedOn = partedOn;
  fieldName = (field) => COMPARED[field];
  fieldTexts = fieldTexts;

  /** {kind of event: its steps}, for the kinds that occur. A lasting state counts where it begins. */
  kinds() {
    const kinds = {
      preemption: [], arrival: [], admission: [], "prefix hit": [], fork: [], "moved blocks": [], finish: [], abort: [],
      "mixed step": [], "wait for memory": [], "wait for slots": [], "wait for budget": [],
    };
    const events = { PREEMPTED: "preemption", QUEUED: "arrival", SCHEDULED: "admission", FINISHED: "finish" };
    let wasMixed = false, wasReason = "";
    this.run.steps.forEach((record, step) => {
      for (const event of record.events) {
        kinds[event.reason === "abort" ? "abort" : events[event.type]]?.push(step);
        const { num_forked_tokens: forked = 0, num_external_computed_tokens: external = 0 } = event;
        if (event.num_cached_tokens > forked + external) kinds["prefix hit"].push(step);
        if (forked) kinds.fork.push(step);
        if (external) kinds["moved blocks"].push(step);
      }
      const { reason } = record.blocked, decodes = this.run.numDecodes[step];
      const mixed = decodes > 0 && decodes < record.scheduled.length;
      if (mixed && !wasMixed) kinds["mixed step"].push(step);
      if (reason !== wasReason) kinds[`wait for ${reason}`]?.push(step);
      [wasMixed, wasReason] = [mixed, reason];
    });
    return new Map(Object.entries(kinds).filter(([, steps]) => steps.length));
  }

  /** Redraw what does not depend on the step: after a change of size, theme, or visible part. */
  drawRun(scope) {
    const canvas = this.find(".overview canvas");
    this.scale = drawOverview(canvas, this.fold, { ...scope, side: this }, this.colours);
    const { first, numSteps } = this.player, { from, to, whole } = scope;
    this.find(".scope").textContent = whole ? "The whole run" : this.moments ? "A part of the run, and the requests that compute in it" : `Steps ${first + from} to ${first + to - 1} of ${first + numSteps - 1}, and the requests that compute in them`;
    this.find(".zoom").hidden = numSteps <= 2 * CLOSEST;
    this.find(".closer").disabled = to - from <= CLOSEST;
    this.find(".wider").disabled = this.find(".all").disabled = whole;
    const { lives, steps } = this.fold;
    canvas.setAttribute("aria-label", `${count(lives.size, "request")} over ${count(steps.length, "step")}, one row each; below them tokens and blocks of each step.`);
  }

  render(step, followed) {
    const record = this.fold.steps[step];
    const idle = this.moments && !record.scheduled.length;
    const number = this.moments ? record.step : this.player.first + this.player.step;
    const last = this.fold.steps.at(-1)?.step;
    this.find(".log-card h3").replaceChildren(
      idle ? "Idle" : record ? `What step ${record.step} decides` : last === undefined ? "Over before its first step" : step < 0 ? `Not recorded: the trace begins with step ${this.fold.first}` : `Over after step ${last}`,
      el("span", { class: "count" }, record ? this.when(record) : ""));
    const index = Math.max(0, Math.min(step, this.fold.steps.length - 1));
    const views = this.fold.at(index);
    this.showLog(`Step ${number}`, record ? this.sentences(index) : step < 0 ? [] : ending(this.fold), followed);
    this.draw(record ?? this.fold.record(index), views, followed);
    this.placeHead();
    if (this.moments) this.find(".config").textContent = idle ? "idle" : `${record.num_running} running, ${record.num_waiting} waiting`;
  }

  /** When the step ran, unless time is counted in steps. */
  when({ t, t_end }) {
    const { unit } = this.fold.trace.header;
    return unit === "step" ? "" : ` ${Number(t.toFixed(3))} to ${Number(t_end.toFixed(3))} ${unit}`;
  }

  sentences = (index) => sentences(this.fold, index);
  queues = (record, views) => ({ waiting: waitingOf(views, this.fold.config.policy), running: runningOf(views, record) });

  draw(record, views, followed) {
    if (this.closed) return this.drawMeters(record, views);
    const { waiting, running } = this.queues(record, views);
    this.over = overBudget(record, this.fold.config.max_num_batched_tokens);
    this.waiting.show(waiting);
    this.running.show(running);
    this.find(".waiting-card .count").textContent = `${record.num_waiting}, front first`;
    this.find(".running-card .count").textContent = `${record.num_running}, in row order`;
    this.drawMeters(record, views);
    this.drawLife(views.get(followed), followed, record);
    this.drawPool(record, views, followed);
    if (this.texts) this.drawTexts(record, views, followed);
  }

  drawMeters(record, views) {
    const { max_num_batched_tokens: budget, num_blocks: blocks, max_num_seqs: slots } = this.fold.config;
    const part = (cls, share, text = "", title = "") =>
      el("i", { class: cls, style: `width:${100 * share}%`, title: title || text }, share * this.barWidth > 7 * text.length + 2 ? text : "");
    const over = record.num_batched_tokens - budget, scale = Math.max(budget, record.num_batched_tokens);
    const excess = over > 0 ? [el("i", { class: "over", style: `left:${(100 * budget) / scale}%`, title: `${count(over, "token")} over the budget` })] : [];
    let end = 0; // of the pieces so far; beyond the budget the hatch would cover words
    this.find(".budget").classList.toggle("over", over > 0);
    meter(this.find(".budget"), record.num_batched_tokens, over > 0 ? `of ${budget}, ${over} over` : `of ${count(budget, "token")}`,
      pieces(record, views, scale).map(({ state, tokens, ids }) => {
        end += tokens;
        const text = end > budget ? "" : ids.length > 1 ? count(ids.length, state) : tokens > 1 ? `${ids[0]} ${tokens}` : ids[0];
        return part(tokens / scale < NARROW ? `${state} narrow` : state, tokens / scale, text, `${list(ids)}: ${count(tokens, "token")}, ${state}`);
      }).concat(excess));

    const used = blocks - record.num_free_blocks;
    const cached = this.freeCached(views);
    meter(this.find(".kv"), used, cached ? `of ${blocks}, ${cached} more cached` : `of ${blocks} used`,
      [used && part("used", used / blocks), cached && part("cached", cached / blocks)].filter(Boolean));

    const pips = slots <= 32
      ? Array.from({ length: slots }, (_, i) => el("i", { class: i < record.num_running ? "slot taken" : "slot" }))
      : [part("taken", record.num_running / slots)];
    meter(this.find(".slots"), record.num_running, `of ${slots} taken`, pips);
  }

  freeCached(views) {
    const held = new Set();
    for (const view of views.values()) for (const block of view.blocks) held.add(block);
    return this.fold.cached.reduce((sum, flag, block) => sum + (flag && !held.has(block)), 0);
  }

  drawPool(record, views, followed) {
    const canvas = this.find(".pool-card canvas");
    this.pool = drawPool(canvas, this.poolWidth, this.fold, record, views, this.player.tint, followed, this.colours);
    const { num_blocks: total, block_size: size } = this.fold.config;
    const cached = this.fold.config.prefix_caching ? `, ${record.num_cached_blocks} with cached content` : "";
    this.find(".pool-card .count").textContent = `${total} of ${count(size, "token")} each${cached}`;
    const held = runningOf(views, record).slice(0, 12).map((view) => `${view.request_id} ${view.blocks.length}`);
    canvas.setAttribute("aria-label", `${record.num_free_blocks} of ${total} blocks are free. Held: ${held.join(", ") || "none"}.`);
  }

  drawLife(view, id, record) {
    this.find(".who").textContent = id;
    const now = this.fold.lives.has(id) ? lifeOf(view, id) : `${id} is not part of this trace.`;
    this.find(".saying").textContent = now;
    const machine = this.find(".machine");
    machine.setAttribute("aria-label", `Life cycle: waiting, prefill, decoding, finished; preemption leads back to waiting. ${now}`);
    machine.querySelectorAll(".lit").forEach((part) => part.classList.remove("lit"));
    for (const name of litParts(view, record)) machine.querySelector(name).classList.add("lit");
    this.drawStrip(id);
    if (this.texts) this.drawText(view, id, record);
    this.find(".facts").replaceChildren(...(view ? facts(view) : []).map(([term, value]) =>
      el("div", { class: term === "blocks" ? "wide" : "" }, el("dt", {}, term), el("dd", {}, String(value)))));
  }

  drawStrip(id) {
    const strip = this.find(".strip");
    const life = this.fold.lives.get(id) ?? [];
    const { numSteps: total, seen } = this.player, { first } = this.fold;
    const at = (step) => (100 * step) / total;
    const spans = life.map(({ step, state }, i) => ({ step, state, end: life[i + 1]?.step ?? this.fold.steps.length }));
    const shown = spans.map((span) => ({ ...span, place: this.placeOf(span.step), width: Math.min(seen, this.placeOf(span.end)) - this.placeOf(span.step) })).filter(({ width }) => width > 0);
    strip.replaceChildren(...shown.map(({ state, place, width }) =>
      el("i", { class: state, style: `left:${at(place)}%;width:${at(width)}%` })),
    el("i", { class: "here", style: `left:calc(${at(this.player.step + 0.5)}% - 1px)` }));
    strip.setAttribute("aria-label", `${id}: ${shown.slice(0, 20).map(({ step, state, place, width }) => `${state} from step ${first + step}${state === "finished" ? "" : ` to ${first + this.indexAt(place + width - 1)}`}`).join(", ")}`);
  }

  waitingRow(view) {
    const tokens = numTokens(view);
    const blocks = Math.ceil(tokens / this.fold.config.block_size);
    const again = view.num_preemptions ? `, preempted ${view.num_preemptions === 1 ? "once" : `${view.num_preemptions} times`}` : "";
    const amount = `${count(tokens, "token")}, needs ${count(blocks, "block")}${again}`;
    return this.row(view, `${view.state}, ${amount}`, el("span", { class: "amount" }, amount));
  }

  runningRow(view) {
    const { num_computed_tokens: done, num_scheduled: now, num_prompt_tokens: prompt } = view;
    const { num_drafts: drafts, num_rejected: rejected } = view;
    const at = (tokens) => (100 * tokens) / (prompt + view.max_tokens);
    const part = (cls, from, to) => el("i", { class: cls, style: `left:${at(from)}%;width:${at(to - from)}%` });
    const bar = el("span", { class: "progress" }, part("done", 0, done), part("cached", 0, view.num_cached_tokens),
      part(`now ${view.state}`, done, done + now - rejected),
      part("now rejected", done + now - rejected, done + now), el("i", { class: "prompt", style: `left:calc(${at(prompt)}% - 1px)` }));
    const known = numTokens(view) + drafts - rejected;
    const amount = `${done + now - rejected} of ${known}`;
    const plus = drafts ? `+${now - rejected} −${rejected}` : `+${now}`;
    const verified = drafts ? `, ${drafts} of them proposed and ${rejected} rejected` : "";
    const over = this.over.get(view.request_id) ?? 0;
    const beyond = over ? `, ${over} of them over the budget` : "";
    return this.row(view, `${drawnState(view)}, ${count(now, "token")} in this step${verified}${beyond}, ${amount} computed after it`,
      bar, el("span", { class: done + now - rejected > known ? "amount over" : "amount" }, amount), el("span", { class: over ? "plus over" : "plus", title: over ? `${over} over the budget` : "" }, plus));
  }

  row(view, spoken, ...cells) {
    const { request_id: id } = view, state = drawnState(view);
    const followed = id === this.player.followed;
    return rowButton({ class: "row", "data-id": id, "aria-pressed": followed }, `${id}: ${spoken}`,
      el("span", { class: "id", style: `background:${this.player.tint(id)}` }, id),
      el("span", { class: `letter ${state}`, title: inWord(state) }, LETTERS[state]), ...cells);
  }

  /** A request's prompt, its output before this step, and that of the step. */
  textOf(view, record) {
    const [prompt, pieces] = this.texts[view.request_id];
    const before = view.num_output_tokens, now = before + (record.new_tokens[view.request_id]?.length ?? 0);
    if (view.state === "finished") return [prompt, pieces.join(""), ""];
    return [prompt, pieces.slice(0, before).join(""), pieces.slice(before, view.finish_reason ? undefined : now).join("")];
  }

  drawTexts(record, views) {
    this.record = record;
    this.lines.show([...views.values()].filter((view) => Object.hasOwn(this.texts, view.request_id)));
  }

  textRow(view) {
    const [prompt, output, piece] = this.textOf(view, this.record);
    const tail = `${output}${piece}`.replaceAll("\n", " / ").slice(-160);
    return this.row(view, `${prompt} ${output}${piece}`.slice(-300), el("span", { class: "tail" }, el("span", { class: "line" },
      el("span", { class: "prompt-text" }, tail.length < 60 ? prompt.replaceAll("\n", " / ").slice(tail.length - 120) : ""),
      el("span", {}, tail.slice(0, tail.length - piece.length)), el("mark", {}, tail.slice(tail.length - piece.length)))));
  }

  /** The whole text of the followed request. */
  drawText(view, id, record) {
    const box = this.find(".life-card .text");
    box.hidden = !view || !Object.hasOwn(this.texts, id);
    if (box.hidden) return;
    const [prompt, output, piece] = this.textOf(view, record);
    box.replaceChildren(el("span", { class: "prompt-text" }, prompt), output, el("mark", {}, piece));
  }

  clickPool(event) {
    const { columns, side, owners } = this.pool;
    const block = Math.floor(event.offsetY / side) * columns + Math.floor(event.offsetX / side);
    const ids = owners[block] ?? [];
    // Another click on a shared block follows its next owner.
    if (ids.length) this.player.follow(ids[(ids.indexOf(this.player.followed) + 1) % ids.length]);
  }
}

/** A list with only the rows in view in the document. */
class Rows {
  constructor(box, name, makeRow) {
    Object.assign(this, { box, list: box.firstElementChild, makeRow, views: [], top: 0, height: 0 });
    this.list.setAttribute("aria-label", name);
    box.addEventListener("scroll", () => {
      this.top = box.scrollTop;
      this.render();
    });
  }

  show(views) {
    this.views = views;
    this.list.style.height = `${views.length * ROW}px`;
    this.render();
  }

  render() {
    const focused = this.focused()?.dataset.id ?? null;
    const first = Math.max(0, Math.floor(this.top / ROW) - 1);
    const last = Math.min(this.views.length, first + Math.ceil(this.height / ROW) + 3);
    const rows = [];
    for (let i = first; i < last; i++) {
      const place = { style: `top:${i * ROW}px`, "aria-setsize": this.views.length, "aria-posinset": i + 1 };
      rows.push(el("li", place, this.makeRow(this.views[i])));
    }
    if (!rows.length) rows.push(el("li", { class: "empty" }, "none"));
    this.list.replaceChildren(...rows);
    if (focused !== null) this.refocus(focused);
  }

  /** The row that has the focus. */
  focused() {
    const { activeElement } = this.box.getRootNode();
    return this.list.contains(activeElement) ? activeElement : null;
  }

  reveal(id) {
    this.revealRow(this.views.findIndex((view) => view.request_id === id));
  }

  revealRow(index) {
    if (index < 0 || (index * ROW >= this.top && (index + 1) * ROW <= this.top + this.height)) return;
    this.box.scrollTop = this.top = Math.max(0, index * ROW - this.height / 2 + ROW / 2);
    this.render();
  }

  /** The focus follows its request; if that has left the list, the first row gets it. */
  refocus(id) {
    const rows = [...this.list.querySelectorAll(".row")];
    (rows.find((row) => row.dataset.id === id) ?? rows[0])?.focus({ preventScroll: true });
  }
}

function meter(box, value, rest, parts) {
  box.querySelector("p").replaceChildren(el("b", {}, String(value)), ` ${rest}`);
  box.querySelector(".bar").replaceChildren(...parts);
}

/** The rows of a step as pieces of the budget; narrow neighbours of the same state are one piece. */
function pieces(record, views, budget) {
  const found = [];
  for (const [id, tokens] of record.scheduled) {
    const { state } = views.get(id), narrow = tokens / budget < NARROW, last = found.at(-1);
    if (narrow && last?.narrow && last.state === state) {
      last.tokens += tokens;
      last.ids.push(id);
    } else found.push({ state, tokens, narrow, ids: [id] });
  }
  return found;
}

/** {request: its tokens beyond the budget}, of a step whose rows together exceed it. */
function overBudget(record, budget) {
  const over = new Map();
  let sum = 0;
  for (const [id, tokens] of record.scheduled) {
    sum += tokens;
    if (sum > budget) over.set(id, Math.min(tokens, sum - budget));
  }
  return over;
}

/** The boxes and arrows of the state machine that a step highlights. */
function litParts(view, record) {
  if (!view) return [];
  const lit = [`.state.${view.state === "preempted" ? "waiting" : view.state}`];
  if (view.state === "preempted") lit.push(`.arrow.of-${view.preempted_from}`, ".arrow.word");
  if (view.admitted) lit.push(".arrow.admitted");
  if (view.state === "prefill" && view.request_id in record.new_tokens) lit.push(".arrow.computed");
  if (view.finish_reason && view.state === "decode") lit.push(".arrow.ended");
  return lit;
}

function facts(view) {
  const computed = view.num_computed_tokens + view.num_scheduled - view.num_rejected;
  const known = numTokens(view) + view.num_drafts - view.num_rejected;
  return [
    ["prompt", count(view.num_prompt_tokens, "token")],
    ["output so far", `${view.num_output_tokens} of ${view.max_tokens}`],
    ["computed", `${computed} of ${known}`],
    ["found computed", count(view.num_cached_tokens, "token")],
    ...(view.num_draft_tokens ? [["drafts accepted", `${view.num_accepted_tokens} of ${view.num_draft_tokens}`]] : []),
    ["preemptions", view.num_preemptions],
    // A queue numbers arrivals; a lab's request that met none has -1.
    view.arrival < 0 ? ["priority", view.priority] : ["priority, arrival", `${view.priority}, ${view.arrival}`],
    ["blocks", view.blocks.length ? view.blocks.join(" ") : "none"],
  ];
}

function settings({ config, parts }) {
  const threshold = config.long_prefill_token_threshold;
  const own = Object.entries(parts ?? {}).map(([part, source]) => `${part} from ${source}`);
  return [
    config.policy, `budget ${config.max_num_batched_tokens} tokens`, `${config.max_num_seqs} slots`,
    threshold ? `chunks up to ${threshold}` : "no chunk threshold",
    `${config.num_blocks} blocks of ${config.block_size}`, `prefix cache ${config.prefix_caching ? "on" : "off"}`, ...own,
  ].join(" · ");
}

/** The part of a field in which two records differ, in words: [of the first, of the second]. */
function fieldTexts(ours, theirs, field) {
  const [a, b] = [ours, theirs].map((record) => entriesOf(record, field));
  if (!a) return [ours, theirs].map((record) => String(record[field]));
  const keys = [...new Set([...a.keys(), ...b.keys()])].filter((key) => a.get(key) !== b.get(key));
  // Without a key the order alone differs.
  return [a, b].map((map) => some((keys.length ? keys.filter((key) => map.has(key)) : [...map.keys()]).map((key) => map.get(key))));
}

/** A field with a part for each request or event as {key: words}; null for a number. */
function entriesOf(record, field) {
  if (field === "scheduled") return new Map(record.scheduled.map(([id, n]) => [id, `${id}: ${n}`]));
  if (UNORDERED.includes(field)) return new Map(Object.entries(record[field] ?? {}).map(([id, value]) => [id, `${id}: ${value}`]));
  return field === "events" ? new Map(record.events.map((event) => [`${event.type} ${event.id}`, happening(event)])) : null;
}

function happening({ id, type, reason, num_cached_tokens: found, needs, ...event }) {
  const happened = { QUEUED: "queued", SCHEDULED: "admitted", PREEMPTED: "preempted", FINISHED: "finished" };
  const more = [
    reason, found && `${found} tokens found computed`, event.for && `for ${event.for}`, needs !== undefined && `needs ${count(needs, "block")}, ${are(event.free)} free`,
    type === "QUEUED" && `priority ${event.priority}${event.arrival < 0 ? "" : `, arrival ${event.arrival}`}`,
  ].filter(Boolean);
  return `${id} ${happened[type]}${more.length ? ` (${more.join(", ")})` : ""}`;
}

function some(words) {
  return (words.length > MANY + 2 ? [...words.slice(0, MANY), `${words.length - MANY} more`] : words).join(", ") || "none";
}
