// The loop on the front page: the recorded verdict answers at once, then Python judges what is written.
"use strict";
{
  const bench = document.querySelector(".bench"), $ = (name) => bench.querySelector(name);
  const { before, verdict: recorded } = JSON.parse($("script").textContent);
  const address = new URL("../write/app/worker.js?lab=lab-01", document.currentScript.src);
  const [editor, button, again, status, answer] = ["textarea", ".run", ".again", ".status", ".answer"].map($);
  const shown = editor.value, above = before.split("\n").length - 1;
  const source = () => before + editor.value.replace(/^(?=.*\S)/gm, "    ");
  const el = (tag, text = "", name = "") => Object.assign(document.createElement(tag), { textContent: text, className: name });
  let worker = null, ready = false, running = false;

  const say = (text) => { status.textContent = text; };
  const stop = (text) => {
    worker?.terminate();
    worker = null;
    ready = running = false;
    button.textContent = "Run";
    say(text);
  };
  const send = () => worker.postMessage({ source: source(), columns: 88, scale: 1 });

  const run = () => {
    if (running) return stop("Stopped.");
    running = true;
    button.textContent = "Stop";
    again.hidden = false;
    const known = editor.value === shown;
    if (known && !ready) show(recorded);
    else answer.replaceChildren();
    say(ready ? "The tests of lab-01 are running." : known ? "This answer was recorded. Python is loading, to run it here." : "Python is loading; then your loop runs.");
    try {
      worker ??= start();
      if (ready) send();
    } catch {
      stop("This page cannot start Python here. Build and open the book: make docs, python -m labs open.");
    }
  };

  const start = () => {
    const python = new Worker(address, { type: "module" });
    python.onerror = () => stop("Python could not start, so that only the recorded answer is here.");
    python.onmessage = ({ data }) => {
      if (data.ready) {
        ready = true;
        say("The tests of lab-01 are running.");
        send();
      } else if (data.broken) stop(`Python stopped: ${data.broken}`);
      else if (data.verdict) {
        running = false;
        button.textContent = "Run";
        say("Python ran it in this page.");
        show(data.verdict);
      }
    };
    return python;
  };

  /** The judge's verdict: one sentence, and the step in which the two runs part. */
  const show = (verdict) => {
    const there = (text) => text.replace(/line (\d+)/g, (_, line) => `line ${line - above}`);
    const sentence = verdict.problem ? there(verdict.problem.replace(/^lab-\d+: /, "")) : verdict.done
      ? `The two runs agree, in every test of lab-01 (${verdict.tasks[0].status}).`
      : (verdict.report ?? "").split("\n\n")[0].replaceAll("\n", " ");
    answer.replaceChildren(el("p", sentence, verdict.done ? "good" : "bad"));
    if (verdict.name) answer.append(el("p", `This looks like: ${verdict.name.title}. ${verdict.name.hint}`));
    const player = verdict.done ? mended() : verdict.player;
    const steps = player?.traces.map((run) => run.steps.find((record) => record.step === player.step));
    if (steps?.every(Boolean) && player.traces.length === 2) answer.append(picture(player, steps));
    if (verdict.done) {
      const link = el("a", "Write the whole function in lab-01", "write");
      link.href = new URL("../../lab-01/index.html", address);
      answer.append(link);
    }
  };

  /** The recorded step once more, with the reference's run for both: all tests pass, and it is one of them. */
  const mended = () => {
    const { step, traces: [yours, reference] } = recorded.player;
    return { step, traces: [{ ...reference, name: yours.name }, reference] };
  };

  const picture = ({ step, traces }, steps) => {
    const box = el("div", "", "parted"), rows = steps.map((record) => new Map(record.scheduled));
    const sums = rows.map((row) => [...row.values()].reduce((sum, tokens) => sum + tokens, 0));
    traces.forEach((run, place) => {
      const budget = run.header.config.max_num_batched_tokens, widest = Math.max(...sums, budget);
      const row = el("div", "", "lane"), bar = el("div", "", "tokens");
      let sum = 0;
      for (const [name, tokens] of rows[place]) {
        const piece = el("span", `${name} ${tokens}`, place === 0 && rows[1].get(name) !== tokens ? "other" : "");
        piece.style.width = `${(100 * tokens) / widest}%`;
        bar.append(piece);
        sum += tokens;
      }
      const limit = el("i");
      limit.style.left = `${(100 * budget) / widest}%`;
      bar.append(limit);
      row.append(el("b", run.name), bar, el("small", `${sum} of ${budget} tokens`, sum > budget ? "over" : ""));
      box.append(row);
    });
    box.prepend(el("small", `step ${step}: the tokens that each request computes; the line is the budget`));
    return box;
  };

  button.onclick = run;
  editor.onkeydown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run();
  };
  again.onclick = () => {
    editor.value = shown;
    again.hidden = true;
    answer.replaceChildren();
    say("");
    editor.focus();
  };
}
