// As much of a document as the dashboard uses, so that its tests need neither a browser nor a package.

class Text {
  constructor(text) {
    this.textContent = text;
  }
}

export class Element {
  constructor(tag) {
    this.tagName = tag.toUpperCase();
    this.nodes = [];
    this.parent = null;
    this.attributes = new Map();
    this.listeners = new Map();
    this.value = "";
    this.writes = 0; // how often its text was set
    this.classList = {
      add: (name) => this.setAttribute("class", [...this.classes().add(name)].join(" ")),
      remove: (name) => {
        const names = this.classes();
        names.delete(name);
        this.setAttribute("class", [...names].join(" "));
      },
    };
  }

  classes() {
    return new Set((this.getAttribute("class") ?? "").split(" ").filter(Boolean));
  }

  get children() {
    return this.nodes.filter((node) => node instanceof Element);
  }

  get firstElementChild() {
    return this.children[0] ?? null;
  }

  get nextElementSibling() {
    const siblings = this.parent?.children ?? [];
    return siblings[siblings.indexOf(this) + 1] ?? null;
  }

  get textContent() {
    return this.nodes.map((node) => node.textContent).join("");
  }

  set textContent(text) {
    this.writes += 1;
    this.nodes = [new Text(text)];
  }

  set innerHTML(_) {
    throw new Error("text from outside must not become markup");
  }

  getAttribute(name) {
    return this.attributes.get(name) ?? null;
  }

  hasAttribute(name) {
    return this.attributes.has(name);
  }

  setAttribute(name, value) {
    this.attributes.set(name, String(value));
  }

  toggleAttribute(name, on) {
    if (on) this.attributes.set(name, "");
    else this.attributes.delete(name);
  }

  append(...nodes) {
    for (const node of nodes) this.insertBefore(typeof node === "string" ? new Text(node) : node, null);
  }

  insertBefore(node, before) {
    if (node instanceof Element) node.remove();
    this.nodes.splice(before ? this.nodes.indexOf(before) : this.nodes.length, 0, node);
    node.parent = this;
    return node;
  }

  remove() {
    if (this.parent) this.parent.nodes = this.parent.nodes.filter((node) => node !== this);
    this.parent = null;
  }

  addEventListener(name, listener) {
    this.listeners.set(name, [...(this.listeners.get(name) ?? []), listener]);
  }

  /** What a person does. A disabled button does nothing. */
  fire(name) {
    if (this.hasAttribute("disabled")) return;
    const event = { preventDefault() {}, stopPropagation() {} };
    for (const listener of this.listeners.get(name) ?? []) listener(event);
  }

  all(matches) {
    return this.children.flatMap((child) => [...(matches(child) ? [child] : []), ...child.all(matches)]);
  }

  querySelector(selector) {
    return this.all((node) => node.classes().has(selector.replace(/^\./, "")))[0] ?? null;
  }
}

globalThis.document = { createElement: (tag) => new Element(tag) };
