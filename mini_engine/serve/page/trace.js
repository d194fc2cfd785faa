// The player on the last steps: while "follow" is on, it is given the newest once a second.
"use strict";

const $ = (id) => document.getElementById(id);
let ready = false, shown = -1, followed = sessionStorage.getItem("own"); // the chat's last message

addEventListener("message", ({ source, data }) => {
  if (source !== $("player").contentWindow) return;
  if (data.type === "mini-engine-ready") ready = true;
  if (data.type === "mini-engine-size") $("player").style.height = `${data.height}px`;
  if (data.type === "mini-engine-moved") {
    followed = data.follow;
    if (data.step !== shown) $("live").checked = false; // the reader looks at an earlier step
  }
});

async function look() {
  const key = sessionStorage.getItem("key");
  const response = await fetch("/trace/steps", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  const data = await response.json();
  if (data.error) $("said").textContent = data.error.message;
  if (!data.traces?.length || data.step === shown) return;
  shown = data.step;
  $("said").hidden = true;
  $("player").hidden = false;
  $("player").contentWindow.postMessage({ type: "mini-engine-trace", ...data, follow: followed }, "*");
}

(async () => {
  for (;;) {
    if (ready && $("live").checked) await look().catch((error) => { $("said").textContent = error.message; });
    await new Promise((next) => setTimeout(next, 1000));
  }
})();
