// What is kept in this browser of all labs: the files that were written, and which tasks are done. Every page of the
// labs has a link to each lab, with its id, its title and its number of tasks.

const labs = [...document.querySelectorAll("[data-lab-id]")].map(({ href, dataset: { labId: id, title, tasks } }) => ({ id, href, title, tasks: Number(tasks) }));
const COMMANDS = `unzip -o my-labs.zip                             # Windows: tar -xf my-labs.zip
pip install -e '.[learn]' -c constraints.txt
python -m labs status`;

export function kept(id, name, otherwise = null) {
  try { return localStorage.getItem(`mini-engine/${id}/${name}`) ?? otherwise; } catch { return otherwise; }
}

/** Keep a text; false if the browser stores nothing. */
export function keep(id, name, text) {
  try { localStorage.setItem(`mini-engine/${id}/${name}`, text); return true; } catch { return false; }
}

export function el(tag, text = "", attributes = {}, space = "http://www.w3.org/1999/xhtml") {
  const element = Object.assign(document.createElementNS(space, tag), { textContent: text });
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** The tasks of a lab that were done once, whatever became of the file since. */
const done = ({ id, tasks }) => Math.min(tasks, Number(kept(id, "done", 0)));
const begun = ({ id }) => kept(id, "starter.py") !== null;

/** The first lab behind this one that is not done, else the first of all that is not; undefined when all are done. */
export function next(id) {
  const after = labs.findIndex((lab) => lab.id === id) + 1;
  return [...labs.slice(after), ...labs.slice(0, after)].find((lab) => lab.id !== id && done(lab) < lab.tasks);
}

/** Write the state of each lab into the links to it; return how many are done. */
export function tellBoard() {
  for (const lab of labs) {
    const link = document.querySelector(`[data-lab-id="${lab.id}"]`), box = link.querySelector("small"); // of a card
    link.classList.toggle("done", done(lab) === lab.tasks);
    if (box) box.textContent += `, ${stateOf(lab)}`;
    else link.title = stateOf(lab);
  }
  return `${labs.filter((lab) => done(lab) === lab.tasks).length} of ${labs.length} labs done`;
}

function stateOf(lab) {
  const n = done(lab);
  return n === lab.tasks ? "done" : n ? `${n} of ${lab.tasks} tasks done` : begun(lab) ? "begun" : "not begun";
}

/** Write which labs are done into the list of the lab `current`. */
export function drawBoard(list, current) {
  const rows = labs.map((lab) => {
    const state = stateOf(lab), row = el("li", "", { class: state === "done" ? "passed" : state === "not begun" ? "" : "open" });
    row.append(lab.id === current ? el("b", lab.id) : el("a", lab.id, { href: lab.href }), ` ${lab.title}: ${state}`);
    return row;
  });
  list.replaceChildren(el("summary", tellBoard()), el("ol"));
  list.lastChild.append(...rows);
}

/** How to go on in a terminal: a zip with all files that were written, and the commands. */
export function drawLaptop(box) {
  const files = () => labs.filter(begun).map(({ id }) => [`labs/${id}/starter.py`, kept(id, "starter.py")]);
  const button = el("button", "Download what you wrote, as one zip");
  button.onclick = () => {
    if (files().length) download("my-labs.zip", zip(files()));
    else button.textContent = "Nothing is written yet";
  };
  box.replaceChildren(
    el("summary", "Continue on your laptop"),
    el("p", "All labs are there, with the tensors, the notebooks and the whole engine. Get the course; then, in its folder, with your zip beside its README.md:"),
    button, el("pre", COMMANDS, { tabindex: "0" }));
}

export function download(name, data, type = "application/zip") {
  const address = URL.createObjectURL(new Blob([data], { type }));
  el("a", "", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

/** A zip archive of [[name, text]], stored as they are. */
function zip(files) {
  const parts = [], directory = [], encoder = new TextEncoder();
  const size = (all) => all.reduce((sum, { length }) => sum + length, 0);
  const number = (bytes, value) => Array.from({ length: bytes }, (_, i) => (value >>> (8 * i)) & 255);
  for (const [path, text] of files) {
    const name = encoder.encode(path), data = encoder.encode(text);
    // Version 2.0, names in UTF-8, stored, 1 January 1980; checksum, sizes, the length of the name, no extra field.
    const common = [20, 0, 0, 8, 0, 0, 0, 0, 33, 0, ...number(4, crc32(data)), ...number(4, data.length), ...number(4, data.length), ...number(2, name.length), 0, 0];
    const offset = size(parts);
    parts.push(new Uint8Array([0x50, 0x4b, 3, 4, ...common]), name, data);
    directory.push(new Uint8Array([0x50, 0x4b, 1, 2, 20, 0, ...common, ...number(10, 0), ...number(4, offset)]), name);
  }
  const end = [0x50, 0x4b, 5, 6, 0, 0, 0, 0, ...number(2, files.length), ...number(2, files.length), ...number(4, size(directory)), ...number(4, size(parts)), 0, 0];
  return new Blob([...parts, ...directory, new Uint8Array(end)]);
}

function crc32(data) {
  let sum = ~0;
  for (const byte of data) {
    sum ^= byte;
    for (let bit = 0; bit < 8; bit++) sum = (sum >>> 1) ^ (sum & 1 ? 0xedb88320 : 0);
  }
  return ~sum >>> 0;
}
