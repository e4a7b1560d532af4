/** The chart of one value over the whole job. */
/** @import { WorldChange } from "./report_table.js" */
import uPlot from "uplot";
import { button, element, setAttribute, setText } from "./dom.js";
import { dateAndTime, HUGE, number, reported, timeOfDay } from "./format.js";
import { ACROSS, isShortcut, movedBy, PAGES } from "./keys.js";
import { isNumber, isRate } from "./report_table.js";

const HEIGHT = 150; // CSS pixels
const FONT = "11px system-ui, sans-serif";
const MIN_LABEL_DISTANCE = 26; // CSS pixels between the labels of two changes of the world
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }); // 12.5K
const MIN_ZOOM = 6; // CSS pixels; a shorter drag is a click
const NOWHERE = { left: -10, top: -10 };
const FEWEST = 3; // the keyboard zooms in no further than to so many rows
/** @type {Record<string, number>} by how much a key changes the range that is shown */
const ZOOMS = { "+": 0.5, "=": 0.5, "-": 2, _: 2 };
const [MINUTE, HOUR, DAY] = [60, 3600, 86_400];
const SIXTIETHS = [1, 2, 3, 5, 10, 15, 20, 30];
const DAYS = [1, 2, 3, 4, 5, 7, 10, 15, 30, 60, 90, 180].map((n) => n * DAY);
// Each is at most twice the one before, so that an axis has at least two labels.
const TIME_STEPS = [...SIXTIETHS, ...SIXTIETHS.map((n) => n * MINUTE), ...[1, 2, 3, 4, 6, 8, 12].map((n) => n * HOUR), ...DAYS];

/**
 * `x`: steps or commits, as `unit` says, or seconds since 1970 if `byTime`. `changes`: where the world changed. `zoom`: the range of `x` that is shown.
 * @typedef {{x: number[], y: (number|null)[], byTime: boolean, unit: string, changes: WorldChange[], zoom: ?[number, number],
 *   colors: Colors}} ChartContent
 * @typedef {{line: string, text: string, grid: string, good: string, bad: string}} Colors
 * @typedef {{key: string, onZoom(range: ?[number, number]): void, onCursor(place: string): void,
 *   point(row: ?number): void, speak(text: string): void}} ChartOwner
 */

export class Chart {
  constructor(/** @type {ChartOwner} */ owner, /** @type {string} */ name) {
    this.owner = owner;
    this.name = name;
    this.text = isRate(name) ? number : reported;
    this.value = element("b");
    const label = `Logarithmic scale of ${name}`;
    this.log = button("log", () => this.setLog(!this.isLog), "nbe-small nbe-toggle", label);
    this.isLog = false;
    setAttribute(this.log, "aria-pressed", "false");
    const head = element(
      "div",
      { class: "nbe-charthead" },
      element("span", { class: "nbe-chartname" }, name),
      this.value,
      element("span", { class: "nbe-gap" }),
      this.log,
    );
    this.box = element("div", { class: "nbe-chartbox", role: "img" });
    const keys = `Chart of ${name}: the arrow keys read it, plus and minus zoom, Escape shows all`;
    const role = { role: "application", "aria-roledescription": "chart", "aria-label": keys, tabindex: "0" };
    this.reader = element("div", { class: "nbe-chartreader", ...role }, this.box);
    this.reader.addEventListener("keydown", (event) => this.onKey(event));
    this.reader.addEventListener("blur", () => this.owner.point(null));
    this.node = element("figure", { class: "nbe-figure" }, head, this.reader);
    /** @type {number|string|null|undefined} the state's own value, which is newer than the rows */
    this.newest = null;
    /** @type {?uPlot} */
    this.plot = null;
    this.kind = ""; // what the plot was made for: another kind needs another plot
    /** @type {?ChartContent} */
    this.content = null;
  }

  draw(/** @type {ChartContent} */ content) {
    this.content = content;
    const width = this.box.clientWidth;
    if (!width) return;
    const kind = `${content.byTime}|${this.isLog}|${Object.values(content.colors)}`;
    if (kind !== this.kind) this.close();
    this.kind = kind;
    const y = this.isLog ? content.y.map((value) => (value !== null && value > 0 ? value : null)) : content.y;
    const data = /** @type {uPlot.AlignedData} */ ([content.x, y]);
    if (!this.plot) this.plot = new uPlot(this.options(content, width), data, this.box);
    else this.plot.setData(data, false);
    if (this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
    const [min, max] = shownRange(content);
    this.plot.setScale("x", { min, max: max > min ? max : min + 1 });
    this.describe(content);
    this.showNewest();
  }

  close() {
    this.plot?.destroy();
    this.plot = null;
  }

  setLog(/** @type {boolean} */ isLog) {
    this.isLog = isLog;
    setAttribute(this.log, "aria-pressed", String(isLog));
    if (this.content) this.draw(this.content);
  }

  /** For screen readers, which cannot read a canvas. */
  describe(/** @type {ChartContent} */ { x, y, byTime, unit }) {
    const known = y.filter(isNumber);
    const at = (/** @type {number} */ value) => xText(value, byTime, unit);
    const range = `lowest ${number(Math.min(...known))}, highest ${number(Math.max(...known))}`;
    const ends = `from ${number(known[0])} to ${number(known[known.length - 1])}`;
    setAttribute(this.box, "aria-label", `${this.name} ${ends}, ${at(x[0])} to ${at(x[x.length - 1])}, ${range}`);
  }

  setNewest(/** @type {number|string|null|undefined} */ value) {
    this.newest = value;
    this.showNewest();
  }

  /** Show the value that the overview shows too, unless the cursor is somewhere. */
  showNewest() {
    if (!this.content || isNumber(this.plot?.cursor.idx)) return;
    const value = this.newest ?? this.content.y.findLast(isNumber);
    setText(this.value, value === null || value === undefined ? "–" : this.text(value));
  }

  /** Show the value below the pointer, which may be above another chart. */
  showCursor(/** @type {uPlot} */ plot) {
    const { content } = this;
    const i = plot.cursor.idx;
    if (!content) return;
    if (!isNumber(i)) {
      this.owner.onCursor("");
      return this.showNewest();
    }
    const y = content.y[i];
    setText(this.value, isNumber(y) ? this.text(y) : "–");
    this.owner.onCursor(this.placeName(plot, content, i));
  }

  /** `step 150 · world of 3, was 4` */
  placeName(/** @type {uPlot} */ plot, /** @type {ChartContent} */ { x, byTime, unit, changes }, /** @type {number} */ i) {
    const near = changes.find((change) => Math.abs(this.placeOf(plot, change) - plot.valToPos(x[i], "x")) < 4);
    return `${xText(x[i], byTime, unit)}${near ? ` · world of ${near.size}, was ${near.before}` : ""}`;
  }

  /** The arrow keys read the chart as the pointer does, and a screen reader speaks what they find. */
  onKey(/** @type {KeyboardEvent} */ event) {
    const { content, plot } = this;
    if (!content || !plot || isShortcut(event)) return;
    const [min, max] = shownRange(content);
    const [first, last] = [content.x.findIndex((x) => x >= min), content.x.findLastIndex((x) => x <= max)];
    const at = plot.cursor.idx;
    const start = event.key === "ArrowRight" || event.key === "PageDown" ? first - 1 : last + 1;
    const next = movedBy({ ...ACROSS, ...PAGES }, event.key, at ?? start, first, last);
    const factor = ZOOMS[event.key];
    if (event.key === "Escape") this.owner.onZoom(null);
    else if (factor) this.zoomBy(content, factor, at ?? (first + last) >> 1);
    else if (next !== null) this.moveTo(next);
    else return;
    event.preventDefault();
  }

  /** Set the cursor to this row, or to none. */
  point(/** @type {?number} */ row) {
    const { content, plot } = this;
    if (content && plot) plot.setCursor(row === null ? NOWHERE : { left: plot.valToPos(content.x[row], "x"), top: HEIGHT / 4 });
  }

  /** Set the cursor of all charts, and speak this chart's value there. */
  moveTo(/** @type {number} */ row, before = "") {
    this.owner.point(row);
    const { content, plot } = this;
    if (content && plot) this.owner.speak(`${before}${this.name} ${this.value.textContent}, ${this.placeName(plot, content, row)}`);
  }

  /** Zoom around the row `center`, and keep the cursor there. */
  zoomBy(/** @type {ChartContent} */ content, /** @type {number} */ factor, /** @type {number} */ center) {
    const { x, byTime, unit } = content;
    const [min, max] = shownRange(content);
    const from = Math.max(x[0], x[center] - (x[center] - min) * factor);
    const to = Math.min(x[x.length - 1], x[center] + (max - x[center]) * factor);
    if (x.filter((value) => value >= from && value <= to).length < FEWEST) return;
    const isAll = from === x[0] && to === x[x.length - 1];
    const range = isAll ? `all ${byTime ? "the time" : `${unit}s`}` : `${xText(Math.round(from), byTime, unit)} to ${xText(Math.round(to), byTime, unit)}`;
    const hasCursor = isNumber(this.plot?.cursor.idx);
    this.owner.onZoom(isAll ? null : [from, to]);
    this.owner.speak(range);
    if (hasCursor) queueMicrotask(() => this.moveTo(center, `${range}: `)); // uPlot sets its scale in a microtask too
  }

  placeOf(/** @type {uPlot} */ plot, /** @type {WorldChange} */ change, isCanvas = false) {
    return plot.valToPos(this.content?.byTime ? change.time : change.step, "x", isCanvas);
  }

  /** @returns {uPlot.Options} */
  options(/** @type {ChartContent} */ { byTime, colors }, /** @type {number} */ width) {
    const axis = { stroke: colors.text, font: FONT, ticks: { show: false }, grid: { stroke: colors.grid, width: 1 } };
    const clock = (/** @type {uPlot} */ plot, /** @type {number[]} */ splits) => {
      const { min, max } = plot.scales.x;
      const isLong = (max ?? 0) - (min ?? 0) > DAY;
      return splits.map((x) => (isLong ? dateAndTime(x).slice(5, 16) : timeOfDay(x)));
    };
    const numbers = (/** @type {uPlot} */ _, /** @type {(number|null)[]} */ splits) =>
      splits.map((x) => (x === null ? "" : compact(x)));
    const across = byTime ? { space: timeSpace, incrs: TIME_STEPS, values: clock } : { space: 40, values: numbers };
    const reset = () => () => {
      this.owner.onZoom(null);
      return null;
    };
    return {
      width,
      height: HEIGHT,
      padding: [14, 14, 0, 0],
      legend: { show: false },
      scales: { x: { time: byTime, auto: false }, y: { distr: this.isLog ? 3 : 1 } },
      axes: [
        { ...axis, size: 22, gap: 3, ...across, grid: { show: false } },
        { ...axis, size: 42, gap: 4, space: 26, values: numbers },
      ],
      series: [{}, { stroke: colors.line, width: 1.5, points: { size: 4 } }],
      cursor: {
        y: false,
        sync: { key: this.owner.key },
        drag: { x: true, y: false, setScale: false },
        bind: { dblclick: reset },
      },
      hooks: {
        setCursor: [(plot) => this.showCursor(plot)],
        setSelect: [(plot) => this.zoom(plot)],
        draw: [(plot) => this.drawChanges(plot)],
      },
    };
  }

  zoom(/** @type {uPlot} */ plot) {
    const { left, width } = plot.select;
    if (!width) return;
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    if (width >= MIN_ZOOM) this.owner.onZoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
  }

  /** A line where the world changed, with its new size. */
  drawChanges(/** @type {uPlot} */ plot) {
    if (!this.content) return;
    const { changes, colors } = this.content;
    const { ctx, bbox } = plot;
    const ratio = uPlot.pxRatio;
    let lastLabel = -Infinity;
    ctx.save();
    ctx.lineWidth = ratio;
    ctx.setLineDash([3 * ratio, 3 * ratio]);
    ctx.font = `${10 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "center";
    ctx.textBaseline = "bottom";
    for (const change of changes) {
      const x = Math.round(this.placeOf(plot, change, true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      const { size, before } = change;
      ctx.strokeStyle = ctx.fillStyle = size === before ? colors.text : size < before ? colors.bad : colors.good;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      if (size === before || x - lastLabel < MIN_LABEL_DISTANCE * ratio) continue;
      lastLabel = x;
      ctx.fillText(`${before}→${size}`, x, bbox.top - ratio);
    }
    ctx.restore();
  }
}

/** @returns {[number, number]} */
const shownRange = (/** @type {ChartContent} */ { x, zoom }) => zoom ?? [x[0], x[x.length - 1]];

/** `12.5K`, or `1e17` where there is no letter. */
const compact = (/** @type {number} */ x) =>
  Math.abs(x) < 10_000 || Math.abs(x) >= HUGE ? number(x).replace("e+", "e") : COMPACT.format(x);

/** `step 150`, or a date and time. */
const xText = (/** @type {number} */ value, /** @type {boolean} */ byTime, /** @type {string} */ unit) =>
  byTime ? dateAndTime(value) : `${unit} ${number(value)}`;

/** The room that a label of the time needs; of more than a day it has the date. */
const timeSpace = (/** @type {uPlot} */ _, /** @type {number} */ _axis, /** @type {number} */ min, /** @type {number} */ max) =>
  max - min > DAY ? 70 : 54;
