// The chat, and beside it the engine that answers: /state is asked for while something runs.
"use strict";

const $ = (id) => document.getElementById(id);
const messages = [];
const EIGHT = ["Once upon a time", "The sea was", "To be or not", "My lord, I", "In the morning the", "Rivers are",
  "A queue is", "What is a block? It is"];
let model = "", chats = false, answering = null, others = 0, key = sessionStorage.getItem("key") ?? "";
let own = null; // the name that the engine gave the message which is being answered; /trace follows it

const headers = () => ({ "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) });

async function get(path) {
  const response = await fetch(path, { headers: headers() });
  if (response.status === 401) $("key").hidden = false;
  if (!response.ok) throw new Error((await response.json()).error.message);
  return response.json();
}

// Sends one request, and calls `named` with its name and `take` with each piece of text. A browser keeps six connections to a server: so eight
// prompts are one request.
async function stream(asked, take, signal, named = () => {}) {
  const response = await fetch(asked.messages ? "/v1/chat/completions" : "/v1/completions", {
    method: "POST", headers: headers(), signal, body: JSON.stringify({ model, stream: true, ...asked }),
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  named(response.headers.get("X-Request-Id"));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", part; !(part = await reader.read()).done;) {
    const events = (rest + part.value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") return;
      const data = JSON.parse(event.slice(6));
      if (data.error) throw new Error(data.error.message);
      for (const choice of data.choices) take(choice.delta?.content ?? choice.text ?? "");
    }
  }
}

function show(role, text) {
  const item = document.createElement("li");
  item.className = role;
  item.textContent = text;
  $("messages").append(item);
  item.scrollIntoView({ block: "nearest" });
  return item;
}

$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || answering) return;
  messages.push({ role: "user", content: text });
  show("user", text);
  $("text").value = "";
  const item = show("assistant", "");
  answering = new AbortController();
  $("stop").disabled = false;
  follow();
  try {
    const asked = chats ? { messages } : { prompt: text };
    const take = (piece) => { item.textContent += piece; $("messages").scrollTop = 1e9; };
    const named = (id) => { own = id; sessionStorage.setItem("own", id); };
    await stream({ ...asked, max_tokens: 200 }, take, answering.signal, named);
  } catch (error) {
    if (error.name !== "AbortError") show("error", error.message);
  }
  if (item.textContent) messages.push({ role: "assistant", content: item.textContent });
  else { // nothing was answered, so the conversation goes on without this message
    messages.pop();
    item.remove();
  }
  answering = null;
  $("stop").disabled = true;
});
$("stop").addEventListener("click", () => answering?.abort());
$("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
$("more").addEventListener("click", () => {
  others += 1;
  const over = () => { others -= 1; };
  stream({ prompt: EIGHT, max_tokens: 100 }, () => {}).then(over, over);
  follow();
});
$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").querySelector("input").value;
  sessionStorage.setItem("key", key);
  $("key").hidden = true;
  begin();
});

// One bar a request: a pixel stands for so many tokens that the longest fits. Many requests have thin bars without
// words, and those that wait are counted only, so that all fit on a screen.
const FEW = 24;
function draw({ requests, free, blocks, replicas }) {
  const used = blocks - free;
  document.querySelector("nav").hidden = Boolean(replicas); // they keep no steps
  $("memory").textContent = `Memory${replicas ? ` of ${replicas} replicas` : ""}: ${used} of ${blocks} blocks hold keys and values`;
  $("used").style.width = `${(100 * used) / blocks}%`;
  $("idle").hidden = requests.length > 0;
  const running = requests.filter((one) => one.place === "running");
  const many = requests.length > FEW, waiting = requests.length - running.length;
  const thick = many && running.some((one) => one.id === own) ? "; the thick bar is yours" : "";
  $("counts").textContent = `${running.length} running, ${waiting} waiting${thick}`;
  $("counts").hidden = !requests.length;
  $("rows").parentElement.classList.toggle("many", many);
  const longest = Math.max(60, ...requests.map((one) => one.prompt + one.outputs));
  $("rows").replaceChildren(...(many ? running : requests).map((one) => {
    const row = document.createElement("tr");
    row.className = one.id === own ? `${one.place} own` : one.place;
    const name = row.insertCell(), bar = row.insertCell(), held = row.insertCell();
    const short = one.id.replace(/^.*(?=.{3}-)/, ""); // of a replica's long name, the end
    name.textContent = one.id === own ? "yours" : short;
    held.textContent = one.place === "waiting" ? "waits" : one.blocks;
    const computed = Math.min(one.computed, one.prompt);
    for (const [kind, size] of [["computed", computed], ["left", one.prompt - computed], ["output", one.outputs]]) {
      const piece = document.createElement("span");
      piece.className = kind;
      piece.style.width = `${(100 * size) / longest}%`;
      bar.append(piece);
    }
    bar.title = `${one.id}: ${one.prompt} tokens of prompt, ${computed} computed, ${one.outputs} written`;
    return row;
  }));
  return requests.length;
}

let following = false;
async function follow() {
  if (following) return;
  following = true;
  for (let empty = 0; empty < 10;) { // ten looks at an idle engine, then nothing is asked until the next message
    try {
      empty = (draw(await get("/state")) || answering || others) ? 0 : empty + 1;
    } catch { empty += 1; }
    await new Promise((next) => setTimeout(next, document.hidden ? 2000 : 150));
  }
  following = false;
}

async function begin() {
  try {
    const state = await get("/state");
    ({ model, chats } = state);
    $("model").textContent = model;
    draw(state);
    follow();
  } catch (error) { show("error", error.message); }
}
begin();
