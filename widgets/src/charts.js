/** The charts of what rank 0 reported. It asks for new rows while the job makes steps. */
/** @import { Connection } from "./connection.js" */
/** @import { KeyFrame } from "./contract.js" */
/** @import { ChartContent, Colors } from "./chart.js" */
import { Chart } from "./chart.js";
import { button, element, saveFile, setAttribute, setText } from "./dom.js";
import { plural, unit } from "./format.js";
import { KeyedList } from "./keyed_list.js";
import { asCsv, isNumber, isRate, rateName, ratesOf, ReportTable, stepsOf, timesOf, valuesOf, worldChanges } from "./report_table.js";

const PERIOD = 1000; // ms between two queries
const FEW = 3; // so many charts are shown at first

export class Charts {
  constructor(/** @type {Connection} */ connection) {
    this.connection = connection;
    this.table = new ReportTable();
    this.askedAt = -Infinity;
    this.answered = ""; // the progress up to which the rows are known
    this.drawn = "";
    this.showsAll = false;
    /** @type {?[number, number]} */
    this.zoom = null;
    /** @type {?KeyFrame} */
    this.state = null;
    this.unit = element("option", { value: "step" }, "step");
    /** @type {?string} */
    this.job = null;
    this.axis = element("select", { "aria-label": "Horizontal axis" }, this.unit, element("option", { value: "time" }, "time"));
    this.axis.addEventListener("change", () => this.setZoom(null));
    this.changes = ""; // how many changes of the world there were, in words
    this.note = element("span", { class: "nbe-note" });
    this.reset = button("Reset zoom", () => this.setZoom(null), "nbe-small");
    this.more = button("", () => this.toggleAll(), "nbe-small");
    this.save = button("Save CSV", () => this.saveCsv(), "nbe-small");
    const bar = element(
      "div",
      { class: "nbe-bar" },
      element("span", { class: "nbe-title" }, "Reports"),
      element("label", {}, "by ", this.axis),
      this.note,
      element("span", { class: "nbe-gap" }),
      this.reset,
      this.more,
      this.save,
    );
    this.palette = element("i", { class: "nbe-palette", "aria-hidden": "true" });
    this.grid = element("div", { class: "nbe-chartgrid" });
    // Screen readers speak it; only keys set it.
    this.spoken = element("p", { class: "nbe-hidden", role: "status", "aria-label": "Value under the cursor" });
    this.node = element("div", { class: "nbe-charts", hidden: "" }, bar, this.palette, this.grid, this.spoken);
    const owner = {
      key: `${connection.prefix}charts`,
      onZoom: (/** @type {?[number, number]} */ range) => this.setZoom(range),
      onCursor: (/** @type {string} */ place) => setText(this.note, place || this.changes),
      point: (/** @type {?number} */ row) => {
        for (const chart of this.all()) chart.point(row);
      },
      speak: (/** @type {string} */ text) => setText(this.spoken, text),
    };
    /** @type {KeyedList<ChartContent, null>} */
    this.list = new KeyedList(this.grid, (name) => new Chart(owner, name));
    this.observer = new ResizeObserver(() => this.redraw());
    this.observer.observe(this.grid);
  }

  close() {
    this.observer.disconnect();
    this.list.draw([], null);
  }

  /** Draw the charts if anything has changed, and ask for the rows that are missing. */
  draw(/** @type {KeyFrame} */ state, /** @type {boolean} */ closed) {
    this.state = state;
    if (state.job !== this.job) {
      this.table = new ReportTable(); // a kernel that is busy answers for the new job only later
      this.zoom = null; // it was a range of the old job's steps
    }
    this.job = state.job;
    const progress = `${state.job}|${state.step}|${state.outcome}`;
    const hasReports = this.table.rows.length > 0 || Object.keys(state.report).length > 0;
    const isDue = hasReports && progress !== this.answered && performance.now() - this.askedAt >= PERIOD;
    if (!closed && state.job && isDue) this.ask(progress);
    const looks = `${this.table.version}|${this.table.rows.length}|${Object.values(this.colors())}`;
    if (looks !== this.drawn) this.redraw();
    this.drawn = looks;
    for (const chart of this.all()) chart.setNewest(newestOf(state, chart.name));
  }

  all() {
    return /** @type {Chart[]} */ ([...this.list.parts.values()]);
  }

  ask(/** @type {string} */ progress) {
    this.askedAt = performance.now();
    const { table } = this;
    const { version, rows } = table;
    this.connection.ask({ ask: "reports", version, count: rows.length }, (answer) => {
      if (answer.error !== undefined || table !== this.table) return;
      this.answered = progress;
      if (answer.version !== this.table.version && answer.start) return; // an answer for an earlier version
      if (this.table.apply(answer)) this.redraw();
    });
  }

  /** The theme's colours. A canvas does not follow the style sheet by itself. @returns {Colors} */
  colors() {
    const { color, backgroundColor, borderTopColor, outlineColor, columnRuleColor } = getComputedStyle(this.palette);
    return { text: color, line: backgroundColor, grid: borderTopColor, good: outlineColor, bad: columnRuleColor };
  }

  redraw() {
    const { state, table } = this;
    if (!state) return;
    const rows = table.shownRows(state);
    const byTime = this.axis.value === "time";
    const x = byTime ? timesOf(rows) : stepsOf(rows);
    const rate = rateName(unit(state));
    setText(this.unit, unit(state));
    const context = { x, byTime, unit: unit(state), changes: worldChanges(rows), zoom: this.zoom, colors: this.colors() };
    const columns = /** @type {[string, (number|null)[]][]} */ (table.names.map((name, i) => [name, valuesOf(rows, i)]));
    columns.splice(FEW - 1, 0, [rate, ratesOf(rows)]);
    const all = columns.filter(([name, y], i) => y.filter(isNumber).length > 1 && columns.findIndex(([n]) => n === name) === i);
    const shown = this.showsAll ? all : all.slice(0, FEW);
    this.node.hidden = !all.some(([name]) => name !== rate);
    if (this.node.hidden) return;
    this.list.draw(
      shown.map(([name, y]) => [name, { ...context, y }]),
      null,
    );
    const n = context.changes.length;
    const before = this.changes;
    this.changes = n ? `${plural(n, "change")} of the world` : "";
    if (this.note.textContent === before) setText(this.note, this.changes);
    this.reset.hidden = this.zoom === null;
    this.more.hidden = all.length <= FEW;
    setText(this.more, this.showsAll ? "Show fewer" : `Show all ${all.length}`);
    setAttribute(this.more, "aria-expanded", String(this.showsAll));
  }

  setZoom(/** @type {?[number, number]} */ zoom) {
    this.zoom = zoom;
    this.redraw();
  }

  toggleAll() {
    this.showsAll = !this.showsAll;
    this.redraw();
  }

  saveCsv() {
    const { names, rows } = this.table;
    saveFile(`${this.state?.job ?? "reports"}.csv`, asCsv(names, rows), "text/csv", this.connection.timers);
  }
}

/** The newest value of a name, as the overview shows it: a row may be the mean of many reports. */
const newestOf = (/** @type {KeyFrame} */ state, /** @type {string} */ name) =>
  (Object.hasOwn(state.report, name) ? state.report[name] : null) ?? (isRate(name) ? state.steps_per_second : null);
