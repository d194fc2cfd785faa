// The single page: it holds its trace, and its address has the place, #step=12&follow=r3.

const place = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
const player = new Player(document.getElementById("player"), {
  keys: document,
  onMove({ step, follow }) {
    const address = `#${new URLSearchParams({ step, follow })}`;
    if (address !== location.hash) history.replaceState(null, "", address);
  },
});
document.body.style.margin = "0";
player.load({ ...JSON.parse(document.getElementById("data").textContent), ...place() });
addEventListener("hashchange", () => player.goTo(place()));
