// Two runs: the fields of a step that differ, and the steps in which a difference begins (docs/trace.md).

// The fields that two correct schedulers share: `decisions` of mini_engine/trace/compare.py.
const COMPARED = {
  scheduled: "scheduled", num_batched_tokens: "tokens in the step", num_running: "running",
  num_waiting: "waiting", num_free_blocks: "free blocks", draft_token_ids: "drafts",
  num_accepted_tokens: "accepted drafts", new_tokens: "new tokens", events: "events",
};

const UNORDERED = ["draft_token_ids", "num_accepted_tokens", "new_tokens"]; // by request

/** The names of the fields in which two steps differ; a step that one trace lacks differs in all. */
function differences(ours, theirs) {
  if (!ours || !theirs) return ours === theirs ? [] : Object.keys(COMPARED);
  return Object.keys(COMPARED).filter((key) => canonical(ours, key) !== canonical(theirs, key));
}

function canonical(record, key) {
  if (key === "events") {
    return JSON.stringify(record.events.map(({ t, cached_blocks, ...known }) => Object.entries(known).sort()));
  }
  if (UNORDERED.includes(key)) return JSON.stringify(Object.entries(record[key] ?? {}).sort());
  return JSON.stringify(record[key]);
}

/**
 * The beginnings of differences: [{ step, decision, over, lives: [{ id, states }] }], by step. From equal state the
 * two decide differently (`decision`); the state of a request begins to differ, counted once for each; or one run is
 * over (`over`).
 */
function divergences(folds) {
  const [ours, theirs] = folds;
  const first = Math.min(ours.first, theirs.first);
  const start = Math.max(ours.first, theirs.first);
  const end = Math.min(...folds.map((fold) => fold.first + fold.steps.length));
  const found = [];
  const unequal = new Set(); // requests that a step left in another state
  const texts = new Map(); // id -> { said: the output tokens in both, agreed: how many are alike, unequal: a later one is not }
  const diverged = new Set();
  let before = folds.flatMap((fold) => [...fold.start.keys()]); // the requests of the last step
  let sameRows = true;
  for (const id of before) if (!sameView(folds.map((fold) => fold.start.get(id)), [[], []])) unequal.add(id);
  for (let step = start; step < end; step++) {
    const records = folds.map((fold) => fold.steps[step - fold.first]);
    const views = folds.map((fold) => fold.at(step - fold.first));
    const touched = new Set(records.flatMap(namesIn));
    const decision = !unequal.size && sameRows && differences(...records).length > 0;
    const lives = [];
    for (const id of new Set([...before, ...touched])) {
      const states = views.map((each) => each.get(id)?.state);
      if (states[0] === states[1] || diverged.has(id)) continue;
      diverged.add(id);
      lives.push({ id, states });
    }
    if (decision || lives.length) found.push({ step: step - first, decision, over: false, lives });
    for (const id of touched) {
      const both = views.map((each) => each.get(id));
      const sampled = records.map((record) => record.new_tokens[id] ?? []);
      const text = texts.get(id) ?? { said: [[], []], agreed: 0, unequal: false };
      texts.set(id, text);
      text.said.forEach((tokens, run) => tokens.push(...sampled[run]));
      for (; !text.unequal && text.agreed < Math.min(...text.said.map(({ length }) => length)); text.agreed++) {
        text.unequal = text.said[0][text.agreed] !== text.said[1][text.agreed];
      }
      const done = both.every((view) => view?.finish_reason); // and has no further effect
      if (done || (!text.unequal && sameView(both, sampled))) unequal.delete(id);
      else unequal.add(id);
    }
    sameRows = String(records[0].scheduled.map(([id]) => id)) === String(records[1].scheduled.map(([id]) => id));
    before = touched;
  }
  if (folds.some((fold) => fold.first + fold.steps.length > end)) {
    found.push({ step: end - first, decision: false, over: true, lives: [] });
  }
  return found;
}

/** The request on which two steps part, in the order of a step; undefined if they part on none. */
function partedOn(ours, theirs) {
  const ofType = (record, type) => new Map(record.events.filter((event) => event.type === type)
    .map(({ t, cached_blocks, ...event }) => [event.id, JSON.stringify(event)]));
  const parts = ({ scheduled, new_tokens, ...record } = { scheduled: [], new_tokens: {}, events: [] }) => [
    ...["QUEUED", "PREEMPTED", "SCHEDULED"].map((type) => ofType(record, type)), new Map(scheduled),
    new Map(Object.entries(new_tokens).map(([id, tokens]) => [id, String(tokens)])), ofType(record, "FINISHED"),
  ];
  const both = parts(theirs);
  for (const [i, mine] of parts(ours).entries()) {
    const ids = [...mine.keys(), ...both[i].keys()].filter((id) => mine.get(id) !== both[i].get(id));
    const id = ids.find((one) => mine.has(one) !== both[i].has(one)) ?? ids[0]; // first of all what one run leaves out
    if (id !== undefined) return id;
  }
  return ours?.scheduled.find(([id], row) => id !== theirs?.scheduled[row]?.[0])?.[0]; // only the order differs
}

/** Whether a step leaves a request alike in both runs, `sampled` being its new tokens. */
function sameView([ours, theirs], sampled) {
  const after = (view, tokens) => view && [
    view.running, view.num_computed_tokens + view.num_scheduled, view.num_output_tokens + tokens.length,
    view.finish_reason, view.priority, view.arrival,
  ].join();
  return after(ours, sampled[0]) === after(theirs, sampled[1]);
}

function namesIn(record) {
  return [...record.scheduled.map(([id]) => id), ...record.events.map(({ id }) => id), ...Object.keys(record.blocks)];
}
