// An element with attributes and children. Nothing is ever made from markup that a trace could write.

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

/** A button whose cells are for the eye; a screen reader is given the sentence. */
function rowButton(attributes, sentence, ...cells) {
  for (const cell of cells) cell.setAttribute("aria-hidden", "true");
  return el("button", { type: "button", title: sentence, ...attributes }, el("span", { class: "spoken" }, sentence), ...cells);
}
