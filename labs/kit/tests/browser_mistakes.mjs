// node browser_mistakes.mjs SITE FILES.json: judges each [lab, source] in Pyodide as the site's pages do; a line a verdict.
import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

process.on("uncaughtException", (error) => { // not with Pyodide's source, which Node would print
  console.error(String(error.stack).slice(-3000));
  process.exit(1);
});

const [site, files] = process.argv.slice(2).map((path) => resolve(path));
const { loadPyodide } = await import(pathToFileURL(`${site}/app/pyodide/pyodide.mjs`));
const python = await loadPyodide({ indexURL: `${site}/app/pyodide/`, stdin: () => null });
python.unpackArchive(new Uint8Array(readFileSync(`${site}/app/course.zip`)), "zip", { extractDir: "/course" });
python.runPython(`import os, sys; sys.path[:0] = ["/course", "/course/site"]; os.chdir("/course")`);
// Others use this machine, too: time that passes proves no endless loop.
python.runPython("import labs.kit.judge.guard as guard; guard.WAIT = 60");
const judge = python.pyimport("labs.kit.browser.run");
for (const [lab, source] of JSON.parse(readFileSync(files, "utf-8"))) {
  const began = performance.now(), verdict = JSON.parse(judge.run(lab, source));
  console.log(JSON.stringify({ ...verdict, ms: Math.round(performance.now() - began) }));
}
