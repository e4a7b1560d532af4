/** The details of one slot, below the row of its host. */
/** @import { KeyFrame, WorkerCopies } from "./contract.js" */
/** @import { RequestList } from "./request_list.js" */
/** @import { BoardContext } from "./slot_chip.js" */
/** @import { Slot } from "./slots.js" */
/** @import { Timers } from "./timers.js" */
import { button, confirmedButton, element, setDisabled, setText } from "./dom.js";
import { Figure } from "./figure.js";
import { capital, duration, gpuText, megabytes, number, percent, plural, unit } from "./format.js";
import { KeyedList } from "./keyed_list.js";
import { stateOf } from "./slots.js";

/** @returns {[string, string][]} */
function copyItems(/** @type {WorkerCopies} */ [memory, copiedTo, keeps, shared], /** @type {string} */ host) {
  /** @type {[string, string][]} */
  const items = [["Memory of copies", megabytes(memory)]];
  const places = shared ? [...copiedTo, `${host} (shared memory)`] : copiedTo;
  if (places.length) items.push(["Its copy is on", places.join(", ")]);
  if (keeps.length) items.push(["It keeps the copy of", keeps.join(", ")]);
  return items;
}

/**
 * @typedef {{send: RequestList["send"], timers: Timers, openLog(worker: string): void, close(): void,
 *   detailId: string}} DetailOwner
 */

export class SlotDetail {
  constructor(/** @type {DetailOwner} */ { send, timers, openLog, close, detailId }) {
    this.title = element("b");
    this.facts = element("dl", { class: "nbe-facts" });
    this.figures = new KeyedList(this.facts, (name) => new Figure(name));
    this.reason = element("p");
    this.worker = "";
    this.log = button("Log", () => openLog(this.worker), "nbe-small");
    const restart = () => send({ order: "restart", worker: this.worker }, `restart ${this.worker}`);
    this.restart = confirmedButton(timers, "Restart", "Kill and restart it?", restart, "nbe-small");
    const head = element(
      "div",
      { class: "nbe-bar" },
      this.title,
      element("span", { class: "nbe-gap" }),
      this.log,
      this.restart,
      button("Close", close, "nbe-small"),
    );
    const cell = element("td", { role: "cell", colspan: "7" }, head, this.facts, this.reason);
    this.node = element("tr", { role: "row", class: "nbe-detail", id: detailId }, cell);
    this.node.addEventListener("keydown", (event) => event.key === "Escape" && close());
  }

  draw(/** @type {Slot} */ slot, /** @type {BoardContext} */ { state, now, locked, closed }) {
    if (slot.id !== this.worker) this.restart.disarm();
    this.worker = slot.id;
    setText(this.title, slot.id || `Slot ${slot.slot}`);
    this.figures.draw(this.items(slot, stateOf(slot, now), now, state), null);
    setText(this.reason, slot.worker?.reason ?? "");
    setDisabled(this.log, closed || !slot.worker);
    setDisabled(this.restart, locked || !slot.worker);
  }

  /**
   * @param {Slot} slot @param {string} state @param {number} now @param {KeyFrame} frame
   * @returns {[string, {value: string}][]}
   */
  items({ id, worker, backoffUntil }, state, now, frame) {
    const stateText = state === "backoff" ? `in back-off, ${duration(backoffUntil - now)} left` : state;
    /** @type {[string, string][]} */
    const items = [["State", stateText]];
    if (worker) {
      items.push(["Rank", worker.rank === null ? "none" : String(worker.rank)], ["Process", String(worker.pid)]);
      if (state === "running") items.push([capital(unit(frame)), number(Math.max(0, frame.step - worker.behind))]);
      if (worker.behind) items.push(["Behind the others", plural(worker.behind, "commit")]);
      items.push(["Restarts", String(worker.restarts)], ["CPU", percent(worker.cpu) || "–"]);
      items.push(["Memory", megabytes(worker.memory) || "–"]);
      if (worker.gpu) items.push([`GPU ${worker.gpu.number} of the host`, gpuText(worker.gpu.figures)]);
      if (worker.copies) items.push(...copyItems(worker.copies, id.slice(0, id.lastIndexOf("/"))));
    }
    return items.map(([name, value]) => [name, { value }]);
  }
}
