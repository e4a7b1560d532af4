/** The panel *Logs*: it asks for the output of one worker or of all, and shows it. */
/** @import { Connection } from "./connection.js" */
/** @import { LogsAnswer, Writer } from "./contract.js" */
/** @import { Timers } from "./timers.js" */
import { button, element, saveFile, setAttribute, setText } from "./dom.js";
import { plural } from "./format.js";
import { KeyedList } from "./keyed_list.js";
import { LogLines } from "./log_lines.js";

const POLL = 500; // ms between two queries

export class Logs {
  /** @param {Connection} connection @param {Timers} timers @param {() => boolean} isVisible */
  constructor(connection, timers, isVisible) {
    this.connection = connection;
    this.timers = timers;
    this.isVisible = isVisible;
    this.worker = element("select");
    this.worker.addEventListener("change", () => this.restart());
    this.choices = new KeyedList(this.worker, (value) => {
      const node = element("option", { value });
      return { node, draw: (/** @type {string} */ text) => setText(node, text) };
    });
    const search = { type: "search", placeholder: "Search", "aria-label": "Search the lines", spellcheck: "false" };
    this.search = element("input", search);
    this.search.addEventListener("input", () => this.filter());
    this.lines = new LogLines(() => this.setFollow(false));
    this.follow = button("Follow", () => this.setFollow(!this.lines.following), "nbe-small nbe-toggle");
    this.times = button("Times", () => this.toggleTimes(), "nbe-small nbe-toggle");
    setAttribute(this.times, "aria-pressed", "false");
    this.save = button("Save", () => this.saveLines(), "nbe-small");
    this.save.title = "A file with all lines that this view has of these ranks, each with its time";
    this.note = element("span", { class: "nbe-note" }); // read aloud it would never end, as new lines come all the time
    this.spoken = element("p", { class: "nbe-hidden", role: "status", "aria-label": "Lines found" });
    const bar = element(
      "div",
      { class: "nbe-bar" },
      element("label", {}, "Lines of ", this.worker),
      this.search,
      this.follow,
      this.times,
      this.save,
      element("span", { class: "nbe-gap" }),
      this.note,
    );
    this.node = element("div", {}, bar, this.spoken, this.lines.node);
    /** @type {Writer[]} all workers that have printed */
    this.writers = [];
    this.since = 0;
    this.round = 0; // grows with each restart: answers to queries of earlier rounds are ignored
    this.isOpen = false;
    this.timer = 0;
    /** @type {?string} */
    this.job = null;
    this.setFollow(true);
    this.drawChoices();
  }

  open() {
    this.isOpen = true;
    this.poll();
  }

  close() {
    this.isOpen = false;
    this.timers.cancel(this.timer);
  }

  pick(/** @type {string} */ worker) {
    this.drawChoices(worker);
    this.worker.value = worker;
    this.restart();
    this.worker.focus();
  }

  /** Show another worker's lines, or another job's, from the first. */
  restart() {
    this.since = 0;
    this.round += 1;
    this.lines.clear();
    this.setFollow(true);
    if (this.isOpen) this.poll();
  }

  poll() {
    this.timers.cancel(this.timer);
    this.timer = this.timers.later(() => this.poll(), POLL);
    if (!this.isOpen || this.connection.isClosed || !this.isVisible()) return;
    const round = this.round;
    this.connection.ask({ ask: "logs", worker: this.worker.value || null, since: this.since }, (answer) => {
      if (round !== this.round) return this.poll();
      if (!this.isOpen) return;
      if (answer.error !== undefined) {
        setText(this.spoken, answer.error);
        return setText(this.note, answer.error);
      }
      if (answer.job !== this.job && this.since) {
        this.job = answer.job;
        return this.restart();
      }
      this.draw(answer);
      if (answer.more) this.poll();
    });
  }

  draw(/** @type {LogsAnswer} */ { job, writers, speakers, lines, unfinished, next }) {
    this.job = job;
    this.writers = writers ?? [];
    this.lines.ranks = new Map(this.writers);
    this.drawChoices();
    this.lines.add(
      lines.filter(([n]) => n > this.since),
      speakers ?? [],
    );
    this.drawNote();
    setText(this.spoken, ""); // it was spoken
    this.since = next;
    this.lines.drawUnfinished(unfinished ?? [], speakers ?? []);
  }

  drawChoices(picked = this.worker.value) {
    const known = this.writers.map(([worker]) => worker);
    /** @type {Writer[]} */
    const writers = picked && !known.includes(picked) ? [...this.writers, [picked, null]] : this.writers;
    const sorted = [...writers].sort((a, b) => (a[1] ?? Infinity) - (b[1] ?? Infinity) || (a[0] < b[0] ? -1 : 1));
    const text = (/** @type {Writer} */ [worker, rank]) => (rank === null ? worker : `rank ${rank} · ${worker}`);
    /** @type {[string, string][]} */
    const choices = sorted.map((writer) => [writer[0], text(writer)]);
    this.choices.draw([["", "all ranks"], ...choices], null);
  }

  filter() {
    this.lines.search(this.search.value);
    this.drawNote();
    setText(this.spoken, this.search.value ? this.note.textContent : "");
  }

  drawNote() {
    const { all, found } = this.lines.count();
    const share = found === all ? "" : `${found} of `;
    setText(this.note, `${share}${plural(all, "line")}${this.job ? ` of ${this.job}` : ""}`);
  }

  saveLines() {
    const name = [this.job ?? "job", this.worker.value.replaceAll(/[^\w.-]+/g, "-")].filter(Boolean).join("-");
    saveFile(`${name}.log`, this.lines.text(), "text/plain", this.timers);
  }

  toggleTimes() {
    const isOn = this.times.getAttribute("aria-pressed") !== "true";
    setAttribute(this.times, "aria-pressed", String(isOn));
    this.lines.showTimes(isOn);
  }

  setFollow(/** @type {boolean} */ following) {
    this.lines.setFollow(following);
    setAttribute(this.follow, "aria-pressed", String(following));
  }
}
