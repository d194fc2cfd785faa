// Python in a worker, for the pages with an editor: the button that runs and stops it, and a watchdog.

export const $ = (id) => document.getElementById(id);
export const say = (text) => { $("status").textContent = text; };

// For tests. quiet: ms without a message, after which Python hangs in a call that nothing interrupts. scale: factor of
// the time limits. verdict: the last one.
export const page = (window.labPage = { quiet: 60_000, scale: 1, verdict: null });

/** `run` asks for what the button promises, `receive` gets what the worker sends, `hangs` says what does not end. */
export function makePython(lab, { run, receive, hangs }) {
  const button = $("run"), label = button.textContent;
  let worker, ready = false, running = false, waiting = false, watch;

  function start() {
    ready = false;
    worker = new Worker(new URL(`worker.js?lab=${lab}`, import.meta.url), { type: "module" });
    worker.onerror = (event) => end(`Python could not start: ${event.message ?? "see the console"}.`, false);
    worker.onmessage = ({ data }) => {
      if ("broken" in data) return end(`Python ended: ${data.broken.trim().split("\n").pop().slice(0, 200)}.`, ready);
      if ("ready" in data) {
        ready = true;
        if (!waiting) say("Python is ready.");
      } else if ("row" in data) listen();
      else runs(false);
      if (!data.row?.alive) receive(data);
      if (waiting) toggle();
    };
  }

  function toggle() {
    if (running) return end("Stopped. Python starts again.");
    waiting = !ready;
    $("results").setAttribute("aria-busy", true); // what stands there is of an earlier file, while Python loads too
    if (waiting) return say("Python is loading. It runs when it is ready.");
    run();
  }

  function ask(question) {
    runs(true);
    worker.postMessage(question);
    listen();
  }

  function listen() {
    clearTimeout(watch);
    watch = setTimeout(() => {
      const words = `${hangs()}, and nothing interrupts it. Python was stopped and starts again.`;
      end(words);
      Object.assign($("verdict"), { textContent: words, className: "bad" });
    }, page.quiet);
  }

  function end(why, again = true) {
    worker.terminate();
    runs(waiting = false);
    say(why);
    if (again) start();
  }

  function runs(now) {
    clearTimeout(watch);
    running = now;
    button.textContent = now ? "Stop" : label;
    button.classList.toggle("stop", now);
    $("results").setAttribute("aria-busy", now);
  }

  button.onclick = toggle;
  addEventListener("keydown", (event) => {
    if ((event.ctrlKey || event.metaKey) && event.key === "Enter" && !event.defaultPrevented) toggle();
  });
  return { start, toggle, ask, get free() { return ready && !running; } };
}
