// Plays the recorded run on the front page, in slow motion. The run lies in the page; nothing is fetched.
"use strict";
{
  const stage = document.querySelector(".hero");
  const { slower, states, letters, beats, frames } = JSON.parse(stage.querySelector("script").textContent);
  for (const name in letters) letters[name] = [...letters[name].replaceAll("\n\n", "\n\v")].map((one) => one === "\v" ? "" : one);
  const chats = [...stage.querySelectorAll(".chats li")].map((card) => ({
    card, name: card.dataset.chat, state: card.querySelector("small"), said: card.querySelector(".said"),
    rest: card.querySelector(".rest"),
  }));
  const boxes = [...stage.querySelectorAll(".boxes i")];
  const captions = [...stage.querySelectorAll(".beats li")];
  const end = frames.at(-1)[0];
  // Of each chat, the number of its letters before a step, and before the step that made it wait.
  const written = frames.map((_, step) => Object.fromEntries(chats.map(({ name }) =>
    [name, frames.slice(0, step).filter((frame) => frame[3].includes(name)).length])));
  const stops = frames.findIndex((frame) => frame[1].includes("p"));

  const text = (name, ...part) => letters[name].slice(...part).join("");

  const show = (step) => {
    const [, now, owners] = frames[step];
    chats.forEach(({ card, name, state, said, rest }, place) => {
      card.dataset.state = now[place];
      state.textContent = states[now[place]];
      // All of the text has its place from the start, so that no word jumps to the next line.
      const end = written[step][name], cut = frames[stops][1][place] === "p" ? Math.min(written[stops][name], end) : end;
      said.replaceChildren(text(name, 0, cut));
      if (end > cut) said.append(Object.assign(document.createElement("mark"), { textContent: text(name, cut, end) }));
      rest.textContent = text(name, end);
    });
    boxes.forEach((box, place) => {
      box.dataset.chat = owners[place];
      box.textContent = owners[place] === "." ? "" : owners[place];
    });
    const beat = beats.findLastIndex((first) => first <= step);
    captions.forEach((caption, place) => caption.classList.toggle("now", place === beat));
    buttons.forEach((button, place) => button.setAttribute("aria-pressed", place === beat));
  };

  const control = (words, does, name = words) => {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: words, onclick: does });
    button.setAttribute("aria-label", name);
    return button;
  };
  let playing = false, at = 0, before = 0;
  const frame = (now) => {
    if (!playing) return;
    // A hidden tab stands still, and the first frame may be from before the start.
    at = Math.min(end, at + Math.max(0, Math.min(now - before, 100)) / slower);
    before = now;
    show(frames.findLastIndex(([start]) => start <= at));
    if (at < end) requestAnimationFrame(frame);
    else play(false);
  };
  const play = (on) => {
    if (on && at >= end) at = 0;
    playing = on;
    before = performance.now();
    toggle.textContent = on ? "Pause" : at >= end ? "Again" : "Play";
    toggle.setAttribute("aria-label", `${toggle.textContent}: the run of six chats`);
    if (on) requestAnimationFrame(frame);
  };
  const toggle = control("Play", () => play(!playing));
  const buttons = captions.map((caption, place) => control(place + 1, () => {
    at = frames[beats[place]][0];
    play(false);
    show(beats[place]);
  }, `${place + 1}: ${caption.textContent}`));
  const pace = Object.assign(document.createElement("span"), { textContent: `a recorded run, ${slower} times slower` });
  stage.querySelector(".steps").append(toggle, ...buttons, pace);
  show(0);
  stage.classList.add("awake");
  play(!matchMedia("(prefers-reduced-motion: reduce)").matches);

  for (const link of document.querySelectorAll("a[href='#step-by-step']")) {
    link.addEventListener("click", () => document.querySelector(".play button")?.click());
  }
}
