/** The chart of one value over the whole job. */
/** @import { WorldChange } from "./report_table.js" */
import uPlot from "uplot";
import { button, element, setAttribute, setText } from "./dom.js";
import { dateAndTime, number, reported, timeOfDay } from "./format.js";
import { isNumber, isRate } from "./report_table.js";

const HEIGHT = 150; // CSS pixels
const FONT = "11px system-ui, sans-serif";
const MIN_LABEL_DISTANCE = 26; // CSS pixels between the labels of two changes of the world
const COMPACT = new Intl.NumberFormat("en", { notation: "compact" }); // 20K
const MIN_ZOOM = 6; // CSS pixels; a shorter drag is a click

/**
 * `x`: steps or commits, as `unit` says, or seconds since 1970 if `byTime`. `changes`: where the world changed. `zoom`: the range of `x` that is shown.
 * @typedef {{x: number[], y: (number|null)[], byTime: boolean, unit: string, changes: WorldChange[], zoom: ?[number, number],
 *   colors: Colors}} ChartContent
 * @typedef {{line: string, text: string, grid: string, good: string, bad: string}} Colors
 * @typedef {{key: string, onZoom(range: ?[number, number]): void, onCursor(place: string): void}} ChartOwner
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
    this.node = element("figure", { class: "nbe-figure" }, head, this.box);
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
    const [min, max] = content.zoom ?? [content.x[0], content.x[content.x.length - 1]];
    this.plot.setScale("x", { min, max: max > min ? max : min + 1 });
    this.describe(content);
    if (this.plot.cursor.idx === null || this.plot.cursor.idx === undefined) this.showNewest(content);
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
    const at = (/** @type {number} */ value) => (byTime ? dateAndTime(value) : `${unit} ${number(value)}`);
    const range = `lowest ${number(Math.min(...known))}, highest ${number(Math.max(...known))}`;
    const ends = `from ${number(known[0])} to ${number(known[known.length - 1])}`;
    setAttribute(this.box, "aria-label", `${this.name} ${ends}, ${at(x[0])} to ${at(x[x.length - 1])}, ${range}`);
  }

  showNewest(/** @type {ChartContent} */ { y }) {
    const known = y.filter(isNumber);
    setText(this.value, this.text(known[known.length - 1]));
  }

  /** Show the value below the pointer, which may be above another chart. */
  showCursor(/** @type {uPlot} */ plot) {
    const { content } = this;
    const i = plot.cursor.idx;
    if (!content) return;
    if (i === null || i === undefined) {
      this.owner.onCursor("");
      return this.showNewest(content);
    }
    const [x, y] = [content.x[i], content.y[i]];
    setText(this.value, y === null || y === undefined ? "–" : this.text(y));
    const near = content.changes.find((change) => Math.abs(this.placeOf(plot, change) - plot.valToPos(x, "x")) < 4);
    const world = near ? ` · world of ${near.size}, was ${near.before}` : "";
    this.owner.onCursor(`${content.byTime ? dateAndTime(x) : `${content.unit} ${number(x)}`}${world}`);
  }

  placeOf(/** @type {uPlot} */ plot, /** @type {WorldChange} */ change, isCanvas = false) {
    return plot.valToPos(this.content?.byTime ? change.time : change.step, "x", isCanvas);
  }

  /** @returns {uPlot.Options} */
  options(/** @type {ChartContent} */ { byTime, colors }, /** @type {number} */ width) {
    const axis = { stroke: colors.text, font: FONT, ticks: { show: false }, grid: { stroke: colors.grid, width: 1 } };
    const clock = (/** @type {uPlot} */ plot, /** @type {number[]} */ splits) => {
      const { min, max } = plot.scales.x;
      const isLong = (max ?? 0) - (min ?? 0) > 86_400;
      return splits.map((x) => (isLong ? dateAndTime(x).slice(5, 16) : timeOfDay(x)));
    };
    const numbers = (/** @type {uPlot} */ _, /** @type {(number|null)[]} */ splits) =>
      splits.map((x) => (x === null ? "" : Math.abs(x) < 10_000 ? number(x) : COMPACT.format(x)));
    const reset = () => () => (this.owner.onZoom(null), null);
    return {
      width,
      height: HEIGHT,
      padding: [14, 14, 0, 0],
      legend: { show: false },
      scales: { x: { time: byTime, auto: false }, y: { distr: this.isLog ? 3 : 1 } },
      axes: [
        { ...axis, size: 22, gap: 3, space: byTime ? 80 : 60, values: byTime ? clock : numbers, grid: { show: false } },
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
