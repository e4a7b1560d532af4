/** The lines of the panel *Logs*: finished lines, then unfinished ones such as progress bars. */
/** @import { OutputLine, Writer } from "./contract.js" */
/** @import { Line } from "./log_fold.js" */
import { element, setAttribute, setText } from "./dom.js";
import { rankNames } from "./format.js";
import { KeyedList } from "./keyed_list.js";
import { LogFold, terminalText } from "./log_fold.js";

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
    this.node.append(this.end);
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
    this.nodes.clear();
    this.unfinished.draw([], null);
    this.node.replaceChildren(this.end);
  }

  matches(/** @type {string} */ text) {
    return this.searched === "" || text.toLowerCase().includes(this.searched);
  }

  /** How many lines there are, and how many of them contain the searched text. */
  count() {
    const all = this.fold.lines.length;
    return { all, found: this.searched ? this.fold.lines.filter(({ text }) => this.matches(text)).length : all };
  }

  add(/** @type {OutputLine[]} */ lines, /** @type {Writer[]} */ speakers) {
    /** @type {Set<Line>} */
    const touched = new Set();
    for (const [, stream, text, runs] of lines) {
      const plain = terminalText(text);
      for (const [id, rank] of writersOf(speakers, runs)) touched.add(this.fold.add(id, stream, plain, rank));
    }
    for (const { seq } of this.fold.trim()) {
      this.nodes.get(seq)?.node.remove();
      this.nodes.delete(seq);
    }
    const added = document.createDocumentFragment();
    for (const line of touched) {
      if (!this.fold.lines.length || line.seq < this.fold.lines[0].seq) continue;
      let shown = this.nodes.get(line.seq);
      if (!shown) {
        shown = this.makeLine(line);
        added.append(shown.node);
        this.nodes.set(line.seq, shown);
      }
      setText(shown.writers, this.label([...line.writers]));
    }
    this.end.before(added);
    if (this.following) this.scrollToEnd();
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
    const node = element("div", { class: "nbe-line" }, writers, tag, text);
    const draw = (/** @type {UnfinishedLine} */ line) => {
      setAttribute(node, "data-stream", line.stream);
      setText(writers, line.writers);
      setText(tag, line.stream === "err" ? "err" : "");
      setText(text, line.text);
      node.hidden = line.hidden;
    };
    return { node, draw };
  }

  makeLine(/** @type {Line} */ { stream, text }) {
    const writers = element("span", { class: "nbe-writers" });
    const tag = element("span", { class: "nbe-stream" }, stream === "err" ? "err" : "");
    const node = element("div", { class: "nbe-line", "data-stream": stream }, writers, tag, element("span", {}, text));
    node.hidden = !this.matches(text);
    return { node, writers };
  }

  /** Show only the lines that contain `text`, in any case. */
  search(/** @type {string} */ text) {
    this.searched = text.toLowerCase();
    for (const line of this.fold.lines) {
      const node = this.nodes.get(line.seq)?.node;
      if (node) node.hidden = !this.matches(line.text);
    }
    if (this.following) this.scrollToEnd();
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
