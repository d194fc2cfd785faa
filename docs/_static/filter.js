// A field above the sections of a page that leaves those in which all its words occur. Without this file all stand.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  for (const place of document.querySelectorAll(".filter")) {
    const label = document.createElement("label");
    const field = document.createElement("input");
    const status = document.createElement("span");
    field.type = "search";
    field.id = "filter-field";
    label.htmlFor = field.id;
    label.textContent = place.dataset.label;
    status.setAttribute("role", "status");
    place.append(label, field, status);
    const sections = [...place.closest("section").querySelectorAll(":scope > section")];
    const texts = sections.map((section) => section.textContent.toLowerCase());
    const shown = () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      sections.forEach((section, i) => { section.hidden = !words.every((word) => texts[i].includes(word)); });
      const left = sections.filter((section) => !section.hidden).length;
      status.textContent = words.length ? `${left} of ${sections.length}` : "";
    };
    field.addEventListener("input", shown);
    addEventListener("hashchange", () => { // a link of the contents leads to a section that may be hidden
      field.value = "";
      shown();
      document.getElementById(location.hash.slice(1))?.scrollIntoView();
    });
  }
});
