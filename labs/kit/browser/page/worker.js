// Python in a worker, which the page can end if it hangs. It loads files only from its own folder.
//   receives {source, columns, scale}, {demo: source}
//   sends    {ready: preview}, {row} (a test that begins, a test that ended, or alive, each second), {verdict}, {played: payload}, {broken: why}

import { begin } from "./begin.js";

const lab = new URLSearchParams(location.search).get("lab");

let python;

async function start() {
  const begun = await begin(lab === "arena" ? "labs.kit.arena.page" : "labs.kit.browser.run", { stdin: () => null });
  const judge = begun.module;
  python = begun.python;
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
