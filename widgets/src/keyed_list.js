/**
 * @template T, C
 * @typedef {{node: Element, draw(item: T, context: C): void, close?(): void}} Part
 */

/**
 * One part of the page for each item, in the items' order. Parts that remain keep the focus, and are moved only if the order changes.
 * @template T, C
 */
export class KeyedList {
  /** @param {Element} parent @param {(key: string, item: T) => Part<T, C>} make */
  constructor(parent, make) {
    this.parent = parent;
    this.make = make;
    this.header = parent.lastElementChild; // earlier children stay in front
    /** @type {Map<string, Part<T, C>>} */
    this.parts = new Map();
  }

  /** @param {[string, T][]} items @param {C} context */
  draw(items, context) {
    this.removeAllBut(new Set(items.map(([key]) => key)));
    const focused = this.parent.contains(document.activeElement) ? document.activeElement : null;
    let last = this.header;
    for (const [key, item] of items) {
      const part = this.parts.get(key) ?? this.make(key, item);
      this.parts.set(key, part);
      const next = last ? last.nextElementSibling : this.parent.firstElementChild;
      if (next !== part.node) this.parent.insertBefore(part.node, next);
      last = part.node;
      part.draw(item, context);
    }
    // What is moved loses the focus.
    if (focused instanceof HTMLElement && focused !== document.activeElement) focused.focus({ preventScroll: true });
  }

  removeAllBut(/** @type {Set<string>} */ wanted) {
    for (const [key, part] of this.parts) {
      if (wanted.has(key)) continue;
      // Keep the focus inside the view if the part that has it is removed.
      if (part.node.contains(document.activeElement)) this.parent.closest("section")?.focus({ preventScroll: true });
      part.close?.();
      part.node.remove();
      this.parts.delete(key);
    }
  }
}
