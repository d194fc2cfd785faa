// Python with the course, for a worker. It loads files only from the worker's folder.

const FILE = "/compiled", PLACE = ["labs-python", "compiled"]; // in Python's memory; in the browser's cache

/** Return Pyodide and its module `name`. What it compiled is kept in the browser, for the next visit. */
export async function begin(name, options) {
  const course = fetch("course.zip").then((answer) => answer.arrayBuffer()), kept = earlier();
  const { loadPyodide } = await import("./pyodide/pyodide.mjs");
  const python = await loadPyodide({ indexURL: new URL("pyodide/", location).href, ...options });
  python.unpackArchive(await course, "zip", { extractDir: "/course" });
  python.FS.writeFile(FILE, await kept);
  python.runPython(`
import os, sys
sys.path[:0] = ["/course", "/course/site"]
os.chdir("/course")
`);
  python.runPython(python.FS.readFile("/course/labs/kit/browser/compiled.py", { encoding: "utf8" }));
  const compiled = python.globals.get("begin")(FILE), module = python.pyimport(name);
  if (compiled.write()) keep(python.FS.readFile(FILE));
  return { python, module };
}

// A page has no cache where it is not served securely, or where its reader forbids it: all is compiled again.
async function earlier() {
  try {
    const found = await (await caches.open(PLACE[0])).match(PLACE[1]);
    return new Uint8Array(await found.arrayBuffer());
  } catch {
    return new Uint8Array();
  }
}

async function keep(bytes) {
  try {
    await (await caches.open(PLACE[0])).put(PLACE[1], new Response(bytes));
  } catch (error) {
    console.info(`What Python compiled is not kept: ${error}`);
  }
}
