/** A figure: its name, its value, and what it means. */
import { element, setAttribute, setText } from "./dom.js";

/** `title`: the tooltip, which screen readers read too. @typedef {{value: string, title?: string}} FigureContent */

export class Figure {
  constructor(/** @type {string} */ name) {
    this.value = element("span");
    this.meaning = element("span", { class: "nbe-hidden" });
    this.node = element("div", {}, element("dt", {}, name), element("dd", {}, this.value, this.meaning));
  }

  draw(/** @type {FigureContent} */ { value, title }) {
    setText(this.value, value);
    setText(this.meaning, title ?? "");
    setAttribute(this.node, "title", title ?? null);
  }
}
