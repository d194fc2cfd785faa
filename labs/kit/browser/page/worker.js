// Python in a worker, which the page can end if it hangs. It loads files only from its own folder.
//   receives {source, columns, scale}, {demo: source}
//   sends    {ready: preview}, {row}, {verdict}, {played: payload}, {broken: why}

const lab = new URLSearchParams(location.search).get("lab");

let python;

async function start() {
  const course = fetch("course.zip").then((answer) => answer.arrayBuffer());
  const { loadPyodide } = await import("./pyodide/pyodide.mjs");
  python = await loadPyodide({ indexURL: new URL("pyodide/", location).href, stdin: () => null });
  python.unpackArchive(await course, "zip", { extractDir: "/course" });
  python.runPython(`
import os, sys
sys.path[:0] = ["/course", "/course/site"]
os.chdir("/course")
`);
  const judge = python.pyimport(lab === "arena" ? "labs.kit.arena.page" : "labs.kit.browser.run");
  postMessage({ ready: judge.preview ? JSON.parse(judge.preview(lab)) : null }); // the arena has none
  return judge;
}

let asked = false;
const started = start();
// Warm up in the pause before the first run; a run that waits already goes first.
started.then((judge) => setTimeout(() => asked || judge.warm?.(lab), 200), () => {});
started.catch((error) => postMessage({ broken: String(error) }));
onmessage = async ({ data: { source, columns, scale, demo } }) => {
  asked = true;
  const judge = await started;
  try {
    if (demo !== undefined) return postMessage({ played: JSON.parse(python.pyimport("labs.kit.browser.demo").demo(lab, demo)) });
    const send = (row) => postMessage({ row: JSON.parse(row) });
    postMessage({ verdict: JSON.parse(judge.run(lab, source, send, columns, scale)) });
  } catch (error) {
    postMessage({ broken: String(error) });
  }
};
