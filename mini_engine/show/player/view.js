"use strict";
// One trace's panel. Everything is text nodes and attributes, never markup made from the trace, and
// of the queues only the rows that are in sight exist.

const ROW = 31; // pixels, as in player.css
const LETTERS = { waiting: "W", prefill: "P", decode: "D", preempted: "X", finished: "F" };
const TAGS = {
  arrive: "arrives", room: "memory", preempt: "preempted", decode: "decodes", grow: "grows", prefill: "prefills",
  admit: "admitted", wait: "waits", finish: "finishes", end: "end",
};

function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name === "style") element.style.cssText = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

class Pane {
  constructor(trace, number, player) {
    this.fold = new Fold(trace);
    this.player = player;
    this.root = document.getElementById("pane").content.firstElementChild.cloneNode(true);
    const name = this.find(".name");
    name.textContent = trace.name;
    name.id = `name-${number}`;
    this.root.setAttribute("aria-labelledby", name.id);
    this.find(".config").textContent = settings(trace.header);
    this.find(".log").id = `log-${number}`;
    this.root.style.setProperty("--rows", Math.max(4, Math.min(6, trace.header.config.max_num_seqs)));
    this.root.querySelectorAll("marker").forEach((marker) => (marker.id = `tip-${number}`));
    this.root.style.setProperty("--tip", `url(#tip-${number})`);
    this.waiting = new Rows(this.find(".waiting-card .rows"), "Waiting requests", (view) => this.waitingRow(view));
    this.running = new Rows(this.find(".running-card .rows"), "Running requests", (view) => this.runningRow(view));
    this.root.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row) player.follow(row.dataset.id);
    });
    this.find(".pool canvas").addEventListener("click", (event) => this.clickPool(event));
    this.find(".log").addEventListener("scroll", (event) => (this.scrolled = event.target.scrollTop > 0));
    const chart = this.find(".chart");
    const seek = (event) => event.buttons & 1 && player.go(this.stepAt(event));
    chart.addEventListener("pointerdown", seek);
    chart.addEventListener("pointermove", seek);
  }

  find(selector) {
    return this.root.querySelector(selector);
  }

  /** Redraw what does not depend on the step: after a change of size or theme. */
  drawRun() {
    this.colours = palette();
    // Measured here only: to ask for a size between two changes makes the browser lay out twice.
    this.poolWidth = this.find(".pool").clientWidth;
    for (const rows of [this.waiting, this.running]) rows.height = rows.box.clientHeight;
    const canvas = this.find(".overview canvas");
    this.scale = drawOverview(canvas, this.fold, this.player.numSteps, this.player.departing, this.player.followed, this.colours);
    const { lives, steps } = this.fold;
    canvas.setAttribute("aria-label", `${count(lives.size, "request")} over ${count(steps.length, "step")}, a row each; below them tokens and blocks of each step.`);
  }

  render(step, followed) {
    const record = this.fold.steps[step];
    this.find(".log-card h3").replaceChildren(
      record ? `What step ${record.step} decides` : `Over after step ${this.fold.steps.at(-1).step}`,
      el("span", { class: "count" }, record ? this.span(record) : ""));
    const index = Math.min(step, this.fold.steps.length - 1);
    const views = this.fold.at(index);
    this.draw(this.fold.steps[index], views, record ? sentences(this.fold, index) : [], followed);
    const { left, column } = this.scale;
    this.find(".playhead").style.cssText = `left:${left + step * column - 1}px;width:${Math.max(column + 2, 4)}px`;
  }

  /** When the step ran, unless time is counted in steps. */
  span({ t, t_end }) {
    const { unit } = this.fold.trace.header;
    return unit === "step" ? "" : ` ${Number(t.toFixed(3))} to ${Number(t_end.toFixed(3))} ${unit}`;
  }

  draw(record, views, told, followed) {
    const { config } = this.fold;
    this.waiting.show(waitingOf(views, config.policy));
    this.running.show(runningOf(views, record));
    this.find(".waiting-card .count").textContent = `${record.num_waiting}, front first`;
    this.find(".running-card .count").textContent = `${record.num_running}, in row order`;
    this.drawMeters(record, views);
    this.drawLog(told, followed);
    this.drawLife(views.get(followed), followed, record);
    this.drawPool(record, views, followed);
  }

  drawMeters(record, views) {
    const { max_num_batched_tokens: budget, num_blocks: blocks, max_num_seqs: slots } = this.fold.config;
    const part = (cls, share, text = "") => el("i", { class: cls, style: `width:${100 * share}%` }, share > 0.025 * text.length ? text : "");
    meter(this.find(".budget"), record.num_batched_tokens, `of ${budget} tokens`,
      record.scheduled.map(([id, n]) => part(views.get(id).state, n / budget, n > 1 ? `${id} ${n}` : id)));

    const used = blocks - record.num_free_blocks;
    const cached = this.freeCached(views);
    meter(this.find(".kv"), used, cached ? `of ${blocks}, ${cached} free but cached` : `of ${blocks} used`,
      [part("used", used / blocks), part("cached", cached / blocks)]);

    const pips = slots <= 32
      ? Array.from({ length: slots }, (_, i) => el("i", { class: i < record.num_running ? "slot taken" : "slot" }))
      : [part("slot taken", record.num_running / slots)];
    meter(this.find(".slots"), record.num_running, `of ${slots} taken`, pips);
  }

  freeCached(views) {
    const held = new Set();
    for (const view of views.values()) for (const block of view.blocks) held.add(block);
    return this.fold.cached.reduce((sum, flag, block) => sum + (flag && !held.has(block)), 0);
  }

  drawLog(told, followed) {
    const log = this.find(".log");
    log.setAttribute("aria-label", `Event log of ${this.fold.trace.name}`);
    log.replaceChildren(el("li", { class: "spoken" }, `Step ${this.player.first + this.player.step}`), ...told.map(({ kind, ids, text }) =>
      el("li", { class: ids.includes(followed) ? "followed" : "" }, el("span", { class: `tag ${kind}` }, TAGS[kind]), el("span", {}, text))));
    if (this.scrolled) log.scrollTop = 0;
  }

  drawPool(record, views, followed) {
    const canvas = this.find(".pool canvas");
    this.pool = drawPool(canvas, this.poolWidth, this.fold, record, views, this.player.tint, followed, this.colours);
    const { num_blocks: total, block_size: size } = this.fold.config;
    const cached = this.fold.config.prefix_caching ? `, ${record.num_cached_blocks} with content that can be found` : "";
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
    this.find(".facts").replaceChildren(...(view ? facts(view) : []).map(([term, value]) =>
      el("div", { class: term === "blocks" ? "wide" : "" }, el("dt", {}, term), el("dd", {}, String(value)))));
  }

  drawStrip(id) {
    const strip = this.find(".strip");
    const life = this.fold.lives.get(id) ?? [];
    const { first, numSteps: total } = this.player;
    const at = (step) => (100 * step) / total;
    const ends = life.map((_, i) => life[i + 1]?.step ?? this.fold.steps.length);
    strip.replaceChildren(...life.map(({ step, state }, i) =>
      el("i", { class: state, style: `left:${at(step)}%;width:${at(ends[i] - step)}%` })),
    el("i", { class: "here", style: `left:calc(${at(this.player.step + 0.5)}% - 1px)` }));
    strip.setAttribute("aria-label", `${id}: ${life.slice(0, 20).map(({ step, state }, i) => `${state} from step ${first + step}${state === "finished" ? "" : ` to ${first + ends[i] - 1}`}`).join(", ")}`);
  }

  waitingRow(view) {
    const tokens = numTokens(view);
    const blocks = Math.ceil(tokens / this.fold.config.block_size);
    const again = view.num_preemptions ? `, preempted ${view.num_preemptions === 1 ? "once" : `${view.num_preemptions} times`}` : "";
    const told = `${count(tokens, "token")}, ${count(blocks, "block")}${again}`;
    return this.row(view, `${view.state}, ${told}`, el("span", { class: "told" }, told));
  }

  runningRow(view) {
    const { num_computed_tokens: done, num_scheduled: now, num_prompt_tokens: prompt } = view;
    const at = (tokens) => (100 * tokens) / (prompt + view.max_tokens);
    const part = (cls, from, to) => el("i", { class: cls, style: `left:${at(from)}%;width:${at(to - from)}%` });
    const bar = el("span", { class: "progress" }, part("done", 0, done), part("cached", 0, view.num_cached_tokens),
      part(`now ${view.state}`, done, done + now), el("i", { class: "prompt", style: `left:calc(${at(prompt)}% - 1px)` }));
    const told = `${done + now} of ${numTokens(view)}`;
    return this.row(view, `${view.state}, ${count(now, "token")} in this step, ${told} computed after it`,
      bar, el("span", { class: "told" }, told), el("span", { class: "plus" }, `+${now}`));
  }

  row(view, spoken, ...cells) {
    const { request_id: id, state } = view;
    const followed = id === this.player.followed;
    return el("button", { type: "button", class: "row", "data-id": id, "aria-pressed": followed, "aria-label": `${id}: ${spoken}`, title: `${id}: ${spoken}` },
      el("span", { class: "id", style: `background:${this.player.tint(id)}` }, id),
      el("span", { class: `letter ${state}` }, LETTERS[state]), ...cells);
  }

  clickPool(event) {
    const { columns, side, owners } = this.pool;
    const block = Math.floor(event.offsetY / side) * columns + Math.floor(event.offsetX / side);
    const ids = owners[block] ?? [];
    // Another click on a shared block goes on to its next owner.
    if (ids.length) this.player.follow(ids[(ids.indexOf(this.player.followed) + 1) % ids.length]);
  }

  stepAt(event) {
    const x = event.clientX - this.find(".chart").getBoundingClientRect().left;
    return Math.floor((x - this.scale.left) / this.scale.column);
  }
}

/** A list of which only the rows in sight are in the document. */
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
    const focused = this.list.contains(document.activeElement) ? document.activeElement.dataset.id : null;
    const first = Math.max(0, Math.floor(this.top / ROW) - 1);
    const last = Math.min(this.views.length, first + Math.ceil(this.height / ROW) + 3);
    const rows = [];
    for (let i = first; i < last; i++) {
      const place = { style: `top:${i * ROW}px`, "aria-setsize": this.views.length, "aria-posinset": i + 1 };
      rows.push(el("li", place, this.makeRow(this.views[i])));
    }
    if (!rows.length) rows.push(el("li", { class: "nobody" }, "nobody"));
    this.list.replaceChildren(...rows);
    if (focused !== null) this.refocus(focused);
  }

  /** The focus follows its request; where that has gone elsewhere, it stays in the list. */
  refocus(id) {
    const rows = [...this.list.querySelectorAll(".row")];
    (rows.find((row) => row.dataset.id === id) ?? rows[0])?.focus({ preventScroll: true });
  }
}

function meter(box, value, rest, parts) {
  box.querySelector("p").replaceChildren(el("b", {}, String(value)), ` ${rest}`);
  box.querySelector(".bar").replaceChildren(...parts);
}

/** Which boxes and arrows of the state machine a step lights. */
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
  const computed = view.num_computed_tokens + view.num_scheduled;
  return [
    ["prompt", count(view.num_prompt_tokens, "token")],
    ["output so far", `${view.num_output_tokens} of ${view.max_tokens}`],
    ["computed", `${computed} of ${numTokens(view)}`],
    ["from the cache", count(view.num_cached_tokens, "token")],
    ["preemptions", view.num_preemptions],
    ["priority, arrival", `${view.priority}, ${view.arrival}`],
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
