/** The requests of users and their outcomes. */
/** @import { AnyRequest, RequestStatus } from "./contract.js" */
/** @import { Connection } from "./connection.js" */
/** @import { Timers } from "./timers.js" */
import { element, setAttribute, setText } from "./dom.js";
import { KeyedList } from "./keyed_list.js";

const HINT_AFTER = 3000; // ms without an answer
const SHOW_OUTCOME = 5000; // ms; a refusal is shown three times as long
const MAX_UNANSWERED = 60_000; // ms for which a request without an answer is shown

/** @typedef {RequestStatus & {onDone?: () => void, reported?: boolean}} ShownRequest  reported by the kernel, or only sent */

export class RequestList {
  /** @param {Connection} connection @param {Timers} timers */
  constructor(connection, timers) {
    this.connection = connection;
    this.timers = timers;
    /** @type {Map<string, ShownRequest>} */
    this.shown = new Map();
    /** @type {?Set<string>} requests whose outcome was received; null before the first update */
    this.settled = null;
    const list = element("ul", { class: "nbe-requests" });
    this.node = element("div", { role: "status", "aria-live": "polite", "aria-label": "Requests" }, list);
    /** @type {KeyedList<ShownRequest, null>} */
    this.list = new KeyedList(list, () => {
      const node = element("li");
      return { node, draw: (request) => this.fill(node, request) };
    });
  }

  /** Send a request and show it as `text`. @param {AnyRequest} request @param {string} text @param {() => void} [onDone] */
  send(request, text, onDone) {
    /** @type {ShownRequest} */
    const status = { id: "", by: "", text, word: "sent", why: "", onDone };
    try {
      status.id = this.connection.send(request);
      const unanswered = () => {
        const current = this.shown.get(status.id);
        return current?.word === "sent" ? current : null;
      };
      this.timers.later(() => {
        const current = unanswered();
        if (current) current.why = `no answer yet; the ${this.connection.peer} may be busy or have ended`;
        this.show();
      }, HINT_AFTER);
      this.timers.later(() => unanswered() && this.drop(status.id), MAX_UNANSWERED);
    } catch (error) {
      status.id = `unsent ${text}`;
      Object.assign(status, { word: "refused", why: `it cannot be sent to the ${this.connection.peer}: ${error}` });
      this.timers.later(() => this.drop(status.id), 3 * SHOW_OUTCOME);
    }
    this.shown.set(status.id, status);
    this.show();
  }

  drop(/** @type {string} */ id) {
    if (this.shown.delete(id)) this.show();
  }

  draw(/** @type {RequestStatus[]} */ requests) {
    const isFirst = this.settled === null;
    const settled = this.settled ?? new Set();
    this.settled = settled;
    for (const request of requests) {
      const isSettled = request.word !== "under way";
      if (settled.has(request.id)) continue;
      if (isSettled) settled.add(request.id);
      if (isSettled && isFirst && !this.shown.has(request.id)) continue; // its outcome is older than this view
      const sent = this.shown.get(request.id);
      const by = request.id.startsWith(this.connection.prefix) ? "" : request.by;
      this.shown.set(request.id, { ...sent, ...request, by, reported: true });
      if (!isSettled) continue;
      if (request.word === "done") sent?.onDone?.();
      this.timers.later(() => this.drop(request.id), request.word === "refused" ? 3 * SHOW_OUTCOME : SHOW_OUTCOME);
    }
    const known = new Set(requests.map((request) => request.id));
    for (const [id, request] of this.shown) {
      // The kernel lists only the newest requests: the outcome of this one will not come.
      if (request.reported && request.word === "under way" && !known.has(id)) this.shown.delete(id);
    }
    this.show();
  }

  show() {
    this.list.draw([...this.shown], null);
  }

  fill(/** @type {Element} */ node, /** @type {RequestStatus} */ { word, text, by, why }) {
    setAttribute(node, "data-word", word);
    setText(node, `${text}${by ? ` (by ${by})` : ""}: ${word}${why ? `, ${why}` : ""}`);
  }
}
