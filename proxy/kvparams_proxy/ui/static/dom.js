// Makes and updates elements. Text only ever goes in as text: nothing here reads markup.

const SVG = "http://www.w3.org/2000/svg";

/** Returns an element. `properties` are attributes; `on` has listeners, `data` data attributes, `text` the text. */
export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** Returns an SVG element, likewise. */
export function s(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(element, { on = {}, data = {}, text, ...attributes }, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, String(value));
  }
  for (const [name, value] of Object.entries(data)) element.dataset[name] = String(value);
  for (const [name, listener] of Object.entries(on)) element.addEventListener(name, listener);
  if (text != null) element.textContent = String(text);
  for (const child of children.flat()) if (child != null && child !== false) element.append(child);
  return element;
}

/** Sets the text of an element if it is another one. */
export function setText(element, text) {
  const wanted = String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

/** Sets an attribute if it has another value. */
export function setAttribute(element, name, value) {
  const wanted = String(value);
  if (element.getAttribute(name) !== wanted) element.setAttribute(name, wanted);
}

/** Sets a data attribute if it has another value. */
export function setData(element, name, value) {
  const wanted = String(value);
  if (element.dataset[name] !== wanted) element.dataset[name] = wanted;
}

/** Replaces the children of an element. */
export function replace(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child != null && child !== false));
}

/**
 * Shows one child for each item, in this order. A child stays the same element as long as its item has the same key, so
 * that it keeps the focus.
 */
export function keyed(parent, items, keyOf, create, update) {
  const before = parent.keyedChildren ?? new Map();
  const after = new Map();
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    if (after.has(key)) continue;
    const child = before.get(key) ?? create(item);
    after.set(key, child);
    update(child, item);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
  for (const [key, child] of before) if (!after.has(key)) child.remove();
  parent.keyedChildren = after;
}

/** Returns the element with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Returns what a place shows where there is nothing to show: what is missing, and what to do. */
export function empty(title, ...lines) {
  return h("div", { class: "empty" }, h("strong", { text: title }), lines.map((line) => (typeof line === "string" ? h("span", { text: line }) : line)));
}

/** Returns a group of buttons of which one is pressed. */
export function segments(parent, options, chosen, choose) {
  replace(
    parent,
    options.map(([value, label]) =>
      h("button", { type: "button", text: label, "aria-pressed": String(value === chosen), data: { value }, on: { click: () => choose(value) } }),
    ),
  );
}

/** Marks the pressed button of such a group. */
export function pressSegment(parent, chosen) {
  for (const button of parent.children) setAttribute(button, "aria-pressed", button.dataset.value === chosen);
}
