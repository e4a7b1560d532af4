/** The size of the world over time, with a mark for each event. */
/** @import { Event as ClusterEvent } from "./contract.js" */
import { element, setAttribute, setText, svgElement } from "./dom.js";
import { categories, sizeChart } from "./events.js";
import { plural, timeOfDay } from "./format.js";
import { KeyedList } from "./keyed_list.js";
import { tone } from "./tones.js";

const MARKS = { change: "▲", failure: "✕", other: "" };

/** @typedef {{event: ClusterEvent, x: number}} Mark */

export class TimelineChart {
  /** @param {(n: number) => void} onMarkClick called with the number of the event */
  constructor(onMarkClick) {
    this.line = svgElement("path", { "vector-effect": "non-scaling-stroke" });
    const box = { class: "nbe-steps", viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img" };
    this.svg = svgElement("svg", box, this.line);
    this.largest = element("span");
    this.from = element("time");
    this.to = element("time");
    const marks = element("div", { class: "nbe-rug", "aria-hidden": "true" });
    /** @type {KeyedList<Mark, null>} */
    this.marks = new KeyedList(marks, (_, { event }) => this.makeMark(event, onMarkClick));
    this.node = element(
      "div",
      { class: "nbe-chart" },
      element("span", { class: "nbe-axis", "aria-hidden": "true" }, this.largest, element("span", {}, "0")),
      element("div", { class: "nbe-plot" }, this.svg, marks),
      element("span", { class: "nbe-times", "aria-hidden": "true" }, this.from, this.to),
    );
  }

  makeMark(/** @type {ClusterEvent} */ event, /** @type {(n: number) => void} */ onClick) {
    const category = /** @type {keyof typeof MARKS} */ (categories(event).split(" ").pop() || "other");
    const title = `${timeOfDay(event.time)} ${event.text}`;
    const node = element("span", { "data-kind": category, "data-tone": tone(event.kind), title }, MARKS[category]);
    node.addEventListener("click", () => onClick(event.n));
    const draw = (/** @type {Mark} */ { x }) => {
      node.style.left = `${x}%`;
    };
    return { node, draw };
  }

  draw(/** @type {ClusterEvent[]} */ events, /** @type {number} */ now) {
    const chart = sizeChart(events, now);
    setAttribute(this.node, "hidden", chart ? null : "");
    if (!chart) return;
    const [from, to] = [timeOfDay(chart.from), timeOfDay(chart.to)];
    const sizes = `${chart.size} now, ${chart.largest} at most`;
    const label = `Size of the world from ${from} to ${to}: ${sizes}, ${plural(events.length, "event")}`;
    setAttribute(this.line, "d", chart.path);
    setAttribute(this.svg, "aria-label", label);
    setText(this.largest, String(chart.largest));
    setText(this.from, from);
    setText(this.to, to);
    this.marks.draw(
      chart.marks.map((mark) => [String(mark.event.n), mark]),
      null,
    );
  }
}
