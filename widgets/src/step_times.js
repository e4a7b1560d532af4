/** The panel *Step times*: how long each rank's steps take without waiting for others, as a heat map. */
/** @import { Connection } from "./connection.js" */
/** @import { KeyFrame, StepTimesAnswer } from "./contract.js" */
import { element, setAttribute, setText } from "./dom.js";
import { duration, milliseconds, plural, timeOfDay } from "./format.js";
import { ACROSS, isShortcut, movedBy, PAGES } from "./keys.js";

const PERIOD = 5000; // ms between two queries
const [LOWEST, HIGHEST, TALLEST] = [3, 16, 400]; // CSS pixels: of a row, and of all rows
const [NARROWEST, WIDEST] = [4, 14]; // CSS pixels of a column
const LABELS = 34; // CSS pixels for the ranks' numbers, which low rows do not have
const LABEL_HEIGHT = 10;
const SLOW = 1.25; // times the median of the other ranks,
const LEAST = 5; // and so many ms more
const SLOWEST = 4; // so many times have the full colour
const DOWN = { ArrowUp: -1, ArrowDown: 1, ...PAGES };
const NONE = "No times yet. They come every 5 s while a job commits, and are measured on CPUs only.";

/**
 * `first`: the first column that is shown.
 * @typedef {{left: number, first: number, width: number, height: number}} Grid
 * @typedef {{rank: number, column: number}} Cell
 */

const known = (/** @type {(number|null)[]} */ values) => /** @type {number[]} */ (values.filter((x) => x !== null));

/** The times of each column in order. @param {StepTimesAnswer["rows"]} rows @returns {number[][]} */
export function sortedColumns(rows) {
  const columns = rows[0]?.[1].length ?? 0;
  return [...Array(columns).keys()].map((i) => known(rows.map(([, times]) => times[i])).sort((a, b) => a - b));
}

/** The median of the ranks without the one of this time; null if it is the only one. @param {number[]} sorted @param {number} time */
export function medianOfOthers(sorted, time) {
  const count = sorted.length - 1;
  if (count < 1) return null;
  const other = (/** @type {number} */ i) => (time <= sorted[i] ? sorted[i + 1] : sorted[i]);
  return (other((count - 1) >> 1) + other(count >> 1)) / 2;
}

/** How slow a rank is: 0 if it is about as fast as the others, 1 from four times their time on. @param {number} time @param {?number} median */
export function slowness(time, median) {
  if (median === null || time < median * SLOW || time < median + LEAST) return 0;
  return median > 0 ? Math.min(1, Math.log2(time / median) / Math.log2(SLOWEST)) : 1;
}

export class StepTimes {
  constructor(/** @type {Connection} */ connection) {
    this.connection = connection;
    this.isOpen = this.closed = this.asking = false;
    /** @type {?KeyFrame} */
    this.state = null;
    this.askedAt = -Infinity;
    this.known = ""; // the job whose times are shown, and how it ended
    this.drawn = "";
    /** @type {StepTimesAnswer} */
    this.answer = { span: 1, end: 0, rows: [], texts: {} };
    /** @type {number[][]} */
    this.columns = [];
    /** @type {Grid} */
    this.grid = { left: 0, first: 0, width: 1, height: 1 };
    this.note = element("span", { class: "nbe-note" }, NONE);
    this.canvas = element("canvas");
    this.palette = element("i", { class: "nbe-palette", "aria-hidden": "true" });
    /** @type {?Cell} below the pointer, or reached by the arrow keys */
    this.cell = null;
    this.frame = element("i", { class: "nbe-cell", hidden: "" });
    this.picture = element("div", { role: "img" }, this.canvas, this.frame);
    const keys = "Heat map of step times: the arrow keys read it";
    const role = { role: "application", "aria-roledescription": "heat map", "aria-label": keys, tabindex: "0" };
    this.box = element("div", { class: "nbe-heat", ...role, hidden: "" }, this.picture);
    // Screen readers speak it; only keys set it.
    this.spoken = element("p", { class: "nbe-hidden", role: "status", "aria-label": "Time under the cursor" });
    this.slow = element("ul");
    this.node = element("div", {}, element("div", { class: "nbe-bar" }, this.note), this.palette, this.box, this.slow, this.spoken);
    this.canvas.addEventListener("pointermove", (event) => this.point(this.cellAt(event)));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.box.addEventListener("keydown", (event) => this.onKey(event));
    this.box.addEventListener("blur", () => this.point(null));
  }

  open() {
    this.isOpen = true;
    this.known = "";
    if (this.state) this.draw(this.state, this.closed);
  }

  close() {
    this.isOpen = false;
  }

  /** Called once per second, and at each change. */
  draw(/** @type {KeyFrame} */ state, /** @type {boolean} */ closed) {
    this.state = state;
    this.closed = closed;
    if (!this.isOpen) return;
    const job = `${state.job}|${state.outcome}`;
    const isDue = job !== this.known || (state.job && !state.outcome && performance.now() - this.askedAt >= PERIOD);
    if (isDue && !closed && !this.asking) this.ask(job);
    const looks = `${this.picture.clientWidth}|${window.devicePixelRatio}|${Object.values(this.colors())}`;
    if (looks !== this.drawn) {
      this.paint();
      this.point(this.cell);
    }
    this.drawn = looks;
  }

  ask(/** @type {string} */ job) {
    this.askedAt = performance.now();
    this.asking = true;
    this.connection.ask({ ask: "step_times" }, (answer) => {
      this.asking = false;
      if (answer.error !== undefined) return setText(this.note, answer.error);
      this.known = job;
      this.answer = answer;
      this.columns = sortedColumns(answer.rows);
      this.paint();
      this.point(this.cell);
      const texts = Object.entries(answer.texts).map(([rank, text]) => element("li", {}, `rank ${rank} ${text}`));
      this.slow.replaceChildren(...texts);
    });
  }

  colors() {
    const { color, backgroundColor, columnRuleColor } = getComputedStyle(this.palette);
    return { text: color, usual: backgroundColor, slow: columnRuleColor };
  }

  paint() {
    const { rows } = this.answer;
    const columns = this.columns.length;
    this.box.hidden = !columns; // a hidden box has no width
    const height = Math.max(LOWEST, Math.min(HIGHEST, Math.floor(TALLEST / Math.max(1, rows.length))));
    const left = height >= LABEL_HEIGHT ? LABELS : 0;
    const room = this.picture.clientWidth - left;
    if (!columns || room <= 0) return;
    const width = Math.max(NARROWEST, Math.min(WIDEST, Math.floor(room / columns)));
    const shown = Math.min(columns, Math.floor(room / width));
    this.grid = { left, first: columns - shown, width, height };
    const ratio = window.devicePixelRatio || 1;
    const size = { width: left + shown * width, height: rows.length * height };
    Object.assign(this.canvas, { width: size.width * ratio, height: size.height * ratio });
    Object.assign(this.canvas.style, { width: `${size.width}px`, height: `${size.height}px` });
    const pen = this.canvas.getContext("2d");
    if (!pen) return;
    pen.scale(ratio, ratio);
    const colors = this.colors();
    for (const [rank, [, times]] of rows.entries()) this.paintRow(pen, times, rank, colors);
  }

  /** @param {CanvasRenderingContext2D} pen @param {(number|null)[]} times @param {number} rank @param {Record<string, string>} colors */
  paintRow(pen, times, rank, colors) {
    const { left, first, width, height } = this.grid;
    const gap = height >= LABEL_HEIGHT ? 1 : 0;
    for (let i = first; i < times.length; i++) {
      const time = times[i];
      if (time === null) continue;
      const slow = slowness(time, medianOfOthers(this.columns[i], time));
      pen.fillStyle = slow ? colors.slow : colors.usual;
      pen.globalAlpha = slow ? 0.4 + 0.6 * slow : 0.25;
      pen.fillRect(left + (i - first) * width, rank * height, width - gap, height - gap);
    }
    if (!left) return;
    pen.globalAlpha = 1;
    pen.fillStyle = colors.text;
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    pen.fillText(String(rank), left - 6, (rank + 0.5) * height);
  }

  /** @param {PointerEvent} event @returns {?Cell} */
  cellAt(event) {
    const { left, first, width, height } = this.grid;
    const cell = { rank: Math.floor(event.offsetY / height), column: first + Math.floor((event.offsetX - left) / width) };
    return event.offsetX < left || this.timeOf(cell) === null ? null : cell;
  }

  /** The arrow keys move from cell to cell, and begin at the newest time of rank 0. Escape leaves the cells. */
  onKey(/** @type {KeyboardEvent} */ event) {
    const { cell, grid } = this;
    const [lastRank, lastColumn] = [this.answer.rows.length - 1, this.columns.length - 1];
    const start = { rank: 0, column: lastColumn };
    const rank = movedBy(DOWN, event.key, (cell ?? start).rank, 0, lastRank);
    const column = movedBy(ACROSS, event.key, (cell ?? start).column, grid.first, lastColumn);
    if (isShortcut(event) || (rank === null && column === null && event.key !== "Escape")) return;
    event.preventDefault();
    if (event.key === "Escape") return this.point(null);
    const next = { rank: rank ?? cell?.rank ?? 0, column: column ?? cell?.column ?? lastColumn };
    this.point(cell ? next : start);
    setText(this.spoken, this.note.textContent ?? "");
  }

  /** @param {Cell} cell @returns {?number} */
  timeOf({ rank, column }) {
    return this.answer.rows[rank]?.[1][column] ?? null;
  }

  /** Frame this cell and say what is in it, or sum up all. */
  point(/** @type {?Cell} */ cell) {
    const { rows, end, span } = this.answer;
    this.cell = cell && rows[cell.rank] && cell.column < this.columns.length ? cell : null;
    this.frame.hidden = !this.cell;
    if (!this.cell) return this.summarize();
    const { left, first, width, height } = this.grid;
    const { rank, column } = this.cell;
    const place = { left: left + (column - first) * width, top: rank * height, width, height };
    for (const [name, value] of Object.entries(place)) this.frame.style.setProperty(name, `${value}px`);
    const time = this.timeOf(this.cell);
    const text = time === null ? "no time" : `${milliseconds(time)} per step${this.comparison(column, time)}`;
    setText(this.note, `${timeOfDay(end - (this.columns.length - column) * span)}: rank ${rank} (${rows[rank][0]}) ${text}`);
  }

  comparison(/** @type {number} */ column, /** @type {number} */ time) {
    const median = medianOfOthers(this.columns[column], time);
    return median === null ? "" : `, the median of the others is ${milliseconds(median)}`;
  }

  summarize() {
    const { rows, span } = this.answer;
    const last = this.columns.length - 1;
    if (last < 0) return setText(this.note, NONE);
    const newest = rows.map(([, times]) => times[last]);
    const most = Math.max(...known(newest));
    const seconds = (this.columns.length - this.grid.first) * span;
    const text =
      `Time per step in which a rank does not wait for others, ${plural(rows.length, "rank")} over ${duration(seconds)}. ` +
      `Now the slowest is rank ${newest.indexOf(most)} with ${milliseconds(most)}${this.comparison(last, most)}.`;
    setText(this.note, text);
    setAttribute(this.picture, "aria-label", text);
  }
}
