// A page's dial: the figures of the first settings are in the page; the simulator gives the others, in a worker.
"use strict";
{
  const address = new URL("../write/app/race.js", document.currentScript.src);
  const dial = document.querySelector(".dial"), status = dial.querySelector("[role=status]");
  const { at, figures: first, limits } = JSON.parse(dial.querySelector("script").textContent);
  const rows = new Map([...dial.querySelectorAll("tbody tr")].map((row) => [row.dataset.way, row]));
  const sliders = [...dial.querySelectorAll("input[type=range]")];
  const shown = new Map(Object.entries(first));
  let worker = null, waiting = [], asked = null;

  const settings = () => ({ ...at, ...Object.fromEntries(sliders.map((one) => [one.name, one.valueAsNumber])) });
  const draw = () => {
    const best = Math.max(...[...shown.values()].map((one) => one.goodput), 0.01);
    for (const [way, row] of rows) {
      const cell = (name) => row.querySelector(`.${name}`), now = shown.get(way);
      for (const name of ["ttft", "itl"]) {
        cell(name).textContent = `${Math.round(now[name]).toLocaleString("en")} ms`;
        cell(name).classList.toggle("over", now[name] > limits[name]);
      }
      cell("goodput").firstChild.textContent = `${now.goodput.toFixed(1)}/s`;
      cell("goodput").lastChild.style.width = `calc(${now.goodput / best} * (100% - 4rem))`;
      cell("preempted").textContent = now.preempted + (now.refused ? `, ${now.refused} refused` : "");
      row.classList.toggle("chosen", row.querySelector(":checked") !== null);
      row.classList.toggle("old", waiting.includes(way) || asked?.way === way);
    }
  };

  /** One question at a time; what was moved meanwhile is asked next, the chosen way first. */
  const next = () => {
    if (asked || !waiting.length) return;
    asked = { way: waiting.shift(), settings: settings() };
    worker.postMessage(asked);
  };
  const turn = () => {
    const chosen = dial.querySelector(":checked")?.value ?? [...rows.keys()][0];
    waiting = [chosen, ...[...rows.keys()].filter((way) => way !== chosen)];
    for (const one of sliders) one.nextElementSibling.value = one.value;
    try {
      worker ??= start();
    } catch {
      return broken("This page cannot start Python here. Build and open the book: make docs, python -m labs open.");
    }
    next();
    draw();
  };
  const broken = (text) => {
    status.textContent = `${text} The figures are those of the first settings.`;
    sliders.forEach((one) => { one.value = one.defaultValue; one.nextElementSibling.value = one.value; one.disabled = true; });
    waiting = [], asked = null;
    for (const [way, one] of Object.entries(first)) shown.set(way, one);
    draw();
  };
  const start = () => {
    status.textContent = "Python is loading; the figures follow.";
    const python = new Worker(address, { type: "module" });
    python.onerror = () => broken("Python could not start.");
    python.onmessage = ({ data }) => {
      if (data.ready) status.textContent = "";
      else if (data.broken) broken(`Python stopped: ${data.broken}.`);
      else if (data.figures) {
        const { way, settings: were } = asked;
        shown.set(way, data.figures);
        asked = null;
        if (JSON.stringify(were) !== JSON.stringify(settings()) && !waiting.includes(way)) waiting.unshift(way);
        next();
        draw();
      }
    };
    return python;
  };

  dial.addEventListener("input", turn);
  dial.addEventListener("submit", (event) => event.preventDefault());
  draw();
}
