// An operation log's pane (labs 05 and 06): the calls, their results, and their effects.

/** The log as a run, with the same names as a Fold, so that the player counts, follows and compares it alike. */
class OpRun {
  constructor(trace) {
    const steps = trace.steps.map((step) => ({ ...step, observed: { lengths: {}, ...step.observed } }));
    Object.assign(this, { trace, steps, config: trace.header.config, lives: new Map(), first: steps[0]?.step ?? 0 });
    steps.forEach(({ op, observed }, index) => {
      const held = Object.keys(observed.lengths).filter((id) => observed.lengths[id]);
      for (const id of new Set([...(op.length > 1 ? [String(op[1])] : []), ...held])) {
        if (!this.lives.has(id)) this.lives.set(id, [{ step: index, state: "there" }]);
      }
    });
  }

  /** The observed state after operation `index`; before the first, an empty pool. */
  observed(index) {
    return this.steps[index]?.observed ?? { num_free_blocks: this.config.num_blocks, lengths: {} };
  }
}

/** The names of the differing parts of an operation: the call, its result, the observed state. */
function opDifferences(ours, theirs) {
  if (!ours || !theirs) return ours === theirs ? [] : ["call"];
  const flat = (step) => ({ call: step.op, returned: step.returned, ...step.observed });
  const [a, b] = [flat(ours), flat(theirs)];
  return [...new Set([...Object.keys(a), ...Object.keys(b)])].filter((key) => sorted(a[key]) !== sorted(b[key]));
}

/** Operations that differ from equal state, and the first that only one of the logs has. */
function opDivergences([ours, theirs]) {
  const found = [], both = Math.min(ours.steps.length, theirs.steps.length);
  let equal = true;
  for (let step = 0; step < both; step++) {
    if (equal && opDifferences(ours.steps[step], theirs.steps[step]).length) found.push({ step, decision: true, over: false, lives: [] });
    equal = sorted(ours.observed(step)) === sorted(theirs.observed(step));
  }
  if (ours.steps.length !== theirs.steps.length) found.push({ step: both, decision: false, over: true, lives: [] });
  return found;
}

/** As text that does not depend on the order of an object's keys. */
function sorted(value) {
  if (Array.isArray(value)) return `[${value.map(sorted)}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value) ?? "";
  return `{${Object.keys(value).sort().map((key) => `${key}:${sorted(value[key])}`)}}`;
}

/** A value as Python writes it. */
function inPython(value) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(inPython).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([key, one]) => `${inPython(key)}: ${inPython(one)}`).join(", ")}}`;
  return typeof value === "string" ? `'${value}'` : String(value);
}

/** An operation as a call; a long list of tokens is shortened unless `whole`. */
function callOf([name, ...values], whole = false) {
  const short = (value) => (Array.isArray(value) && value.length > 6 && !whole ? `[${value.slice(0, 3).join(", ")}, ... ${value.length} in all]` : inPython(value));
  return `${name}(${values.map(short).join(", ")})`;
}

/** The effects of an operation, in sentences: [{ kind, ids, text }]. */
function opSentences(run, index) {
  const { op: [name, who, ...rest], returned } = run.steps[index];
  const before = run.observed(index - 1), after = run.observed(index), id = String(who ?? "");
  const ids = run.lives.has(id) ? [id] : [];
  const lines = [{ kind: "call", ids, text: `${callOf(run.steps[index].op, true)} returned ${inPython(returned)}.` }];
  const what = { admit: `${id} asks to be admitted`, admit_again: `${id} asks to be admitted again`, admit_all: `${id} asks to be admitted`, decode: `${id} asks for room for one more token`, compute: `${id} asks for room for its next chunk`, allocate: `${id} asks for room` }[name];
  if (what && returned === false) lines.push({ kind: "wait", ids, text: `${what}, and is refused: nothing may change.` });
  else if (what && (returned === true || Number.isInteger(returned))) lines.push({ kind: "admit", ids, text: `${what}, and there is room.` });
  const found = name.startsWith("admit") && returned === true && after.num_computed_tokens?.[id];
  if (found) lines.push({ kind: "admit", ids, text: `The prefix cache had ${count(found, "token")} of it.` });
  for (const one of new Set([...Object.keys(before.lengths), ...Object.keys(after.lengths)])) {
    const [was, is] = [before.lengths[one] ?? 0, after.lengths[one] ?? 0];
    if (was === is) continue;
    const kind = is > was ? "grow" : "finish", of = `${one} holds ${count(is, "block")}`;
    lines.push({ kind, ids: [one], text: `${of}, ${is > was ? `${is - was} more` : `${was - is} fewer`} than before.` });
  }
  const free = after.num_free_blocks - before.num_free_blocks;
  if (Number.isInteger(after.num_free_blocks) && run.config.num_blocks !== undefined) lines.push({ kind: "count", ids: [], text: `${after.num_free_blocks} of ${count(run.config.num_blocks, "block")} ${after.num_free_blocks === 1 ? "is" : "are"} free${free ? `, ${Math.abs(free)} ${free > 0 ? "more" : "fewer"} than before` : ""}.` });
  return lines;
}

/** The end of a log, in sentences. */
function opEnding(run) {
  const { end } = run.trace;
  if (!end) return [];
  const text = end.end === "error" ? `Operation ${end.step} raised an error, and the log ends: ${end.error}` : "The log ends here.";
  return [{ kind: "end", ids: [], text }];
}

class OpsPane extends Side {
  constructor(trace, number, player) {
    super("ops-pane", new OpRun(trace), number, player);
    const { num_blocks, block_size, watermark, prefix_caching } = trace.header.config;
    // The log of a random script has what its lab observes of blocks, which may be nothing.
    this.held = trace.steps.some(({ observed }) => observed.lengths !== undefined);
    this.pooled = num_blocks !== undefined && trace.steps.some(({ observed }) => observed.num_free_blocks !== undefined);
    this.root.classList.toggle("unheld", !this.held);
    this.root.classList.toggle("unpooled", !this.pooled);
    this.find(".config").textContent = [num_blocks === undefined ? "" : `${num_blocks} blocks${block_size === undefined ? "" : ` of ${block_size}`}`, watermark ? `watermark ${watermark}` : "",
      num_blocks !== undefined && prefix_caching === false ? "prefix cache off" : ""].filter(Boolean).join(" · ");
    this.calls = new Rows(this.find(".calls-card .rows"), "Operations", (step) => this.callRow(step));
    this.tables = new Rows(this.find(".tables-card .rows"), "Block tables", (view) => this.tableRow(view));
    this.lists = [this.calls, this.tables];
    this.calls.box.style.setProperty("--rows", Math.max(3, Math.min(8, trace.steps.length)));
    this.tables.box.style.setProperty("--rows", Math.max(3, Math.min(8, this.run.lives.size)));
    this.root.classList.toggle("caching", trace.steps.some(({ observed }) => observed.shared !== undefined));
    this.calls.show(this.run.steps.map((step, index) => ({ ...step, index })));
    this.find(".calls-card .count").textContent = String(trace.steps.length);
    this.root.addEventListener("click", (event) => {
      const row = event.target.closest(".row[data-step]");
      if (row) player.go(Number(row.dataset.step) + this.offset);
    });
  }

  noun = "operation";
  divergences = opDivergences;
  differences = opDifferences;
  partedOn = (ours, theirs) => [ours, theirs].map((record) => String(record?.op[1])).find((id) => this.run.lives.has(id));
  fieldName = (field) => field.replaceAll("_", " ").replace("num ", "");
  fieldTexts(ours, theirs, field) {
    const [a, b] = [ours, theirs].map(({ op, returned, observed }) => (field === "call" ? op : field === "returned" ? returned : observed[field]));
    if (field === "call") return [a, b].map((op) => callOf(op, true));
    const both = [a, b].every((value) => value && typeof value === "object" && !Array.isArray(value));
    if (!both) return [a, b].map(inPython);
    const keys = [...new Set([...Object.keys(a), ...Object.keys(b)])].filter((key) => sorted(a[key]) !== sorted(b[key]));
    return [a, b].map((value) => inPython(Object.fromEntries(keys.filter((key) => key in value).map((key) => [key, value[key]]))));
  }

  /** {operation: its steps}, and the steps of refusals. */
  kinds() {
    const kinds = new Map();
    const add = (kind, step) => kinds.set(kind, kinds.get(kind) ?? []).get(kind).push(step);
    this.run.steps.forEach(({ op, returned }, step) => {
      add(String(op[0]), step);
      if (returned === false || (Array.isArray(returned) && returned[0] === false)) add("refusal", step);
    });
    return kinds;
  }

  drawRun({ from, to, seen, offset, marks, followed }) {
    if (!this.held) return;
    const canvas = this.find(".overview canvas");
    const { left, column } = drawHeld(canvas, this.run, { from, to, seen, offset, marks, followed }, this.player.tint, this.colours);
    this.scale = { left, column, from, top: 0, rowHeight: 1, ids: [] };
    canvas.setAttribute("aria-label", `Blocks held after each of ${count(this.run.steps.length, "operation")}.`);
  }

  render(step, followed) {
    const { run } = this, record = run.steps[step];
    const heading = this.find(".op-card h3");
    heading.replaceChildren(record ? `Operation ${record.step}` : `Over after ${count(run.steps.length, "operation")}`);
    const lines = record ? opSentences(run, step) : opEnding(run);
    if (record && step === run.steps.length - 1) lines.push(...opEnding(run));
    this.showLog(`Operation ${this.player.first + this.player.step}`, lines, followed);
    const index = Math.min(step, run.steps.length - 1), before = run.observed(index - 1), after = run.observed(index);
    this.showObserved(before, after);
    const ids = [...run.lives].filter(([, life]) => life[0].step <= index).map(([id]) => id);
    this.tables.show(ids.map((id) => ({ request_id: id, was: before.lengths[id] ?? 0, is: after.lengths[id] ?? 0 })));
    this.find(".tables-card .count").textContent = `${count(ids.filter((id) => after.lengths[id]).length, "request")} with blocks`;
    this.calls.render();
    this.calls.revealRow(index);
    if (this.pooled) this.drawPool(after, followed);
    if (this.held) this.placeHead();
  }

  drawPool(after, followed) {
    const { run } = this;
    const { num_blocks: total, block_size: size } = run.config;
    const shared = after.shared ? `, ${after.shared} counted more than once` : "";
    this.find(".pool-card .count").textContent = `${total - after.num_free_blocks} of ${total} held${size === undefined ? "" : `, ${count(size, "token")} each`}${shared}`;
    const canvas = this.find(".pool-card canvas");
    drawHeldPool(canvas, this.poolWidth, run, after, this.player.tint, followed, this.colours);
    canvas.setAttribute("aria-label", `${after.num_free_blocks} of ${total} blocks are free.`);
  }

  /** The public state before and after, without the tables, which have their own card. */
  showObserved(before, after) {
    const keys = Object.keys(after).filter((key) => key !== "lengths");
    const row = (key) => {
      const values = [before[key], after[key]].map((value) => (value === undefined ? "-" : inPython(value)));
      return el("tr", { class: values[0] === values[1] ? "" : "changed" }, el("th", { scope: "row" }, this.fieldName(key)), ...values.map((value) => el("td", {}, value)));
    };
    const head = ["observed", "before", "after"].map((name) => el("th", { scope: "col" }, name));
    this.find(".observed").replaceChildren(el("tr", {}, ...head), ...keys.map(row));
  }

  callRow({ index, op, returned }) {
    const here = index === this.player.step - this.offset;
    const text = `${callOf(op, true)} returned ${inPython(returned)}`;
    return rowButton({ class: "row call", "data-step": index, ...(here ? { "aria-current": "step" } : {}), title: text }, `operation ${index}: ${text}`,
      el("span", { class: "number" }, String(index)), el("span", { class: "code" }, callOf(op)), el("span", { class: "code returned" }, inPython(returned)));
  }

  tableRow({ request_id: id, was, is }) {
    const change = is === was ? "" : is > was ? `+${is - was}` : `−${was - is}`;
    const cells = Array.from({ length: Math.min(is, 40) }, (_, i) =>
      el("i", { class: i >= was ? "block new" : "block", style: `background:${this.player.tint(id)}` }));
    const text = `${count(is, "block")}${change ? `, ${change}` : ""}`;
    return rowButton({ class: "row table", "data-id": id, "aria-pressed": id === this.player.followed }, `${id}: ${text}`,
      el("span", { class: "id", style: `background:${this.player.tint(id)}` }, id), el("span", { class: "blocks" }, ...cells),
      el("span", { class: "amount" }, String(is)), el("span", { class: "plus" }, change));
  }
}
