// The shell: a page embeds it as a frame and feeds it by postMessage.
//   to it    {type: "mini-engine-trace", traces, step, follow, theme, veil, said}   as mini_engine.show.player.payload makes it;
//            with cluster the traces are engines on one clock (cluster_payload);
//            with play it plays at once, with speed that many steps a second; brief leaves out the life cycle of the followed request
//            {type: "mini-engine-theme", theme}
//   from it  {type: "mini-engine-ready"}, {type: "mini-engine-moved", step, follow}, {type: "mini-engine-failed", message},
//            {type: "mini-engine-size", height}

const say = (message, origin = "*") => parent !== window && parent.postMessage(message, origin);
let embedder = "*"; // until its first message; nothing of a trace is sent before
const player = new Player(document.getElementById("player"), {
  keys: document, embedded: true, stylesheet: "player.css",
  onMove: (place) => say({ type: "mini-engine-moved", ...place }, embedder),
});
document.body.style.margin = "0";
addEventListener("message", ({ source, origin, data }) => {
  if (source !== parent || parent === window) return;
  if (data?.type === "mini-engine-theme") player.theme(data.theme);
  if (data?.type !== "mini-engine-trace") return;
  embedder = origin === "null" ? "*" : origin;
  try {
    player.host.classList.toggle("brief", Boolean(data.brief));
    size.width = 0; // of other runs
    if (data.speed) player.part("speed").value = data.speed;
    player.load(data);
    measure();
    if (data.play && !matchMedia("(prefers-reduced-motion: reduce)").matches) player.play(true);
  } catch (error) {
    player.fail(error.message);
    say({ type: "mini-engine-failed", message: error.message }, embedder);
  }
});
// The height never shrinks while the width stays: else the text below would move from step to step.
const size = { width: 0, height: 0 };
function measure() {
  if (!player.panes.length || !player.root.querySelector("link").sheet) return; // it has no size of its own yet
  const { width, height } = player.host.getBoundingClientRect();
  if (width !== size.width) Object.assign(size, { width, height: 0 });
  size.height = Math.max(size.height, Math.ceil(height));
  say({ type: "mini-engine-size", height: size.height }, embedder);
}
new ResizeObserver(measure).observe(player.host);
player.root.querySelector("link").addEventListener("load", measure); // a frame out of sight observes nothing
say({ type: "mini-engine-ready" });
