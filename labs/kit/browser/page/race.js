// The simulator in a worker, for the book's dials. It loads files only from its own folder.
//   receives {way, settings}
//   sends    {ready}, {figures}, {broken: why}

async function start() {
  const course = fetch("course.zip").then((answer) => answer.arrayBuffer());
  const { loadPyodide } = await import("./pyodide/pyodide.mjs");
  const python = await loadPyodide({ indexURL: new URL("pyodide/", location).href });
  python.unpackArchive(await course, "zip", { extractDir: "/course" });
  python.runPython("import sys; sys.path.insert(0, '/course')");
  const race = python.pyimport("labs.kit.browser.race");
  postMessage({ ready: true });
  return race;
}

const started = start();
started.catch((error) => postMessage({ broken: String(error) }));
onmessage = async ({ data }) => {
  const race = await started;
  try {
    postMessage({ figures: JSON.parse(race.answer(JSON.stringify(data))) });
  } catch (error) {
    postMessage({ broken: String(error) });
  }
};
