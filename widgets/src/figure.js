/** A figure: its name, its value and, if there is one, its curve. */
import { element, setAttribute, setText, svgElement } from "./dom.js";
import { number } from "./format.js";

/** The path of a curve in a box of `width` by `height`, with a gap where a value is not a number. */
export function sparkline(/** @type {(number|string)[]} */ points, width = 100, height = 24) {
  const known = numbersIn(points);
  if (known.length < 2) return "";
  const low = Math.min(...known);
  const span = Math.max(...known) - low;
  const x = (/** @type {number} */ i) => +((i * width) / (points.length - 1)).toFixed(1);
  const y = (/** @type {number} */ v) => +(span ? height - ((v - low) * height) / span : height / 2).toFixed(1);
  return points
    .map((v, i) => (isNumber(v) ? `${isNumber(points[i - 1]) ? "L" : "M"}${x(i)} ${y(v)}` : ""))
    .join("");
}

/** @returns {v is number} */
const isNumber = (/** @type {unknown} */ v) => Number.isFinite(v);

const numbersIn = (/** @type {(number|string)[]} */ points) => points.filter(isNumber);

/** @typedef {{value: string, points?: (number|string)[], title?: string}} FigureContent */

export class Figure {
  constructor(/** @type {string} */ name) {
    this.name = name;
    this.value = element("span");
    this.dd = element("dd", {}, this.value);
    this.node = element("div", {}, element("dt", {}, name), this.dd);
    /** @type {?{svg: Element, line: Element, title: Element}} */
    this.curve = null;
    /** @type {?(number|string)[]} */
    this.points = null;
  }

  draw(/** @type {FigureContent} */ { value, points, title }) {
    setText(this.value, value);
    setAttribute(this.node, "title", title ?? null);
    if (points === this.points || (points && this.points && String(points) === String(this.points))) return;
    this.points = points ?? null;
    const path = points ? sparkline(points) : "";
    if (!points || !path) {
      this.curve?.svg.remove();
      this.curve = null;
      return;
    }
    const curve = (this.curve ??= this.makeCurve());
    const known = numbersIn(points);
    const description = `${this.name} from ${number(known[0])} to ${number(known[known.length - 1])}`;
    setAttribute(curve.line, "d", path);
    setAttribute(curve.svg, "aria-label", description);
    setText(curve.title, description);
  }

  makeCurve() {
    const line = svgElement("path", { "vector-effect": "non-scaling-stroke" });
    const title = svgElement("title", {});
    const box = { class: "nbe-curve", viewBox: "0 -2 100 28", preserveAspectRatio: "none", role: "img" };
    const svg = svgElement("svg", box, title, line);
    this.dd.append(svg);
    return { svg, line, title };
  }
}
