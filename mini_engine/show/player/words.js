// The decisions of a step and their reasons, in sentences. Everything comes from the step's record and the
// folded views; nothing is guessed.

const MANY = 5; // from more requests on, one sentence names them all, instead of one sentence each

/** The sentences of step `index`: [{ kind, ids, text }], in the order of the scheduler's decisions. */
function sentences(fold, index) {
  const record = fold.steps[index];
  const views = fold.at(index);
  const lines = [];
  const say = (kind, ids, text) => lines.push({ kind, ids, text });
  const events = (type) => record.events.filter((event) => event.type === type);
  const rows = record.scheduled.map(([id]) => views.get(id));

  sayArrivals(events("QUEUED").map((event) => views.get(event.id)), fold.config, say);
  for (const { id, reason } of events("FINISHED")) {
    if (reason === "abort") say("finish", [id], `${id} is aborted. Its blocks are free again.`);
  }
  sayRoom(events("PREEMPTED"), views, fold.config, say);
  sayDecodes(rows.filter((view) => view.state === "decode" && !view.admitted), record, say);
  sayDrafts(record, say);
  sayGrowth(record, views, say);
  for (const view of rows) {
    if (view.admitted) say("admit", [view.request_id], admission(view, fold.config, record));
    else if (view.state === "prefill") say("prefill", [view.request_id], `${view.request_id} continues: ${chunk(view, fold.config, record)}.`);
  }
  sayIdle([...views.values()].filter((view) => drawnState(view) === "idle"), record, fold.config, say);
  sayCounts(record, [...views.values()], say);
  sayBlocked(record, fold.config, say);
  for (const { id, reason } of events("FINISHED")) {
    if (reason !== "abort") say("finish", [id], finish(views.get(id), reason, record));
  }
  if (index === fold.steps.length - 1) lines.push(...ending(fold));
  if (!lines.length) say("end", [], "Nothing is decided: there is no request.");
  return lines;
}

/** The end of the run, and the events after its last step. */
function ending(fold) {
  const end = fold.trace.end;
  if (!end) return [];
  const aborted = new Set((end.events ?? []).map(({ id }) => id));
  const lines = [...aborted].map((id) => ({ kind: "finish", ids: [id], text: `${id} is aborted after the last step.` }));
  const left = [...fold.at(fold.steps.length - 1).values()].some((view) => !view.finish_reason && !aborted.has(view.request_id));
  const how = end.end === "drained" && left ? "The recording ends here." : (ENDS[end.end] ?? `The run ends: ${end.end}.`);
  return [...lines, { kind: "end", ids: [], text: how + details(end) }];
}

const ENDS = {
  drained: "The run ends here: every request is done.",
  stuck: "The run ends here, stuck: no further step would make progress.",
  max_steps: "The recording ends here, before all requests are done.",
  error: "The run ends here with an error.",
};

function details({ error, waiting = [], running = [] }) {
  const left = [...running, ...waiting];
  return (error ? ` ${error}` : "") + (left.length ? ` Not done: ${list(left)}.` : "");
}

/** Of each request with drafts: how many were proposed, accepted and rejected, and what it is given. */
function sayDrafts(record, say) {
  for (const [id, drafts] of Object.entries(record.draft_token_ids ?? {})) {
    const accepted = record.num_accepted_tokens?.[id] ?? 0, back = record.returned_blocks?.[id]?.length ?? 0;
    const given = count(record.new_tokens[id]?.length ?? 0, "token");
    const returned = back ? ` ${count(back, "block")} of the rejected ${back === 1 ? "is" : "are"} free again.` : "";
    say("decode", [id], `${id} has ${count(drafts.length, "token")} proposed: ${accepted} accepted, ` +
      `${drafts.length - accepted} rejected. It gets ${given} in this step.${returned}`);
  }
}

function sayArrivals(views, config, say) {
  const ids = views.map((view) => view.request_id);
  if (views.length > MANY) return say("arrive", ids, `${list(ids)} arrive and join the queue.`);
  for (const view of views) {
    const class_ = config.policy === "priority" ? `, priority ${view.priority}` : "";
    const size = `${count(view.num_prompt_tokens, "prompt token")}, at most ${count(view.max_tokens, "output token")}`;
    say("arrive", [view.request_id], `${view.request_id} arrives: ${size}${class_}.`);
  }
}

function sayRoom(events, views, config, say) {
  if (!events.length) return;
  const { needs, free } = events[0];
  say("room", [], `Memory is short: the running requests need ${count(needs, "more block")}, ${are(free)} free.`);
  const rank = (view) => [config.policy === "priority" ? view.priority : 0, view.arrival];
  const behind = (a, b) => a[0] - b[0] || a[1] - b[1];
  const runs = [...views.values()].filter((view) => view.running && !view.admitted);
  for (const [n, { id, for: other }] of events.entries()) {
    const view = views.get(id);
    const others = [...runs, ...events.slice(n + 1).map((event) => views.get(event.id))];
    const later = others.find((one) => behind(rank(one), rank(view)) > 0); // which the policy preempts first
    const place = later ? `although ${later.request_id} stands behind it in ${config.policy} order` : `last in ${config.policy} order`;
    const why = other === id ? "" : ` so that ${other} can continue`;
    const kept = view.num_output_tokens ? `keeps its ${count(view.num_output_tokens, "output token")}` : "starts over later";
    say("preempt", [id, other], `${id}, ${place}, is preempted${why}. It frees ${count(view.num_lost_blocks, "block")} and ${kept}.`);
  }
}

function sayDecodes(views, record, say) {
  const ids = views.map((view) => view.request_id);
  if (views.length > 1) say("decode", ids, `${list(ids)} decode: one token each.`);
  for (const view of views.length === 1 ? views : []) {
    say("decode", ids, `${ids[0]} decodes: output token ${view.num_output_tokens + 1} of at most ${view.max_tokens}.`);
  }
}

function sayGrowth(record, views, say) {
  const grown = Object.entries(record.blocks).filter(([id]) => !views.get(id).admitted);
  if (!grown.length) return;
  const parts = grown.map(([id, blocks]) => `${id} takes block ${list(blocks)}`);
  say("grow", grown.map(([id]) => id), `${list(parts)}: ${grown.length > 1 ? "their last blocks were" : "its last block was"} full.`);
}

function admission(view, config, record) {
  const given = record.blocks[view.request_id]?.length ?? 0;
  const again = view.num_preemptions ? "is admitted again" : "is admitted";
  const tokens = count(numTokens(view), "token");
  // vLLM allocates blocks chunk by chunk.
  const short = given && view.num_cached_tokens + given * config.block_size < numTokens(view);
  const claims = `${short ? "takes" : "claims"} ${count(given, "block")} for ${short ? "this chunk of " : ""}`;
  const [have, copies] = finders(view, config, record);
  const room = view.num_cached_tokens
    ? `${have} ${view.num_cached_tokens} of its ${tokens}, and it ${claims}the rest${copies}`
    : `it ${claims}its ${tokens}`;
  return `${view.request_id} ${again}: ${room}. It starts with ${chunk(view, config, record)}.`;
}

/** The places where tokens of an admitted request were found computed, and what a fork copies of them. */
function finders(view, { block_size }, { events }) {
  const event = events.find(({ type, id }) => type === "SCHEDULED" && id === view.request_id);
  const { num_forked_tokens: forked = 0, num_external_computed_tokens: external = 0, num_cached_tokens: found } = event;
  if (external) return [external < found ? "the prefix cache and the blocks from another engine have" : "the blocks from another engine have", ""];
  if (!forked) return ["the prefix cache has", ""];
  const copied = found % block_size;
  return [
    forked < found ? "the prefix cache and another answer to its prompt have" : "another answer to its prompt has",
    copied ? ` (the last ${copied} of the ${found} are copied into its first new block)` : "",
  ];
}

/** "tokens 9 to 16 of its prompt, and 4 are left (a step takes at most 8 of one request)". */
function chunk(view, config, record) {
  const first = view.num_computed_tokens + 1;
  const last = view.num_computed_tokens + view.num_scheduled;
  const span = first === last ? `token ${first}` : `tokens ${first} to ${last}`;
  const whole = view.num_output_tokens ? "its prompt and output" : "its prompt";
  const left = numTokens(view) - last;
  if (left === 0) {
    const sampled = view.request_id in record.new_tokens;
    return `${span} of ${whole}, the last chunk${sampled ? `, and output token ${view.num_output_tokens + 1} is sampled` : ""}`;
  }
  if (left < 0) return `${span} of ${whole}, ${-left} more than ${view.num_output_tokens ? "they have" : "it has"}`;
  const limit = config.long_prefill_token_threshold;
  const why = limit && view.num_scheduled === limit
    ? `the threshold allows ${limit} a step`
    : `the budget of ${config.max_num_batched_tokens} has no more`;
  return `${span} of ${whole}; ${left} ${left === 1 ? "is" : "are"} left, since ${why}`;
}

/** The running requests of which the step computes nothing. */
function sayIdle(views, { num_batched_tokens: spent }, { max_num_batched_tokens: budget }, say) {
  if (!views.length) return;
  const ids = views.map((view) => view.request_id), left = budget - spent;
  const why = left > 0 ? `although ${left} of the budget of ${count(budget, "token")} are left` : `the budget of ${count(budget, "token")} is spent`;
  say("idle", ids, `${list(ids)} ${ids.length > 1 ? "run" : "runs"} without a token in this step${left > 0 ? ", " : ": "}${why}.`);
}

/** The counts of the record that contradict its events: a request was lost, or is in two places. */
function sayCounts(record, views, say) {
  const running = views.filter((view) => view.running).length;
  const waiting = views.filter((view) => !view.running && !view.finish_reason && view.state !== "finished").length;
  const check = (counted, found, where) => counted !== found &&
    say("count", [], `The scheduler has ${count(counted, "request")} ${where}; by the events so far it should be ${found}.`);
  check(record.num_running, running, "running");
  check(record.num_waiting, waiting, "waiting");
}

function sayBlocked(record, config, say) {
  const { reason, id, needs, free } = record.blocked;
  if (reason === "empty") return;
  const reserve = config.watermark && record.num_running ? ` (${config.watermark} of them in reserve)` : "";
  const why = {
    preempted: "waits: memory was short in this step, so no request is admitted",
    slots: `waits: all ${config.max_num_seqs} slots are taken`,
    budget: `waits: the budget of ${count(config.max_num_batched_tokens, "token")} is spent`,
    memory: `waits: needs ${count(needs, "block")}${reserve}, ${are(free)} free`,
    none: "waits although slots, budget and blocks suffice: this scheduler does not admit it, by design or by mistake",
  }[reason] ?? `waits: ${reason}`;
  const behind = record.num_waiting - 1;
  const others = behind > 0 ? ` ${behind === 1 ? "One more waits" : `${behind} more wait`} behind it.` : "";
  say("wait", [id], `${id} ${why}.${others}`);
}

function finish(view, reason, record) {
  const id = view.request_id;
  const outputs = count(view.num_output_tokens + (record.new_tokens[id]?.length ?? 0), "output token");
  const why = { length: `it has its ${outputs}`, stop: `it stopped after ${outputs}`, error: "it failed" }[reason] ?? reason;
  return `${id} finishes: ${why}. Its ${count(view.blocks.length, "block")} can be used from the next step on.`;
}

/** The state of a request in a sentence: for the panel, and as an alternative to the diagram. */
function lifeOf(view, id) {
  if (!view) return `${id} has not arrived yet.`;
  if (view.state === "finished") return `${id} is finished (${view.finish_reason}).`;
  if (view.state === "preempted") return `${id} is preempted in this step and waits again.`;
  if (view.state === "waiting") return `${id} is waiting${view.num_preemptions ? " to be admitted again" : ""}.`;
  if (drawnState(view) === "idle") return `${id} is running, and this step computes nothing of it.`;
  const doing = view.state === "decode" ? "decoding" : "in prefill";
  return `${id} is ${doing}${view.finish_reason ? ` and finishes in this step (${view.finish_reason})` : ""}.`;
}

/** A request's state in a word or two, for a table. */
function inWord(state) {
  return { undefined: "not there", decode: "decoding" }[state] ?? state;
}

function capital(text) {
  return text[0].toUpperCase() + text.slice(1);
}

function count(number, thing) {
  return `${number} ${thing}${number === 1 ? "" : "s"}`;
}

function are(number) {
  return number === 0 ? "none is" : number === 1 ? "1 is" : `${number} are`;
}

function list(names) {
  const shown = names.length > MANY + 2 ? [...names.slice(0, MANY), `${names.length - MANY} more`] : names;
  return shown.length < 2 ? String(shown[0]) : `${shown.slice(0, -1).join(", ")} and ${shown[shown.length - 1]}`;
}
