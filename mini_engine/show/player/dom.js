// An element with attributes and children. No markup is ever made from a trace.

function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name === "style") element.style.cssText = value; // by script: a policy may forbid the attribute
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** A button with visible cells; a screen reader reads the sentence instead. */
function rowButton(attributes, sentence, ...cells) {
  for (const cell of cells) cell.setAttribute("aria-hidden", "true");
  return el("button", { type: "button", title: sentence, ...attributes }, el("span", { class: "spoken" }, sentence), ...cells);
}
