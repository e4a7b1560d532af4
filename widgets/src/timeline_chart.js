/** The size of the world over time, with a mark for each event and a lane for each host. */
/** @import { Event as ClusterEvent } from "./contract.js" */
import { button, element, setAttribute, setText, svgElement } from "./dom.js";
import { categories, FEW_LANES, sizeChart } from "./events.js";
import { momentOf, plural } from "./format.js";
import { KeyedList } from "./keyed_list.js";
import { tone } from "./tones.js";

const MARKS = { change: "▲", failure: "✕", other: "•" };

/**
 * @typedef {{event: ClusterEvent, x: number}} Mark
 * @typedef {{host: string, spans: number[][], losses: number[]}} Lane
 */

export class TimelineChart {
  /** @param {(n: number) => void} onMarkClick called with the number of the event */
  constructor(onMarkClick) {
    this.line = svgElement("path", { "vector-effect": "non-scaling-stroke" });
    const box = { class: "nbe-steps", viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img" };
    this.svg = svgElement("svg", box, this.line);
    this.largest = element("span");
    this.from = element("time");
    this.to = element("time");
    this.rug = element("div", { class: "nbe-rug", role: "group", "aria-label": "Events on the timeline" });
    this.now = 0;
    /** @type {KeyedList<Mark, null>} */
    this.marks = new KeyedList(this.rug, (_, { event }) => this.makeMark(event, onMarkClick));
    this.rug.addEventListener("keydown", (event) => this.move(event));
    // The tab key stops once, at the mark that had the focus last.
    this.rug.addEventListener("focusin", ({ target }) => this.setTabStop(/** @type {Element} */ (target)));
    /** @type {?Element} */
    this.tabStop = null;
    this.told = element("p", { class: "nbe-note nbe-told", "aria-hidden": "true" });
    this.lanes = element("div", { class: "nbe-lanes", role: "group", "aria-label": "Hosts on the timeline" });
    /** @type {KeyedList<Lane, null>} */
    this.hosts = new KeyedList(this.lanes, (host) => makeLane(host));
    this.showsAll = false;
    this.laneCount = element("span", { class: "nbe-note" });
    this.more = button("", () => this.toggleLanes(), "nbe-small");
    this.manyLanes = element("div", { class: "nbe-bar nbe-manylanes" }, this.laneCount, this.more);
    /** @type {Lane[]} */
    this.allLanes = [];
    this.node = element(
      "div",
      { class: "nbe-chart" },
      element("span", { class: "nbe-axis", "aria-hidden": "true" }, this.largest, element("span", {}, "0")),
      element("div", { class: "nbe-plot" }, this.svg, this.rug),
      this.lanes,
      this.manyLanes,
      element("span", { class: "nbe-times", "aria-hidden": "true" }, this.from, this.to),
      this.told,
    );
  }

  makeMark(/** @type {ClusterEvent} */ event, /** @type {(n: number) => void} */ onClick) {
    const category = /** @type {keyof typeof MARKS} */ (categories(event).split(" ").pop() || "other");
    const attributes = { type: "button", tabindex: "-1", "data-kind": category, "data-tone": tone(event.kind) };
    const node = element("button", attributes, element("span", { "aria-hidden": "true" }, MARKS[category]));
    const tell = () => setText(this.told, this.describe(event));
    const draw = (/** @type {Mark} */ { x }) => {
      node.style.left = `${x}%`;
      setAttribute(node, "aria-label", this.describe(event));
    };
    node.addEventListener("click", () => onClick(event.n));
    node.addEventListener("focus", tell);
    node.addEventListener("pointerenter", tell);
    return { node, draw };
  }

  describe(/** @type {ClusterEvent} */ event) {
    return `${momentOf(event.time, this.now)} ${event.text}`;
  }

  /** The arrow keys move from mark to mark, Home and End to the first and the last. */
  move(/** @type {KeyboardEvent} */ event) {
    const marks = /** @type {HTMLElement[]} */ ([...this.rug.children]);
    const at = marks.indexOf(/** @type {HTMLElement} */ (event.target));
    const targets = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: marks.length - 1 };
    const target = targets[/** @type {keyof typeof targets} */ (event.key)];
    if (at < 0 || target === undefined) return;
    event.preventDefault();
    marks[target]?.focus();
  }

  setTabStop(/** @type {?Element} */ mark) {
    if (this.tabStop) setAttribute(this.tabStop, "tabindex", "-1");
    if (mark) setAttribute(mark, "tabindex", "0");
    this.tabStop = mark;
  }

  /** @param {ClusterEvent[]} events @param {number} now @param {number} seconds to show */
  draw(events, now, seconds) {
    this.now = now;
    const chart = sizeChart(events, now, seconds);
    setAttribute(this.node, "hidden", chart ? null : "");
    this.marks.draw(chart?.marks.map((mark) => [String(mark.event.n), mark]) ?? [], null);
    if (!chart) return;
    const [from, to] = [momentOf(chart.from, chart.to), momentOf(chart.to, chart.from)];
    const sizes = `${chart.size} now, ${chart.largest} at most`;
    const label = `Size of the world from ${from} to ${to}: ${sizes}, ${plural(chart.marks.length, "event")}`;
    setAttribute(this.line, "d", chart.path);
    setAttribute(this.svg, "aria-label", label);
    setText(this.largest, String(chart.largest));
    setText(this.from, from);
    setText(this.to, to);
    if (!this.tabStop || !this.rug.contains(this.tabStop)) this.setTabStop(this.rug.lastElementChild);
    this.allLanes = chart.lanes;
    this.drawLanes();
  }

  drawLanes() {
    const count = this.allLanes.length;
    const lanes = this.showsAll ? this.allLanes : this.allLanes.slice(0, FEW_LANES);
    this.lanes.hidden = count < 2;
    this.hosts.draw(count < 2 ? [] : lanes.map((lane) => [lane.host, lane]), null);
    this.manyLanes.hidden = count <= FEW_LANES;
    setText(this.laneCount, `${lanes.length} of ${count} hosts shown`);
    setText(this.more, this.showsAll ? "Show fewer hosts" : "Show all hosts");
    setAttribute(this.more, "aria-expanded", String(this.showsAll));
  }

  toggleLanes() {
    this.showsAll = !this.showsAll;
    this.drawLanes();
  }
}

/** A lane: when this host was up, and what was lost on it. */
function makeLane(/** @type {string} */ host) {
  const track = element("span", { class: "nbe-track" });
  const node = element("div", { class: "nbe-lane", role: "img" }, element("span", { class: "nbe-lanename" }, host), track);
  let drawn = "";
  const place = (/** @type {string} */ name, /** @type {number} */ x, /** @type {number} */ width) => {
    const part = element("i", { class: name });
    part.style.left = `${x}%`;
    if (width) part.style.width = `${width}%`;
    return part;
  };
  const draw = (/** @type {Lane} */ { spans, losses }) => {
    const face = JSON.stringify([spans, losses]);
    if (face === drawn) return;
    drawn = face;
    const up = spans.map(([start, end]) => place("nbe-up", start, end - start));
    const share = Math.round(spans.reduce((sum, [start, end]) => sum + end - start, 0));
    const now = spans.some(([, end]) => end === 100) ? "up now" : "not up now";
    setAttribute(node, "aria-label", `${host}: up for ${share} % of the time shown, ${now}, ${plural(losses.length, "failure")}`);
    track.replaceChildren(...up, ...losses.map((x) => place("nbe-loss", x, 0)));
  };
  return { node, draw };
}
