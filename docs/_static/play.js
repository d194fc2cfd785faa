// Puts the player where the picture of a run stands, when it is scrolled to or asked for. The run lies in the page,
// so nothing is fetched but the player itself; without this file the picture stands.
"use strict";
{
  const shell = new URL("player/shell.html", document.currentScript.src);
  const theme = () => document.documentElement.dataset.theme ?? null;
  const wide = matchMedia("(min-width: 720px)"); // on a phone the player is long: it comes when it is asked for

  const open = (place, asked = false) => {
    if (place.querySelector("iframe")) return;
    const frame = document.createElement("iframe");
    frame.title = place.dataset.title;
    frame.src = shell;
    const tell = (message) => frame.contentWindow.postMessage(message, "*"); // from a disk nobody has an origin
    addEventListener("message", ({ source, data }) => {
      if (source !== frame.contentWindow) return;
      if (data?.type === "mini-engine-ready") {
        const run = JSON.parse(place.querySelector("script").textContent);
        tell({ type: "mini-engine-trace", theme: theme(), ...run });
      }
      if (data?.type !== "mini-engine-size") return;
      frame.style.height = `${data.height + 2}px`;
      place.classList.add("open"); // now that its size is known: the text below moves once
      if (asked) frame.focus();
      asked = false;
    });
    new MutationObserver(() => tell({ type: "mini-engine-theme", theme: theme() }))
      .observe(document.documentElement, { attributeFilter: ["data-theme"] });
    place.append(frame);
  };

  document.addEventListener("DOMContentLoaded", () => {
    const seen = new IntersectionObserver((entries) => {
      for (const { isIntersecting, target } of entries) if (isIntersecting && wide.matches) open(target);
    }, { rootMargin: "1500px 0px" }); // before it is in sight, so that nothing that is read moves
    for (const place of document.querySelectorAll(".play")) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = "Play it, step by step";
      button.addEventListener("click", () => open(place, true));
      place.append(button);
      // Beside a listing it would be in the way; the front page has a button for it.
      if (place.querySelector("img") && !document.querySelector(".hero")) seen.observe(place);
    }
  });
}
