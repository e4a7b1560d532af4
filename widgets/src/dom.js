/** Small tools for the page. Text from outside is only ever set as text, never as markup. */
/** @import { Timers } from "./timers.js" */

const CONFIRM_TIME = 4000; // ms in which a second click confirms
const DOUBLE_CLICK = 400; // ms after the first click in which a second click does not confirm

/**
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag @param {Record<string, string>} [attributes] @param {...(Node|string)} children
 * @returns {HTMLElementTagNameMap[T]}
 */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function svgElement(
  /** @type {string} */ tag,
  /** @type {Record<string, string>} */ attributes,
  /** @type {Node[]} */ ...children
) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Set a node's text only if it differs: an equal text would reset selections and screen readers. */
export function setText(/** @type {Element} */ node, /** @type {string} */ text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Set an attribute only if it differs; null removes it. */
export function setAttribute(/** @type {Element} */ node, /** @type {string} */ name, /** @type {?string} */ value) {
  if (node.getAttribute(name) === value) return;
  if (value === null) node.removeAttribute(name);
  else node.setAttribute(name, value);
}

/** Disable a button by `aria-disabled`, which keeps the focus on it. */
export function setDisabled(/** @type {Element} */ button, /** @type {boolean} */ disabled) {
  setAttribute(button, "aria-disabled", disabled ? "true" : null);
}

export function button(
  /** @type {string} */ text,
  /** @type {(event: MouseEvent) => void} */ act,
  classes = "",
  /** @type {string} */ label = "",
) {
  const node = element("button", { type: "button", class: `nbe-button ${classes}`.trim() }, text);
  if (label) node.setAttribute("aria-label", label);
  node.addEventListener("click", (event) => node.hasAttribute("aria-disabled") || act(event));
  return node;
}

/**
 * A button that needs a second click, for which it shows `question`. A double click or a held key does not confirm. `disarm`
 * forgets the first click, when the button is about something else from now on.
 * @param {Timers} timers @param {string} text @param {string} question @param {() => void} act
 */
export function confirmedButton(timers, text, question, act, classes = "", label = "") {
  /** @type {?number} */
  let timer = null;
  let askedAt = 0;
  const disarm = () => {
    if (timer !== null) timers.cancel(timer);
    timer = null;
    node.classList.remove("nbe-confirm");
    setText(node, text);
    if (label) setAttribute(node, "aria-label", label);
  };
  const node = button(
    text,
    (event) => {
      if (timer !== null) {
        if (event.detail > 1 || performance.now() - askedAt < DOUBLE_CLICK) return;
        disarm();
        act();
        return;
      }
      askedAt = performance.now();
      timer = timers.later(disarm, CONFIRM_TIME);
      node.classList.add("nbe-confirm");
      setText(node, question);
      if (label) setAttribute(node, "aria-label", `${label}: really?`);
    },
    classes,
    label,
  );
  node.addEventListener("keydown", (event) => event.repeat && event.preventDefault());
  return Object.assign(node, { disarm });
}

/** Have the browser save a text as a file. @param {Timers} timers */
export function saveFile(/** @type {string} */ name, /** @type {string} */ text, /** @type {string} */ type, timers) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = element("a", { href: url, download: name });
  document.body.append(link); // VS Code saves files at clicks that reach the window
  link.click();
  link.remove();
  timers.later(() => URL.revokeObjectURL(url), 10_000);
}

/** Highlight a node for a moment. The style sheet animates it, unless the reader prefers reduced motion. */
export function highlight(/** @type {Element} */ node) {
  node.classList.add("nbe-highlight");
}
