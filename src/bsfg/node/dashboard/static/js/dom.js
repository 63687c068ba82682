// Builds and renews the page. Text only ever becomes text: nothing here makes markup out of a string.

const SVG = "http://www.w3.org/2000/svg";

/** Make an element: h("p", {class: "note", data: {act: "hold"}}, "text", child, …). Children that are null are left out. */
export function h(name, attributes, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** Make an SVG element. */
export function s(name, attributes, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "data") for (const [key, text] of Object.entries(value)) element.dataset[key] = String(text);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Make a table whose cells carry the names of their columns: on a phone each row is a block of lines. */
export function table(...children) {
  const made = h("table", { class: "lines" }, ...children);
  const names = [...made.tHead.rows[0].cells].map((cell) => cell.textContent);
  for (const row of made.tBodies[0].rows) [...row.cells].forEach((cell, at) => { cell.dataset.label = names[at] ?? ""; });
  return made;
}

// What would turn or hide the text around it is shown as its number instead.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

/** Make the text of a stranger harmless to look at: it stays where it stands, and nothing in it is invisible. */
export function foreign(text) {
  const shown = String(text).replace(UNSEEN, (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`);
  return h("bdi", {}, shown);
}

/** Write what the node says: commands that it names between ` and ` look like commands. */
export function said(text) {
  const parts = String(text).split(/`([^`]+)`/);
  return parts.length < 3 ? foreign(text) : parts.map((part, at) => (at % 2 ? h("code", {}, foreign(part)) : part && foreign(part)));
}

/** Put new children into a place and keep every element that is still the same, so that focus and scrolling stay. */
export function renew(place, ...children) {
  const fresh = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  const next = fresh.map((child) => (typeof child === "string" ? document.createTextNode(child) : child));
  renewChildren(place, next);
}

function renewChildren(place, next) {
  const old = [...place.childNodes];
  next.forEach((node, index) => {
    const before = old[index];
    if (before === undefined) place.append(node);
    else if (alike(before, node)) renewNode(before, node);
    else place.replaceChild(node, before);
  });
  for (const extra of old.slice(next.length)) extra.remove();
}

function alike(before, node) {
  if (before.nodeType !== node.nodeType || before.nodeName !== node.nodeName) return false;
  return node.nodeType !== Node.ELEMENT_NODE || before.dataset.key === node.dataset.key;
}

function renewNode(before, node) {
  if (node.nodeType !== Node.ELEMENT_NODE) {
    if (before.data !== node.data) before.data = node.data;
    return;
  }
  for (const { name } of [...before.attributes]) {
    // What a person has opened stays open.
    if (!node.hasAttribute(name) && !(name === "open" && before.nodeName === "DETAILS")) before.removeAttribute(name);
  }
  for (const { name, value } of [...node.attributes]) {
    if (before.getAttribute(name) !== value) before.setAttribute(name, value);
  }
  renewChildren(before, [...node.childNodes]);
}

export const byId = (id) => document.getElementById(id);
