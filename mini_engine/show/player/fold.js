// The state of every request at any step, folded from a trace's records by the rules of Fold in
// mini_engine/trace/fold.py, against which it is tested. A copy every KEYFRAME steps makes a step
// back, or a jump, as cheap as a step forward.

const KEYFRAME = 50;

class Fold {
  constructor(trace) {
    this.trace = trace;
    this.steps = trace.steps;
    this.first = trace.steps[0]?.step ?? 0; // the number of the first step: a trace may begin in the middle of a run
    const { config, requests = [], cached_blocks = [] } = trace.header;
    this.config = config;
    this.lives = new Map(); // id -> [{ step, state }], a request's changes of state, in order
    this.numDecodes = []; // by step
    this.keyframes = [];
    this.index = -1;
    this.views = new Map();
    this.cached = new Uint8Array(config.num_blocks); // 1: the content can be found again
    for (const block of cached_blocks) this.cached[block] = 1;
    for (const view of requests) this.enter(view); // there before the first step
    this.start = this.copy().views;
    for (let index = 0; index < this.steps.length; index++) {
      this.forward();
      if (index % KEYFRAME === 0) this.keyframes.push(this.copy());
      this.numDecodes.push(this.steps[index].scheduled.filter(([id]) => this.views.get(id).state === "decode").length);
      for (const view of this.views.values()) {
        const state = drawnState(view);
        if (view.life.at(-1)?.state !== state) view.life.push({ step: index, state });
      }
    }
  }

  enter(fields) {
    const id = fields.request_id;
    if (!this.lives.has(id)) this.lives.set(id, []);
    this.views.set(id, newView(fields, this.lives.get(id)));
  }

  /** The views {id: view} while step `index` ran. They are reused by the next call. */
  at(index) {
    if (!this.steps.length) return this.views;
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

  /** The record of step `index`; for a run that ended before its first step, its initial state. */
  record(index) {
    if (this.steps.length) return this.steps[index];
    const views = [...this.views.values()];
    const running = views.filter((view) => view.running), held = new Set(views.flatMap((view) => view.blocks));
    return {
      step: this.first, t: 0, t_end: 0, scheduled: [], num_batched_tokens: 0, num_running: running.length,
      num_waiting: views.length - running.length, blocked: { reason: "empty" }, blocks: {}, new_tokens: {}, events: [],
      num_free_blocks: this.config.num_blocks - held.size, num_cached_blocks: this.cached.reduce((a, b) => a + b, 0),
    };
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
      view.num_scheduled = view.num_drafts = view.num_rejected = 0;
      view.admitted = false;
      if (view.state === "preempted") view.state = "waiting";
      else if (view.finish_reason !== null) Object.assign(view, { state: "finished", blocks: [], running: false });
    }
    const ended = [];
    for (const event of record.events) {
      const view = this.views.get(event.id);
      if (event.type === "QUEUED") {
        const { type, id, t, ...size } = event;
        this.enter({ request_id: id, ...size, queued_step: record.step, t_queued: t });
      } else if (event.type === "PREEMPTED") {
        view.num_lost_blocks = view.blocks.length;
        view.preempted_from = phaseOf(view);
        Object.assign(view, { state: "preempted", blocks: [], num_computed_tokens: 0, running: false });
        view.num_preemptions++;
      } else if (event.type === "SCHEDULED") {
        const hit = event.num_cached_tokens;
        Object.assign(view, { running: true, admitted: true, row: record.step, blocks: [...event.cached_blocks] });
        view.num_computed_tokens = view.num_cached_tokens = hit;
        const external = event.num_external_computed_tokens ?? 0;
        const found = hit - (event.num_forked_tokens ?? 0) - external; // in the prefix cache
        if (external && this.config.prefix_caching) for (const block of event.cached_blocks) this.cached[block] = 1;
        if (view.scheduled_step !== null) view.num_resumed_cached_tokens += found;
        else Object.assign(view, { scheduled_step: record.step, t_scheduled: record.t, num_first_cached_tokens: found });
      } else if (event.type === "FINISHED") ended.push([view, event.reason]);
    }
    for (const [id, blocks] of Object.entries(record.blocks)) {
      const view = this.views.get(id);
      view.blocks = view.blocks.concat(blocks);
      for (const block of blocks) this.cached[block] = 0; // allocated again: its old content is gone
    }
    for (const [id, count] of record.scheduled) {
      const view = this.views.get(id);
      view.state = phaseOf(view);
      view.num_scheduled = count;
      view.num_drafts = record.draft_token_ids?.[id]?.length ?? 0;
      view.num_rejected = view.num_drafts - (record.num_accepted_tokens?.[id] ?? 0);
    }
    for (const [view, reason] of ended) {
      view.finish_reason = reason;
      view.t_finished = view.num_scheduled ? record.t_end : record.t;
      // An abort between two steps.
      if (!view.num_scheduled) Object.assign(view, { state: "finished", blocks: [], running: false });
    }
  }

  settle(record) {
    const size = this.config.block_size;
    for (const [id, count] of record.scheduled) {
      const view = this.views.get(id);
      const before = view.num_computed_tokens;
      view.num_draft_tokens += view.num_drafts;
      view.num_accepted_tokens += view.num_drafts - view.num_rejected;
      view.num_computed_tokens += count - view.num_rejected;
      if (!this.config.prefix_caching) continue;
      const full = Math.floor(view.num_computed_tokens / size);
      for (let i = Math.floor(before / size); i < full; i++) this.cached[view.blocks[i]] = 1;
    }
    for (const [id, blocks] of Object.entries(record.returned_blocks ?? {})) {
      const view = this.views.get(id);
      view.blocks = view.blocks.slice(0, -blocks.length);
    }
    for (const [id, tokens] of Object.entries(record.new_tokens)) {
      const view = this.views.get(id);
      if (!tokens.length) continue;
      if (!view.num_output_tokens) view.t_first_token = record.t_end;
      view.num_output_tokens += tokens.length;
      view.t_last_token = record.t_end;
    }
  }
}

/** A view of these fields; a trace leaves out those with default values. */
function newView(fields, life) {
  return {
    state: "waiting", running: false, num_scheduled: 0, num_computed_tokens: 0, num_output_tokens: 0,
    num_preemptions: 0, num_draft_tokens: 0, num_accepted_tokens: 0, num_cached_tokens: 0, num_first_cached_tokens: 0, num_resumed_cached_tokens: 0,
    blocks: [], finish_reason: null, queued_step: null, scheduled_step: null, t_queued: null, t_scheduled: null,
    t_first_token: null, t_last_token: null, t_finished: null,
    ...fields,
    // Fields of the player only:
    life, admitted: false, row: -1, num_lost_blocks: 0, preempted_from: null, num_drafts: 0, num_rejected: 0,
  };
}

/** The phase of a running request: decode if one token is left, the last one sampled. */
function phaseOf(view) {
  return view.num_output_tokens && numTokens(view) - view.num_computed_tokens === 1 ? "decode" : "prefill";
}

/** A request's state as it is drawn: one that runs without a token in this step is idle, in whatever phase. */
function drawnState(view) {
  return view.running && !view.num_scheduled ? "idle" : view.state;
}

/** Prompt and output so far, without the token that this step samples. */
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
