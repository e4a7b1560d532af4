/** The panel *Step times*: how long each rank's steps take without waiting for others, as a heat map. */
/** @import { Connection } from "./connection.js" */
/** @import { StepTimesAnswer } from "./contract.js" */
import { element, setAttribute, setText } from "./dom.js";
import { duration, milliseconds, plural, timeOfDay } from "./format.js";

const PERIOD = 5000; // ms between two queries
const [LOWEST, HIGHEST, TALLEST] = [3, 16, 400]; // CSS pixels: of a row, and of all rows
const [NARROWEST, WIDEST] = [4, 14]; // CSS pixels of a column
const LABELS = 34; // CSS pixels for the ranks' numbers, which low rows do not have
const LABEL_HEIGHT = 10;
const SLOW = 1.25; // times the median of the ranks
const SLOWEST = 4; // so many times have the full colour

/** @typedef {{left: number, first: number, width: number, height: number}} Grid `first`: the first column that is shown */

const known = (/** @type {(number|null)[]} */ values) => /** @type {number[]} */ (values.filter((x) => x !== null));

/** The median of each column. @param {StepTimesAnswer["rows"]} rows @returns {(number|null)[]} */
export function mediansOf(rows) {
  const columns = rows[0]?.[1].length ?? 0;
  return [...Array(columns).keys()].map((i) => {
    const sorted = known(rows.map(([, times]) => times[i])).sort((a, b) => a - b);
    return sorted.length ? (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2 : null;
  });
}

export class StepTimes {
  constructor(/** @type {Connection} */ connection) {
    this.connection = connection;
    this.isOpen = this.closed = false;
    this.askedAt = -Infinity;
    this.drawn = "";
    /** @type {StepTimesAnswer} */
    this.answer = { span: 1, end: 0, rows: [], texts: {} };
    /** @type {(number|null)[]} */
    this.medians = [];
    /** @type {Grid} */
    this.grid = { left: 0, first: 0, width: 1, height: 1 };
    this.note = element("span", { class: "nbe-note" });
    this.canvas = element("canvas");
    this.palette = element("i", { class: "nbe-palette", "aria-hidden": "true" });
    this.box = element("div", { class: "nbe-heat", role: "img" }, this.canvas);
    this.slow = element("ul");
    this.node = element("div", {}, element("div", { class: "nbe-bar" }, this.note), this.palette, this.box, this.slow);
    this.canvas.addEventListener("pointermove", (event) => this.tell(event));
    this.canvas.addEventListener("pointerleave", () => this.summarize());
  }

  open() {
    this.isOpen = true;
    this.askedAt = -Infinity;
    this.draw(this.closed);
  }

  close() {
    this.isOpen = false;
  }

  /** Called once per second, and at each change. */
  draw(/** @type {boolean} */ closed) {
    this.closed = closed;
    if (!this.isOpen) return;
    if (!closed && Date.now() - this.askedAt >= PERIOD) this.ask();
    const looks = `${this.box.clientWidth}|${Object.values(this.colors())}`;
    if (looks !== this.drawn) this.paint();
    this.drawn = looks;
  }

  ask() {
    this.askedAt = Date.now();
    this.connection.ask({ ask: "step_times" }, (answer) => {
      if (answer.error !== undefined) return;
      this.answer = answer;
      this.medians = mediansOf(answer.rows);
      this.paint();
      this.summarize();
      this.slow.replaceChildren(...Object.entries(answer.texts).map(([rank, text]) => element("li", {}, `rank ${rank} ${text}`)));
    });
  }

  colors() {
    const { color, backgroundColor, columnRuleColor } = getComputedStyle(this.palette);
    return { text: color, usual: backgroundColor, slow: columnRuleColor };
  }

  paint() {
    const { rows } = this.answer;
    const columns = this.medians.length;
    this.box.hidden = !columns; // a hidden box has no width
    const height = Math.max(LOWEST, Math.min(HIGHEST, Math.floor(TALLEST / Math.max(1, rows.length))));
    const left = height >= LABEL_HEIGHT ? LABELS : 0;
    const room = this.box.clientWidth - left;
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
    rows.forEach(([, times], rank) => this.paintRow(pen, times, rank));
  }

  paintRow(/** @type {CanvasRenderingContext2D} */ pen, /** @type {(number|null)[]} */ times, /** @type {number} */ rank) {
    const { left, first, width, height } = this.grid;
    const colors = this.colors();
    const gap = height >= LABEL_HEIGHT ? 1 : 0;
    for (let i = first; i < times.length; i++) {
      const [time, median] = [times[i], this.medians[i]];
      if (time === null || median === null) continue;
      const slower = median > 0 ? time / median : 1;
      const strength = Math.min(1, Math.log2(Math.max(1, slower)) / Math.log2(SLOWEST));
      pen.fillStyle = slower < SLOW ? colors.usual : colors.slow;
      pen.globalAlpha = slower < SLOW ? 0.3 : 0.35 + 0.65 * strength;
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

  /** Say what is below the pointer. */
  tell(/** @type {PointerEvent} */ event) {
    const { left, first, width, height } = this.grid;
    const { rows, end, span } = this.answer;
    const rank = Math.floor(event.offsetY / height);
    const column = first + Math.floor((event.offsetX - left) / width);
    const [worker, times] = rows[rank] ?? ["", []];
    const time = times[column];
    const median = this.medians[column];
    if (time === null || time === undefined || median === null || median === undefined) return this.summarize();
    const at = timeOfDay(end - (times.length - column) * span);
    setText(this.note, `${at}: rank ${rank} (${worker}) ${milliseconds(time)} per step, median ${milliseconds(median)}`);
  }

  summarize() {
    const { rows, span } = this.answer;
    const text = this.medians.length
      ? `Time per step in which a rank does not wait for others, ${plural(rows.length, "rank")} over ${duration(this.medians.length * span)}. ${this.slowest()}`
      : "No times yet. They come every 5 s while a job commits, and are measured on CPUs only.";
    setText(this.note, text);
    setAttribute(this.box, "aria-label", text);
  }

  slowest() {
    const { rows } = this.answer;
    const last = this.medians.findLastIndex((median) => median !== null);
    const newest = rows.map(([, times]) => times[last]);
    const most = Math.max(...known(newest));
    const rank = newest.indexOf(most);
    return `Now the slowest is rank ${rank} with ${milliseconds(most)}, the median is ${milliseconds(this.medians[last] ?? 0)}.`;
  }
}
