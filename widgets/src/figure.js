/** A figure: its name and its value. */
import { element, setAttribute, setText } from "./dom.js";

/** @typedef {{value: string, title?: string}} FigureContent */

export class Figure {
  constructor(/** @type {string} */ name) {
    this.value = element("span");
    this.node = element("div", {}, element("dt", {}, name), element("dd", {}, this.value));
  }

  draw(/** @type {FigureContent} */ { value, title }) {
    setText(this.value, value);
    setAttribute(this.node, "title", title ?? null);
  }
}
