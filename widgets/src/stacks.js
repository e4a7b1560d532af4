/** The panel *Stacks*: where each rank is at this moment. */
/** @import { Connection } from "./connection.js" */
/** @import { StackGroup, StacksAnswer } from "./contract.js" */
import { button, element, setDisabled, setText } from "./dom.js";
import { rankNames, timeOfDay } from "./format.js";

export class Stacks {
  constructor(/** @type {Connection} */ connection) {
    this.connection = connection;
    this.asking = this.closed = false;
    this.now = button("Stacks now", () => this.ask(), "nbe-small");
    this.note = element("span", { class: "nbe-note", role: "status" }, "Where is each rank at this moment?");
    this.list = element("div", { class: "nbe-stacks" });
    this.node = element("div", {}, element("div", { class: "nbe-bar" }, this.now, this.note), this.list);
  }

  open() {}

  close() {}

  draw(/** @type {boolean} */ closed) {
    this.closed = closed;
    setDisabled(this.now, this.closed || this.asking);
  }

  ask() {
    this.asking = true;
    setDisabled(this.now, true);
    setText(this.note, "asking all ranks …");
    this.connection.ask({ ask: "stacks" }, (answer) => {
      this.asking = false;
      setDisabled(this.now, this.closed);
      if (answer.error !== undefined) setText(this.note, answer.error);
      else this.show(answer);
    });
  }

  show(/** @type {StacksAnswer} */ { stacks, silent }) {
    const missing = silent.length ? ` No answer from ${rankNames(silent)}.` : "";
    setText(this.note, `At ${timeOfDay(Date.now() / 1000)}.${missing}`);
    this.list.replaceChildren(...stacks.map((group, i) => this.makeGroup(group, i === 0)));
  }

  makeGroup(/** @type {StackGroup} */ { workers, place, text, note }, /** @type {boolean} */ isFirst) {
    const head = element("summary", {}, element("b", {}, rankNames(workers)), " ", element("code", {}, place));
    if (note) head.append(" ", element("em", {}, note));
    const ids = element("p", { class: "nbe-note" }, workers.map(([id]) => id).join(", "));
    const attributes = note ? { "data-behind": "" } : undefined;
    const node = element("details", attributes, head, ids, element("pre", { tabindex: "0" }, text));
    node.open = isFirst || Boolean(note);
    return node;
  }
}
