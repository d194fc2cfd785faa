// The simulator in a worker, for the book's dials. It loads files only from its own folder.
//   receives {way, settings}
//   sends    {ready}, {figures}, {broken: why}

import { begin } from "./begin.js";

async function start() {
  const { module: race } = await begin("labs.kit.browser.race");
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
