"use strict";
// The state of every request at any step, folded from a trace's records by the rules of replay()
// in mini_engine/trace/__init__.py, against which it is tested. A copy every KEYFRAME steps makes going
// back, or far ahead, as cheap as going on.

const KEYFRAME = 50;

class Fold {
  constructor(trace) {
    this.trace = trace;
    this.steps = trace.steps;
    this.config = trace.header.config;
    this.lives = new Map(); // id -> [{ step, state }], a request's changes of state, in order
    this.numDecodes = []; // by step
    this.keyframes = [];
    this.index = -1;
    this.views = new Map();
    this.cached = new Uint8Array(this.config.num_blocks); // 1: the content can be found again
    for (let index = 0; index < this.steps.length; index++) {
      this.forward();
      if (index % KEYFRAME === 0) this.keyframes.push(this.copy());
      this.numDecodes.push(this.steps[index].scheduled.filter(([id]) => this.views.get(id).state === "decode").length);
      for (const { life, state } of this.views.values()) {
        if (life.at(-1)?.state !== state) life.push({ step: index, state });
      }
    }
  }

  /** The views {id: view}, as things stood while step `index` ran. They are reused by the next call. */
  at(index) {
    const frame = Math.floor(index / KEYFRAME);
    if (index < this.index || frame * KEYFRAME > this.index) {
      const { views, cached } = this.keyframes[frame];
      this.views = new Map([...views].map(([id, view]) => [id, { ...view }]));
      this.cached = cached.slice();
      this.index = frame * KEYFRAME;
    }
    while (this.index < index) this.forward();
    return this.views;
  }

  copy() {
    // The block lists are never changed in place, so they may be shared.
    const views = new Map([...this.views].map(([id, view]) => [id, { ...view }]));
    return { views, cached: this.cached.slice() };
  }

  forward() {
    if (this.index >= 0) this.settle(this.steps[this.index]);
    this.index++;
    this.begin(this.steps[this.index]);
  }

  begin(record) {
    for (const view of this.views.values()) {
      view.num_scheduled = 0;
      view.admitted = false;
      if (view.state === "preempted") view.state = "waiting";
      else if (view.finish_reason !== null) Object.assign(view, { state: "finished", blocks: [], running: false });
    }
    const finished = new Map();
    for (const event of record.events) {
      const view = this.views.get(event.id);
      if (event.type === "QUEUED") {
        if (!this.lives.has(event.id)) this.lives.set(event.id, []);
        this.views.set(event.id, newView(event, this.lives.get(event.id)));
        finished.delete(event.id); // an aborted request's id, used again
      } else if (event.type === "PREEMPTED") {
        view.num_lost_blocks = view.blocks.length;
        view.preempted_from = phaseOf(view);
        Object.assign(view, { state: "preempted", blocks: [], num_computed_tokens: 0, running: false });
        view.num_preemptions++;
      } else if (event.type === "SCHEDULED") {
        view.num_computed_tokens = view.num_cached_tokens = event.num_cached_tokens;
        view.blocks = [...(event.cached_blocks ?? [])];
        Object.assign(view, { running: true, admitted: true, row: record.step });
      } else if (event.type === "FINISHED") finished.set(event.id, event.reason);
    }
    for (const [id, blocks] of Object.entries(record.blocks)) {
      const view = this.views.get(id);
      view.blocks = view.blocks.concat(blocks);
      for (const block of blocks) this.cached[block] = 0; // taken anew: what it held is gone
    }
    for (const [id, count] of record.scheduled) {
      const view = this.views.get(id);
      view.state = phaseOf(view);
      view.num_scheduled = count;
    }
    for (const [id, reason] of finished) {
      const view = this.views.get(id);
      view.finish_reason = reason;
      // An abort between two steps.
      if (!view.num_scheduled) Object.assign(view, { state: "finished", blocks: [], running: false });
    }
  }

  settle(record) {
    const size = this.config.block_size;
    for (const [id, count] of record.scheduled) {
      const view = this.views.get(id);
      const before = view.num_computed_tokens;
      view.num_computed_tokens += count;
      if (!this.config.prefix_caching) continue;
      const full = Math.floor(view.num_computed_tokens / size);
      for (let i = Math.floor(before / size); i < full; i++) this.cached[view.blocks[i]] = 1;
    }
    for (const id of Object.keys(record.new_tokens)) this.views.get(id).num_output_tokens++;
  }
}

function newView(event, life) {
  const { id, num_prompt_tokens, max_tokens, priority, arrival } = event;
  return {
    request_id: id, num_prompt_tokens, max_tokens, priority, arrival,
    state: "waiting", num_scheduled: 0, num_computed_tokens: 0, num_output_tokens: 0,
    num_preemptions: 0, num_cached_tokens: 0, blocks: [], finish_reason: null,
    // Only the player's own:
    life, running: false, admitted: false, row: -1, num_lost_blocks: 0, preempted_from: null,
  };
}

/** What a running request does: decode if one token is left, the last one sampled. */
function phaseOf(view) {
  return view.num_output_tokens && numTokens(view) - view.num_computed_tokens === 1 ? "decode" : "prefill";
}

/** Prompt and output so far, without what this step samples. */
function numTokens(view) {
  return view.num_prompt_tokens + view.num_output_tokens;
}

/** The running requests, in the order of the step's rows: that of admission. */
function runningOf(views, record) {
  const order = new Map(record.scheduled.map(([id], row) => [id, row]));
  const rank = (view) => order.get(view.request_id) ?? order.size + view.row;
  return [...views.values()].filter((view) => view.running).sort((a, b) => rank(a) - rank(b));
}

/** The waiting requests, in the order in which they would be admitted. */
function waitingOf(views, policy) {
  const waiting = [...views.values()].filter((v) => v.state === "waiting" || v.state === "preempted");
  const priority = (view) => (policy === "priority" ? view.priority : 0);
  return waiting.filter((v) => !v.running).sort((a, b) => priority(a) - priority(b) || a.arrival - b.arrival);
}

// What two correct schedulers must agree on: `decisions` of mini_engine/trace/__init__.py.
const COMPARED = {
  scheduled: "scheduled", num_batched_tokens: "tokens in the step", num_running: "running",
  num_waiting: "waiting", num_free_blocks: "free blocks", new_tokens: "new tokens", events: "events",
};

/** The names of the fields in which two steps differ; a step that one trace lacks differs in all. */
function differences(ours, theirs) {
  if (!ours || !theirs) return ours === theirs ? [] : Object.keys(COMPARED);
  return Object.keys(COMPARED).filter((key) => canonical(ours, key) !== canonical(theirs, key));
}

function canonical(record, key) {
  if (key === "events") {
    return JSON.stringify(record.events.map(({ t, cached_blocks, ...told }) => Object.entries(told).sort()));
  }
  if (key === "new_tokens") return JSON.stringify(Object.entries(record.new_tokens).sort());
  return JSON.stringify(record[key]);
}
