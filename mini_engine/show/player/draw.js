// The two pictures that can have thousands of parts, on canvases: the whole run and the block pool.
// Each has a text alternative, set where it is drawn (view.js).

// Light tints for dark letters in both themes; they repeat, and the name identifies the owner.
const OWNERS = ["#F7C873", "#8CC6EC", "#8CCFBB", "#E3B0CB", "#F0E442", "#EE9A66", "#BFC7D5"];

/** A canvas of the given size in CSS pixels, cleared, sharp on every screen. */
function prepare(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  ctx.textBaseline = "middle";
  return ctx;
}

/** The theme's colours at `box`. In forced colours, text and lines have the system's. */
function palette(box) {
  const probe = box.appendChild(el("i", { class: "probe" }));
  const read = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const names = ["ink", "muted", "line", "card", "waiting", "prefill", "decode", "preempted", "used", "difference", "over"];
  const colours = Object.fromEntries(names.map((name) => [name, read(name)]));
  probe.remove();
  return colours;
}

function hatch(ctx, x, y, width, height, colour, gap = 5) {
  ctx.strokeStyle = colour;
  ctx.lineWidth = 1.2;
  ctx.beginPath();
  for (let at = gap; at < width + height; at += gap) {
    ctx.moveTo(x + Math.min(at, width), y + at - Math.min(at, width));
    ctx.lineTo(x + at - Math.min(at, height), y + Math.min(at, height));
  }
  ctx.stroke();
}

/**
 * A row a request, a column a step, and below them tokens and blocks: of the steps `from` to `to`, as far as they
 * were `seen`. Where that is not the whole run, only the requests that do something in it have a row. Returns where
 * everything is: { left, column, from, top, rowHeight, ids }.
 */
function drawOverview(canvas, fold, { from, to, whole, seen, marks, followed, side, sides }, colours) {
  const tall = canvas.clientWidth > 900;
  const last = Math.min(to, seen, side.placeOf(fold.steps.length));
  const busy = (one, id) => {
    const end = Math.min(to, seen, one.placeOf(one.run.steps.length));
    return acts(one.run.lives.get(id) ?? [], one.indexAt(from), one.indexAt(end - 1) + 1);
  };
  // Two runs have the same rows, so that like stands beside like where one lacks a request.
  const rows = [...new Set(sides.flatMap((one) => [...one.run.lives.keys()]))]
    .filter((id) => whole || id === followed || sides.some((one) => busy(one, id))).map((id) => [id, fold.lives.get(id) ?? []]);
  const rowHeight = Math.max(0.4, Math.min(tall ? 22 : 17, (side.closed ? 70 : whole ? (tall ? 260 : 180) : 330) / rows.length));
  const labelled = rowHeight >= 11;
  const chart = 26, gap = 10, top = marks.length ? 10 : 2;
  const middle = top + rows.length * rowHeight;
  const width = canvas.clientWidth, left = 46;
  const column = (width - left - 1) / (to - from);
  const ctx = prepare(canvas, width, middle + 2 * (chart + gap));
  const x = (step) => left + (step - from) * column;

  rows.forEach(([id, life], row) => {
    const y = top + row * rowHeight;
    ctx.font = `${id === followed ? "bold " : ""}11px system-ui, sans-serif`;
    if (labelled) label(ctx, id, left, y + rowHeight / 2, id === followed ? colours.ink : colours.muted);
    life.forEach(({ step, state }, i) => {
      const start = Math.max(from, side.placeOf(step)), end = Math.min(last, side.placeOf(life[i + 1]?.step ?? fold.steps.length));
      if (start < end) drawState(ctx, state, x(start), y, Math.max((end - start) * column, 0.7), rowHeight, colours);
    });
  });
  ctx.font = "11px system-ui, sans-serif";
  if (!labelled) label(ctx, `${rows.length} req.`, left, top + 6, colours.muted);

  const budget = fold.config.max_num_batched_tokens;
  // A run that exceeds its budget makes the scale; what is above the budget is red.
  const most = fold.steps.reduce((max, record) => Math.max(max, record.num_batched_tokens), budget);
  const tokens = middle + gap, blocks = tokens + chart + gap;
  label(ctx, "tokens", left, tokens + chart / 2, colours.muted);
  label(ctx, "blocks", left, blocks + chart / 2, colours.muted);
  for (let index = Math.max(0, side.indexAt(from)); index < fold.steps.length && side.placeOf(index) < last; index++) {
    const record = fold.steps[index], start = Math.max(from, side.placeOf(index));
    const wide = (Math.min(last, side.placeOf(index + 1)) - start) * column;
    const bar = (base, low, high, colour) => {
      ctx.fillStyle = colour;
      ctx.fillRect(x(start), base + chart * (1 - high), Math.max(wide - (column > 6 ? 1 : 0), 0.7), chart * (high - low));
    };
    const decodes = fold.numDecodes[index] / most;
    bar(tokens, 0, decodes, colours.decode);
    bar(tokens, decodes, record.num_batched_tokens / most, colours.prefill);
    if (record.num_batched_tokens > budget) bar(tokens, budget / most, record.num_batched_tokens / most, colours.over);
    bar(blocks, 0, 1 - record.num_free_blocks / fold.config.num_blocks, colours.used);
  }
  ctx.fillStyle = colours.line;
  for (const y of [tokens - 1, tokens + chart, blocks - 1, blocks + chart]) ctx.fillRect(left, y, width - left, 1);
  drawMarks(ctx, marks.filter((step) => step >= from && step < Math.min(to, seen)), (step) => x(step + 0.5), colours);
  return { left, column, from, top, rowHeight, ids: rows.map(([id]) => id) };
}

/** Whether a request computes, or is preempted, between two steps. */
function acts(life, from, to) {
  return life.some(({ step, state }, i) =>
    !["waiting", "idle", "finished"].includes(state) && step < to && (life[i + 1]?.step ?? Infinity) > from);
}

/** The marks where differences begin. */
function drawMarks(ctx, steps, x, colours) {
  ctx.fillStyle = colours.difference;
  for (const step of steps) {
    ctx.beginPath();
    ctx.moveTo(x(step) - 4, 0);
    ctx.lineTo(x(step) + 4, 0);
    ctx.lineTo(x(step), 7);
    ctx.fill();
  }
}

function label(ctx, text, right, y, colour) {
  ctx.fillStyle = colour;
  ctx.textAlign = "right";
  ctx.fillText(text, right - 6, y, right - 8);
}

function drawState(ctx, state, x, y, width, height, colours) {
  if (state === "finished") return;
  const share = state === "waiting" ? 0.14 : 0.72; // waiting is a thin line, distinct from work without colour
  const top = y + (height * (1 - share)) / 2;
  if (state === "idle") { // an empty frame: the place is taken, and nothing is computed
    ctx.strokeStyle = colours.waiting;
    ctx.lineWidth = 1;
    ctx.strokeRect(x + 0.5, top + 0.5, Math.max(width - 1, 0.5), Math.max(height * share - 1, 0.5));
    return;
  }
  ctx.fillStyle = colours[state];
  ctx.fillRect(x, top, width, state === "waiting" ? height * share : Math.max(height * share, 1));
  if (state === "preempted" && height > 6) hatch(ctx, x, top, width, height * share, "#3a1500", 4);
}

/** The block pool as a grid. Returns where the cells are, { columns, side, owners }, for clicks. */
function drawPool(canvas, width, fold, record, views, tint, followed, colours) {
  const total = fold.config.num_blocks;
  const { columns, side } = poolGrid(width, total);
  const ctx = prepare(canvas, width, Math.ceil(total / columns) * side + 1);
  const owners = Array.from({ length: total }, () => []);
  for (const view of views.values()) for (const block of view.blocks) owners[block]?.push(view.request_id);
  const taken = new Set(Object.values(record.blocks).flat());
  const inset = side > 14 ? 2 : 0.5, size = side - 2 * inset;
  ctx.textAlign = "center";
  for (let block = 0; block < total; block++) {
    const x = (block % columns) * side + inset, y = Math.floor(block / columns) * side + inset;
    const ids = owners[block];
    if (ids.length) drawOwned(ctx, x, y, size, ids, tint, taken.has(block));
    else if (fold.cached[block]) hatch(ctx, x, y, size, size, colours.muted, size > 14 ? 5 : size / 1.9);
    if (ids.length && side >= 40) {
      ctx.font = "9px ui-monospace, monospace";
      ctx.fillStyle = "rgba(0,0,0,.6)";
      ctx.fillText(block, x + 9, y + 8);
    }
    ctx.strokeStyle = ids.includes(followed) ? colours.ink : ids.length ? "rgba(0,0,0,.25)" : colours.line;
    ctx.lineWidth = ids.includes(followed) && size > 10 ? 3 : 1;
    ctx.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
    if (!ids.length && size >= 26) {
      ctx.fillStyle = colours.card;
      ctx.font = "10px ui-monospace, monospace";
      if (fold.cached[block]) ctx.fillRect(x + size / 2 - 8, y + size / 2 - 6, 16, 12);
      ctx.fillStyle = colours.muted;
      ctx.fillText(block, x + size / 2, y + size / 2);
    }
  }
  return { columns, side, owners };
}

function drawOwned(ctx, x, y, size, ids, tint, isNew) {
  ctx.fillStyle = tint(ids[0]);
  ctx.fillRect(x, y, size, size);
  if (ids.length > 1) {
    // Shared: the second owner's colour takes the lower half.
    ctx.fillStyle = tint(ids[1]);
    ctx.fillRect(x, y + size / 2, size, size / 2);
  }
  if (size < 18) return;
  ctx.fillStyle = "#1a1a1a";
  ctx.font = `600 ${size >= 30 ? 12 : 10}px ui-monospace, monospace`;
  if (ids.length === 1) ctx.fillText(ids[0], x + size / 2, y + size / 2 + 0.5, size - 4);
  else {
    ctx.fillText(ids[0], x + size / 2, y + size * 0.27, size - 4);
    ctx.fillText(ids.length > 2 ? `+${ids.length - 1}` : ids[1], x + size / 2, y + size * 0.76, size - 4);
  }
  if (isNew) {
    ctx.beginPath();
    ctx.moveTo(x + size, y);
    ctx.lineTo(x + size - 9, y);
    ctx.lineTo(x + size, y + 9);
    ctx.fill();
  }
}

/** Cells as large as fit about 180 pixels in height, between 5 and 60 pixels; even rows if possible. */
function poolGrid(width, total) {
  const side = Math.max(5, Math.min(60, Math.sqrt((width * 180) / total)));
  let columns = Math.max(1, Math.min(total, Math.floor(width / side)));
  for (let fewer = columns; fewer > columns * 0.5; fewer--) {
    if (total % fewer === 0) {
      columns = fewer;
      break;
    }
  }
  return { columns, side: Math.min(60, width / columns) };
}

/** An operation log: how many blocks each request holds after each operation, one upon the other. */
function drawHeld(canvas, run, { from, to, seen, offset, marks, followed }, tint, colours) {
  const total = run.config.num_blocks, height = 96, top = 10, left = 46;
  const ctx = prepare(canvas, canvas.clientWidth, top + height + 4);
  const column = (canvas.clientWidth - left - 1) / (to - from);
  const most = Math.max(total, ...run.steps.map(({ observed }) => Object.values(observed.lengths).reduce((a, b) => a + b, 0)));
  const y = (blocks) => top + height * (1 - blocks / most);
  ctx.font = "11px system-ui, sans-serif";
  label(ctx, "all", left, y(total), colours.muted);
  label(ctx, "0", left, y(0) - 4, colours.muted);
  ctx.fillStyle = colours.line;
  for (const blocks of [0, total]) ctx.fillRect(left, y(blocks), canvas.clientWidth - left, 1);
  for (let step = Math.max(from, offset); step < Math.min(to, seen, offset + run.steps.length); step++) {
    const { lengths } = run.observed(step - offset);
    let held = 0;
    for (const id of run.lives.keys()) {
      const blocks = lengths[id] ?? 0, x = left + (step - from) * column, width = Math.max(column - (column > 6 ? 1 : 0), 0.7);
      ctx.fillStyle = tint(id);
      ctx.fillRect(x, y(held + blocks), width, y(held) - y(held + blocks));
      ctx.strokeStyle = id === followed ? colours.ink : "rgba(0,0,0,.25)";
      if (blocks && column > 6) ctx.strokeRect(x + 0.5, y(held + blocks) + 0.5, width - 1, y(held) - y(held + blocks) - 1);
      held += blocks;
    }
  }
  drawMarks(ctx, marks.filter((step) => step < seen), (step) => left + (step - from + 0.5) * column, colours);
  return { left, column };
}

/** The pool of an operation log, in which blocks have owners and no names: as many cells as are held, and the rest. */
function drawHeldPool(canvas, width, run, observed, tint, followed, colours) {
  const total = run.config.num_blocks, { columns, side } = poolGrid(width, total);
  const ctx = prepare(canvas, width, Math.ceil(total / columns) * side + 1);
  const owners = Object.entries(observed.lengths).flatMap(([id, length]) => Array(length).fill(id));
  const held = total - observed.num_free_blocks;
  const known = owners.length === held; // else some are shared, and the log does not say which
  const inset = side > 14 ? 2 : 0.5, size = side - 2 * inset;
  ctx.textAlign = "center";
  for (let block = 0; block < total; block++) {
    const x = (block % columns) * side + inset, y = Math.floor(block / columns) * side + inset;
    const ids = known && block < held ? [owners[block]] : [];
    ctx.fillStyle = colours.used;
    if (ids.length) drawOwned(ctx, x, y, size, ids, tint, false);
    else if (block < held) ctx.fillRect(x, y, size, size);
    ctx.strokeStyle = ids.includes(followed) ? colours.ink : block < held ? "rgba(0,0,0,.25)" : colours.line;
    ctx.lineWidth = ids.includes(followed) && size > 10 ? 3 : 1;
    ctx.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
  }
}
