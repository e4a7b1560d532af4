/** The lines of the panel *Logs*: finished lines, then unfinished ones such as progress bars. */
/** @import { OutputLine, Writer } from "./contract.js" */
/** @import { Line } from "./log_fold.js" */
import { button, element, setAttribute, setText } from "./dom.js";
import { dateAndTime, rankNames, timeOfDay } from "./format.js";
import { KeyedList } from "./keyed_list.js";
import { LogFold, terminalText } from "./log_fold.js";

const PAGE = 1000; // so many lines are in the page at first

/** @typedef {{stream: string, text: string, writers: string, hidden: boolean}} UnfinishedLine */

/** The writers of a line. `runs`: places among `speakers`, from the first to the last. @returns {Writer[]} */
const writersOf = (/** @type {Writer[]} */ speakers, /** @type {number[][]} */ runs) =>
  runs.flatMap(([first, last]) => speakers.slice(first, last + 1));

export class LogLines {
  /** @param {() => void} onScrollUp called when the reader scrolls away from the end */
  constructor(onScrollUp) {
    this.onScrollUp = onScrollUp;
    this.node = element("div", { class: "nbe-lines", role: "region", "aria-label": "Log", tabindex: "0" });
    this.node.addEventListener("scroll", () => this.scrolled());
    this.end = element("div", { class: "nbe-pending" });
    this.earlier = button("Earlier lines", () => this.showEarlier(), "nbe-small");
    this.earlier.hidden = true;
    this.node.append(this.earlier, this.end);
    this.limit = PAGE; // of the newest lines that are in the page
    /** @type {KeyedList<UnfinishedLine, null>} */
    this.unfinished = new KeyedList(this.end, () => this.makeUnfinished());
    /** @type {Map<string, ?number>} the present rank of each worker */
    this.ranks = new Map();
    this.fold = new LogFold();
    /** @type {Map<number, {node: HTMLElement, writers: HTMLElement}>} */
    this.nodes = new Map();
    this.searched = "";
    this.top = 0;
    this.following = true;
  }

  clear() {
    this.fold = new LogFold();
    this.limit = PAGE;
    this.unfinished.draw([], null);
    this.draw();
  }

  matches(/** @type {string} */ text) {
    return this.searched === "" || text.toLowerCase().includes(this.searched);
  }

  found() {
    return this.searched ? this.fold.lines.filter(({ text }) => this.matches(text)) : this.fold.lines;
  }

  /** How many lines there are, and how many of them contain the searched text. */
  count() {
    return { all: this.fold.lines.length, found: this.found().length };
  }

  /** All lines, each after its time and the ranks that have printed it. */
  text() {
    const label = (/** @type {Line} */ { stream, writers }) => `${this.label([...writers])}${stream === "err" ? " err" : ""}`;
    return this.fold.lines.map((line) => `${dateAndTime(line.time)} ${label(line)} | ${line.text}\n`).join("");
  }

  add(/** @type {OutputLine[]} */ lines, /** @type {Writer[]} */ speakers) {
    const before = this.fold.lines.length;
    /** @type {Set<Line>} */
    const touched = new Set();
    for (const [, stream, text, runs, time] of lines) {
      const plain = terminalText(text);
      for (const [id, rank] of writersOf(speakers, runs)) touched.add(this.fold.add(id, stream, plain, rank, time));
    }
    // What the reader looks at stays in the page.
    if (!this.following) this.limit += this.fold.lines.length - before;
    this.fold.trim();
    for (const line of touched) {
      const shown = this.nodes.get(line.seq);
      if (shown) setText(shown.writers, this.label([...line.writers]));
    }
    if (lines.length) this.draw();
  }

  /** Put the newest lines that were found into the page. Nodes that remain are not moved. */
  draw() {
    const found = this.found();
    const shown = found.slice(-this.limit);
    const wanted = new Set(shown.map(({ seq }) => seq));
    for (const [seq, { node }] of this.nodes) {
      if (wanted.has(seq)) continue;
      node.remove();
      this.nodes.delete(seq);
    }
    /** @type {Element} */
    let next = this.end;
    for (const line of shown.reverse()) {
      const part = this.nodes.get(line.seq) ?? this.makeLine(line);
      this.nodes.set(line.seq, part);
      if (part.node.nextElementSibling !== next) this.node.insertBefore(part.node, next);
      next = part.node;
    }
    this.earlier.hidden = found.length <= this.limit;
    if (this.following) this.scrollToEnd();
  }

  showEarlier() {
    const fromEnd = this.node.scrollHeight - this.node.scrollTop;
    this.onScrollUp();
    this.limit += PAGE;
    this.draw();
    this.node.scrollTop = this.node.scrollHeight - fromEnd;
    if (this.earlier.hidden) this.node.focus({ preventScroll: true });
  }

  setFollow(/** @type {boolean} */ following) {
    this.following = following;
    if (!following) return;
    this.limit = PAGE;
    this.draw();
  }

  /** The ranks of writers. A worker without a rank when it printed, as of a script, is shown with its present rank. */
  label(/** @type {Writer[]} */ writers) {
    return rankNames(writers.map(([id, rank]) => [id, rank ?? this.ranks.get(id) ?? null]));
  }

  drawUnfinished(/** @type {OutputLine[]} */ lines, /** @type {Writer[]} */ speakers) {
    /** @type {[string, UnfinishedLine][]} */
    const items = lines.map(([, stream, output, runs]) => {
      const writers = writersOf(speakers, runs);
      const text = terminalText(output);
      return [`${stream} ${writers[0]?.[0]}`, { stream, text, writers: this.label(writers), hidden: !this.matches(text) }];
    });
    this.unfinished.draw(items, null);
    if (this.following) this.scrollToEnd();
  }

  makeUnfinished() {
    const writers = element("span", { class: "nbe-writers" });
    const tag = element("span", { class: "nbe-stream" });
    const text = element("span");
    const node = element("div", { class: "nbe-line" }, element("span", { class: "nbe-time" }), writers, tag, text);
    const draw = (/** @type {UnfinishedLine} */ line) => {
      setAttribute(node, "data-stream", line.stream);
      setText(writers, line.writers);
      setText(tag, line.stream === "err" ? "err" : "");
      setText(text, line.text);
      node.hidden = line.hidden;
    };
    return { node, draw };
  }

  makeLine(/** @type {Line} */ { stream, text, writers: known, time: seconds }) {
    const time = element("time", { class: "nbe-time", title: dateAndTime(seconds) }, timeOfDay(seconds));
    const writers = element("span", { class: "nbe-writers" }, this.label([...known]));
    const tag = element("span", { class: "nbe-stream" }, stream === "err" ? "err" : "");
    const node = element("div", { class: "nbe-line", "data-stream": stream }, time, writers, tag, element("span", {}, text));
    return { node, writers };
  }

  showTimes(/** @type {boolean} */ isOn) {
    setAttribute(this.node, "data-times", isOn ? "" : null);
    if (this.following) this.scrollToEnd();
  }

  /** Show only the lines that contain `text`, in any case. */
  search(/** @type {string} */ text) {
    this.searched = text.toLowerCase();
    this.draw();
  }

  scrollToEnd() {
    this.node.scrollTop = this.node.scrollHeight;
    this.top = this.node.scrollTop;
  }

  scrolled() {
    const below = this.node.scrollHeight - this.node.clientHeight - this.node.scrollTop;
    if (this.following && this.node.scrollTop < this.top && below > 8) this.onScrollUp();
    this.top = this.node.scrollTop;
  }
}
