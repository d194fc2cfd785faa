// The pages of the grader: the table of a class, the feedback of a student, and the player for a run that departs.
// It follows the player's component. Feedback and runs were packed by pages.py, whose templates escape all values.

const byId = (id) => document.getElementById(id);
const players = new Set();

/** Unpack a text of this page. */
async function unpack(id) {
  const bytes = Uint8Array.from(atob(byId(id).textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
}

/** Show a run in the player below its button, or remove the player. */
async function toggleRun(button) {
  const box = button.closest(".run");
  if (box.player) {
    players.delete(box.player);
    box.player.destroy();
    box.player = null;
  } else {
    button.disabled = true;
    try {
      const traces = (await Promise.all([box.dataset.yours, box.dataset.expected].map(unpack))).map((text) => JSON.parse(text));
      box.player = new Player(box, { embedded: true });
      players.add(box.player);
      box.player.load({ traces, step: Number(box.dataset.step) });
    } catch (error) {
      box.append(el("p", { class: "warning" }, `This run cannot be played: ${error.message}`));
    }
    button.disabled = false;
  }
  button.setAttribute("aria-expanded", String(Boolean(box.player)));
  button.textContent = box.player ? "Close the player" : "Play this run beside the expected one";
  button.focus();
}

document.addEventListener("click", (event) => {
  const button = event.target.closest?.(".run > .play");
  if (button) toggleRun(button);
});

if (document.body.classList.contains("class")) {
  const body = document.querySelector("tbody");
  const rows = [...body.rows].map((row) => {
    const link = row.querySelector("a"), { stem } = link.dataset;
    const keys = new Set(row.dataset.keys.split("\n"));
    return { row, stem, keys, name: link.textContent, text: row.cells[0].textContent.toLowerCase(), values: [...row.querySelectorAll("[data-v]")].map((cell) => Number(cell.dataset.v)) };
  });
  const collator = new Intl.Collator("en", { numeric: true });
  const order = { by: "name", down: false }, filter = { key: "", says: "" };
  let shown = rows;

  /** Sort the rows, and hide those that the filter and the search leave out. */
  const show = () => {
    const wanted = byId("find").value.trim().toLowerCase(), sign = order.down ? -1 : 1;
    const value = order.by === "name" ? null : ({ values }) => values[Number(order.by)];
    const sorted = rows.toSorted?.bind(rows) ?? ((compare) => [...rows].sort(compare));
    const all = sorted((a, b) => sign * (value ? value(a) - value(b) : collator.compare(a.name, b.name)) || collator.compare(a.name, b.name));
    shown = all.filter(({ text, keys }) => (!filter.key || keys.has(filter.key)) && text.includes(wanted));
    const seen = new Set(shown);
    for (const one of rows) one.row.hidden = !seen.has(one);
    body.replaceChildren(...all.map(({ row }) => row));
    const many = `${rows.length} student${rows.length === 1 ? "" : "s"}`;
    byId("count").textContent = shown.length === rows.length ? many : `${shown.length} of ${many}`;
    byId("none").hidden = shown.length > 0;
    byId("chip").hidden = !filter.key;
    byId("chip").textContent = `${filter.says} ×`;
    byId("chip").setAttribute("aria-label", `Show all again, not only: ${filter.says}`);
    for (const button of document.querySelectorAll("[data-key]")) {
      button.setAttribute("aria-pressed", String(button.dataset.key === filter.key));
    }
  };

  for (const button of document.querySelectorAll("thead button")) {
    button.addEventListener("click", () => {
      const { by } = button.dataset;
      order.down = order.by === by ? !order.down : by !== "name";
      order.by = by;
      for (const head of document.querySelectorAll("thead [aria-sort]")) head.removeAttribute("aria-sort");
      button.closest("th").setAttribute("aria-sort", order.down ? "descending" : "ascending");
      show();
    });
  }
  for (const button of document.querySelectorAll("[data-key]")) {
    button.addEventListener("click", () => {
      const { key, says } = button.dataset, again = key === filter.key;
      Object.assign(filter, again ? { key: "", says: "" } : { key, says });
      show();
      if (!again) byId("students").scrollIntoView({ block: "start" });
    });
  }
  byId("chip").addEventListener("click", () => {
    Object.assign(filter, { key: "", says: "" });
    show();
    byId("find").focus();
  });
  byId("find").addEventListener("input", show);

  const dialog = byId("one");
  const clear = () => {
    for (const player of players) player.destroy();
    players.clear();
    byId("feedback").replaceChildren();
  };
  const stemOf = (hash) => {
    try {
      return decodeURIComponent(hash.match(/^#s=(.*)$/)?.[1] ?? "");
    } catch {
      return "";
    }
  };

  /** Open the student in the address, or close the dialog if there is none. */
  const open = async () => {
    const one = rows.find(({ stem }) => stem === stemOf(location.hash));
    clear();
    if (!one) return dialog.close();
    if (!dialog.open) dialog.showModal();
    const place = shown.indexOf(one);
    byId("place").textContent = place < 0 ? "" : `${place + 1} of ${shown.length}`;
    for (const [id, by] of [["previous", -1], ["next", 1]]) {
      const other = place < 0 ? undefined : shown[place + by];
      byId(id).disabled = !other;
      byId(id).dataset.stem = other?.stem ?? "";
    }
    byId("own").href = `feedback/${encodeURIComponent(one.stem)}.html`;
    let markup;
    try {
      markup = await unpack(`s-${one.stem}`);
    } catch (error) {
      byId("feedback").append(el("p", { class: "warning" }, `This browser cannot unpack it: ${error.message}. Open the student's page.`));
      return;
    }
    if (stemOf(location.hash) !== one.stem) return; // another was opened meanwhile
    byId("feedback").innerHTML = markup; // escaped by its template, and the page's policy runs no script of it
    byId("feedback").focus({ preventScroll: true });
    dialog.scrollTop = 0;
    for (const other of rows) other.row.classList.toggle("open", other === one);
  };
  for (const id of ["previous", "next"]) {
    byId(id).addEventListener("click", () => location.replace(`#s=${encodeURIComponent(byId(id).dataset.stem)}`));
  }
  byId("close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => {
    clear();
    if (stemOf(location.hash)) history.replaceState(null, "", location.pathname + location.search);
  });
  addEventListener("hashchange", open);
  show();
  if (stemOf(location.hash)) open();
}
