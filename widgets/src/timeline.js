/** The panel *Timeline*: the chart of the world's size and the list of events. */
/** @import { Connection } from "./connection.js" */
/** @import { Event as ClusterEvent, KeyFrame } from "./contract.js" */
import { button, element, highlight, saveFile, setAttribute, setDisabled, setText } from "./dom.js";
import { EventItem } from "./event_item.js";
import { categories, firstAfterGap, withoutRepeats } from "./events.js";
import { KeyedList } from "./keyed_list.js";
import { TimelineChart } from "./timeline_chart.js";

const MAX_EVENTS = 4000; // a view may be open for weeks
const TRACE_TIMEOUT = 30_000; // ms

export class Timeline {
  constructor(/** @type {Connection} */ connection) {
    this.connection = connection;
    /** @type {Map<number, ClusterEvent>} */
    this.byNumber = new Map();
    /** @type {ClusterEvent[]} oldest first */
    this.events = [];
    this.driver = ""; // whose events these are
    this.oldest = 0; // the number of the oldest event that the kernel has; 0: not asked yet
    this.now = 0;
    this.isOpen = false;
    this.closed = false;
    this.chart = new TimelineChart((n) => this.reveal(n));
    const options = Object.entries({ all: "all", change: "changes", failure: "failures" });
    this.filter = element("select", {}, ...options.map(([value, text]) => element("option", { value }, text)));
    this.filter.addEventListener("change", () => this.show());
    const spans = Object.entries({ Infinity: "all the time", 86400: "the last day", 3600: "the last hour", 600: "the last 10 min" });
    spans.sort(([a], [b]) => Number(b) - Number(a));
    this.span = element("select", {}, ...spans.map(([value, text]) => element("option", { value }, text)));
    this.span.addEventListener("change", () => this.show());
    this.earlier = button("Earlier", () => this.ask(this.events[0]?.n ?? null), "nbe-small");
    this.trace = button("Save trace", () => this.saveTrace(), "nbe-small");
    this.trace.title = "A file for Perfetto or chrome://tracing";
    this.note = element("span", { class: "nbe-note", role: "status" });
    this.log = element("ol", { class: "nbe-log", "aria-label": "Events, newest first", tabindex: "0" });
    /** @type {KeyedList<ClusterEvent, number>} */
    this.list = new KeyedList(this.log, (_, event) => new EventItem(event, () => this.events));
    const bar = element(
      "div",
      { class: "nbe-bar" },
      element("label", {}, "Show ", this.filter),
      element("label", {}, "Chart ", this.span),
      this.earlier,
      this.note,
      element("span", { class: "nbe-gap" }),
      this.trace,
    );
    this.node = element("div", {}, this.chart.node, bar, this.log);
  }

  /** Scroll to an event and highlight it. */
  reveal(/** @type {number} */ n) {
    this.filter.value = "all";
    this.show();
    const item = this.list.parts.get(String(n))?.node;
    item?.scrollIntoView({ block: "nearest" });
    if (item) highlight(item);
  }

  open() {
    this.isOpen = true;
    if (this.oldest) this.fillGap();
    else this.ask(null);
    this.show();
  }

  close() {
    this.isOpen = false;
  }

  ask(/** @type {?number} */ before) {
    const { driver } = this;
    this.connection.ask({ ask: "history", before }, (answer) => {
      setText(this.note, answer.error ?? "");
      if (answer.error !== undefined) return;
      if (driver !== this.driver) return this.ask(null);
      this.oldest = answer.oldest ?? 1;
      if (this.add(answer.events) && this.isOpen) this.fillGap();
      this.show();
    });
  }

  /** The state has only the newest events: ask for those that came and went while this panel was not drawn. */
  fillGap() {
    const missing = firstAfterGap(this.events);
    if (missing > this.oldest) this.ask(missing);
  }

  /** Add events and return whether any of them is new. */
  add(/** @type {ClusterEvent[]} */ events) {
    const added = events.filter((event) => !this.byNumber.has(event.n));
    for (const event of added) this.byNumber.set(event.n, event);
    if (added.length) this.events = [...this.byNumber.values()].sort((a, b) => a.n - b.n);
    for (const { n } of this.events.splice(0, Math.max(0, this.events.length - MAX_EVENTS))) this.byNumber.delete(n);
    return added.length > 0;
  }

  /** Another driver may number its events anew, as when the cluster is started again: old numbers would hide new events. */
  begin(/** @type {string} */ driver) {
    this.driver = driver;
    this.byNumber.clear();
    this.events = [];
    this.oldest = 0;
    this.show();
  }

  draw(/** @type {KeyFrame} */ state, /** @type {number} */ now, /** @type {boolean} */ closed) {
    const driver = `${state.driver?.pid} ${state.driver?.since}`;
    if (driver !== this.driver) this.begin(driver);
    const added = this.add(state.events);
    setDisabled(this.trace, closed);
    if (closed !== this.closed) {
      this.closed = closed;
      this.show();
    }
    if (!this.isOpen) return;
    if (added && this.oldest) this.fillGap();
    else if (added) this.ask(null); // the first question had no answer: the kernel was busy with a long cell
    const lastTime = this.events[this.events.length - 1]?.time ?? 0;
    const end = state.phase === "finished" ? lastTime : now;
    // Without new events draw only when the chart's end has moved visibly.
    if (!added && Math.abs(end - this.now) < Math.max(1, (this.now - (this.events[0]?.time ?? end)) / 300)) return;
    this.now = end;
    this.show();
  }

  show() {
    const category = this.filter.value;
    const isShown = (/** @type {ClusterEvent} */ event) => category === "all" || categories(event).includes(category);
    const shown = withoutRepeats(this.events.filter(isShown)).reverse();
    this.list.draw(
      shown.map((event) => [String(event.n), event]),
      this.now,
    );
    const empty = category === "all" ? "There are no events yet." : `No ${category}s among the events shown.`;
    setAttribute(this.log, "data-empty", shown.length ? null : empty);
    const first = this.events[0]?.n ?? 0;
    setDisabled(this.earlier, this.closed || !this.oldest || first <= this.oldest || this.events.length >= MAX_EVENTS);
    this.chart.draw(this.events, this.now, Number(this.span.value));
  }

  saveTrace() {
    setText(this.note, "asking for the trace …");
    this.connection.ask(
      { ask: "trace" },
      (answer) => {
        setText(this.note, answer.error ?? "");
        if (answer.error !== undefined) return;
        const text = JSON.stringify(answer.trace);
        saveFile("nbelastic-trace.json", text, "application/json", this.connection.timers);
      },
      TRACE_TIMEOUT,
    );
  }
}
