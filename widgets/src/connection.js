/** The view's connection to the kernel: it sends requests, and matches answers to queries. */
/** @import { Answers, AnyQuery, AnyRequest } from "./contract.js" */
/** @import { Timers } from "./timers.js" */

/**
 * The part of anywidget's model that a view uses. `peer`: what answers, if it is not a kernel.
 * @typedef {{get(name: string): any, on(name: string, listener: Function): void,
 *   off(name: string, listener: Function): void, send(content: unknown): void, peer?: string}} Model
 */
/**
 * @template {keyof Answers} Name
 * @typedef {(Answers[Name] & {error?: undefined}) | {error: string}} Answer
 */

const ANSWER_TIMEOUT = 10_000; // ms

export class Connection {
  /** @param {Model} model @param {Timers} timers @param {() => void} onAnswer called for each answer to this view */
  constructor(model, timers, onAnswer) {
    this.model = model;
    this.timers = timers;
    this.onAnswer = onAnswer;
    this.isClosed = false;
    this.peer = model.peer ?? "kernel";
    this.prefix = `${Array.from(crypto.getRandomValues(new Uint32Array(2)), (n) => n.toString(36)).join("")}-`;
    this.count = 0;
    /** @type {Map<string, {ask: string, onAnswer: (answer: any) => void, timer: number}>} */
    this.openQueries = new Map();
    this.listener = (/** @type {any} */ content) => this.receive(content);
    model.on("msg:custom", this.listener);
  }

  close() {
    this.model.off("msg:custom", this.listener);
    this.openQueries.clear();
  }

  /** Send a request and return its id. Throws if the kernel has closed the connection. */
  send(/** @type {AnyRequest} */ request) {
    const id = this.prefix + ++this.count;
    this.model.send({ ...request, id });
    return id;
  }

  /**
   * Send a query; `onAnswer` gets its answer or an `error`. A query is not sent while one of the same kind is open.
   * @template {AnyQuery} Q
   * @param {Q} query @param {(answer: Answer<Q["ask"]>) => void} onAnswer
   */
  ask(query, onAnswer, timeout = ANSWER_TIMEOUT) {
    const { ask } = query;
    if ([...this.openQueries.values()].some((open) => open.ask === ask)) return;
    if (this.isClosed) return onAnswer({ error: `the connection to the ${this.peer} is closed` });
    const id = this.prefix + ++this.count;
    const onTimeout = () => this.settle(id, { error: `no answer from the ${this.peer} for ${timeout / 1000} s` });
    this.openQueries.set(id, { ask, onAnswer, timer: this.timers.later(onTimeout, timeout) });
    try {
      this.model.send({ ...query, id });
    } catch (error) {
      this.settle(id, { error: `the query cannot be sent to the ${this.peer}: ${error}` });
    }
  }

  /** The kernel sends each answer to all views: ignore those of other views. */
  receive(/** @type {any} */ content) {
    if (typeof content?.reply !== "string" || !content.reply.startsWith(this.prefix)) return;
    this.onAnswer();
    this.settle(content.reply, content);
  }

  settle(/** @type {string} */ id, /** @type {any} */ answer) {
    const query = this.openQueries.get(id);
    if (!query) return;
    this.openQueries.delete(id);
    this.timers.cancel(query.timer);
    query.onAnswer(answer);
  }
}
