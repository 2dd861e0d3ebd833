// Small helpers over the document. Text goes in as text: nothing here reads HTML.

export const byId = (id) => document.getElementById(id);

/** An element with attributes, properties by name, and children (nodes or text). */
export function make(tag, fields = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(fields)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Set an element's text, but touch the document only where it differs. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const count = (number) => Math.round(number).toLocaleString("en");

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 100 ? `${value.toFixed(1)} s` : `${Math.round(value)} s`;
}
