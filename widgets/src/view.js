/** One view of the model. It joins the panels, and watches whether the kernel still answers. */
/** @import { Model } from "./connection.js" */
/** @import { KeyFrame } from "./contract.js" */
import { Board } from "./board.js";
import { Charts } from "./charts.js";
import { Connection } from "./connection.js";
import { Controls } from "./controls.js";
import { element, setAttribute, setText } from "./dom.js";
import { duration, timeOfDay } from "./format.js";
import { Logs } from "./logs.js";
import { Overview } from "./overview.js";
import { RequestList } from "./request_list.js";
import { Stacks } from "./stacks.js";
import { clockOffset, currentState } from "./state.js";
import { StepTimes } from "./step_times.js";
import { Tabs } from "./tabs.js";
import { Timeline } from "./timeline.js";
import { Timers } from "./timers.js";

const MAX_QUIET = 10_000; // ms without a message after which the view asks whether the kernel answers
const HELLO_TIMEOUT = 5000; // ms for the answer
const MAX_PRESS = 1000; // ms for which a held mouse button stops drawing
const KEY_FRAME_WAIT = 1000; // ms that a change waits for its key frame before the view asks for another one

/** It starts all its timers and listeners in the constructor; `close` ends them. */
export class View {
  /** @param {Model} model @param {HTMLElement} parent */
  constructor(model, parent) {
    this.model = model;
    this.timers = new Timers();
    this.connection = new Connection(model, this.timers, () => this.received());
    this.requests = new RequestList(this.connection, this.timers);
    this.inSight = true;
    this.frame = 0;
    /** @type {Set<string>} the parts that could not be drawn */
    this.failed = new Set();
    this.pressedAt = -Infinity; // when a mouse button was pressed that is still held
    this.clockOffset = Infinity; // seconds by which this clock is ahead of the kernel's
    this.lastMessageAt = Date.now();
    this.askedAt = 0; // when the unanswered question was sent whether the kernel answers; 0: there is none
    this.keyFrameMissingSince = 0; // since when the change has no key frame; 0: it has one
    this.overview = new Overview();
    this.charts = new Charts(this.connection);
    this.board = this.makeBoard();
    this.controls = new Controls(this.requests, this.timers);
    this.timeline = new Timeline(this.connection);
    this.logs = new Logs(this.connection, this.timers, () => this.inSight && !document.hidden);
    this.stacks = new Stacks(this.connection);
    this.stepTimes = new StepTimes(this.connection);
    this.tabs = new Tabs(this.id(), [
      ["Timeline", this.timeline],
      ["Logs", this.logs],
      ["Stacks", this.stacks],
      ["Step times", this.stepTimes],
    ]);
    this.problem = element("span", { role: "alert" }); // screen readers speak each change of its text
    this.age = element("span");
    this.warning = element("p", { class: "nbe-warning", hidden: "" }, this.problem, " ", this.age);
    const parts = [this.overview, this.charts, this.board, this.controls, this.requests, this.tabs].map(
      (part) => part.node,
    );
    const attributes = { class: "nbe", "aria-label": "Elastic cluster", tabindex: "-1" };
    this.root = element("section", attributes, this.warning, ...parts);
    parent.append(this.root);
    this.listen();
    this.draw();
    this.tabs.select(0);
    this.tick();
  }

  id() {
    return `nbe-${this.connection.prefix}`;
  }

  makeBoard() {
    return new Board({
      send: this.requests.send.bind(this.requests),
      timers: this.timers,
      openLog: (worker) => this.openLog(worker),
      redraw: () => this.drawSoon(),
      id: this.id(),
    });
  }

  listen() {
    const { model, root } = this;
    const onUpdate = () => this.updated();
    const view = this;
    /** anywidget calls this with its own view as `this`. @this {any} */
    const onLive = function () {
      view.setConnected(this?.model?.comm_live ?? this?.comm_live);
    };
    const onVisible = () => document.hidden || this.drawSoon();
    const observer = new IntersectionObserver(
      (entries) => {
        this.inSight = entries[entries.length - 1].isIntersecting;
        this.drawSoon();
      },
      { rootMargin: "200px" },
    );
    const endHighlight = (/** @type {Event} */ event) =>
      event.target instanceof Element && event.target.classList.remove("nbe-highlight");
    // Keys pressed in the view are not the notebook's shortcuts.
    const keepKey = (/** @type {KeyboardEvent} */ event) =>
      event.ctrlKey || event.metaKey || event.altKey || event.stopPropagation();
    // What moved away between press and release would not be clicked.
    const onPress = () => {
      this.pressedAt = performance.now();
    };
    const onRelease = () => {
      if (this.pressedAt === -Infinity) return;
      this.pressedAt = -Infinity;
      this.drawSoon();
    };
    model.on("change:state", onUpdate);
    model.on("change:change", onUpdate);
    model.on("comm_live_update", onLive);
    document.addEventListener("visibilitychange", onVisible);
    document.addEventListener("pointerup", onRelease);
    document.addEventListener("pointercancel", onRelease);
    root.addEventListener("pointerdown", onPress);
    root.addEventListener("animationend", endHighlight);
    root.addEventListener("animationcancel", endHighlight);
    root.addEventListener("keydown", keepKey);
    observer.observe(root);
    this.stopListening = () => {
      model.off("change:state", onUpdate);
      model.off("change:change", onUpdate);
      model.off("comm_live_update", onLive);
      document.removeEventListener("visibilitychange", onVisible);
      document.removeEventListener("pointerup", onRelease);
      document.removeEventListener("pointercancel", onRelease);
      observer.disconnect();
    };
  }

  close() {
    this.stopListening?.();
    this.charts.close();
    this.connection.close();
    this.timers.close();
    cancelAnimationFrame(this.frame);
    this.root.remove();
  }

  /** @returns {KeyFrame} */
  state() {
    return currentState(this.model.get("state"), this.model.get("change"));
  }

  updated() {
    this.received();
    const { time } = this.state();
    if (time) this.clockOffset = clockOffset(this.clockOffset, Date.now() / 1000 - time);
    const change = this.model.get("change");
    const hasKeyFrame = change?.base === undefined || change.base === this.model.get("state")?.n;
    this.keyFrameMissingSince = hasKeyFrame ? 0 : this.keyFrameMissingSince || Date.now();
    this.drawSoon();
  }

  /** Draw in the next frame, once for all changes until then. A view out of sight only speaks. */
  drawSoon() {
    if (!this.inSight && this.overview.before) this.drawPart("news", () => this.overview.announce(this.state()));
    if (this.frame || !this.inSight) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      if (performance.now() - this.pressedAt >= MAX_PRESS) this.draw();
    });
  }

  draw() {
    const state = this.state();
    if (!state.phase) return;
    if (this.clockOffset === Infinity) this.clockOffset = Date.now() / 1000 - state.time;
    const now = Date.now() / 1000 - this.clockOffset;
    /** @type {Record<string, number>} */
    let counts = {};
    this.drawPart("board", () => {
      counts = this.board.count(state, now);
    });
    const closed = this.connection.isClosed;
    setAttribute(this.root, "data-phase", state.phase);
    this.drawPart("overview", () => this.overview.draw(state, counts, now));
    this.drawPart("charts", () => this.charts.draw(state, closed));
    this.drawPart("board", () => this.board.draw(state, counts, now, closed));
    this.drawPart("controls", () => this.controls.draw(state, closed));
    this.drawPart("requests", () => this.requests.draw(state.orders));
    this.drawPart("timeline", () => this.timeline.draw(state, now, closed));
    this.drawPart("stacks", () => this.stacks.draw(closed));
    this.drawPart("step times", () => this.stepTimes.draw(state, closed));
  }

  /** Draw one part. If it fails, the other parts go on; the browser's console has the first error of each part. */
  drawPart(/** @type {string} */ name, /** @type {() => void} */ draw) {
    try {
      draw();
    } catch (error) {
      if (!this.failed.has(name)) console.error(`nbelastic: the ${name} cannot be drawn`, error);
      this.failed.add(name);
    }
  }

  /** Once per second: draw the times that count down, and check that the kernel still answers. */
  tick() {
    this.timers.later(() => this.tick(), 1000);
    if (!document.hidden) this.drawSoon();
    if (this.keyFrameMissingSince && Date.now() - this.keyFrameMissingSince >= KEY_FRAME_WAIT)
      this.connection.ask({ ask: "frame" }, () => {});
    const quiet = Date.now() - this.lastMessageAt;
    if (this.state().phase === "finished" || this.connection.isClosed || quiet < MAX_QUIET) return;
    if (!this.askedAt || Date.now() - this.askedAt > 6 * HELLO_TIMEOUT) {
      this.askedAt = this.askedAt || Date.now();
      this.connection.ask({ ask: "hello" }, () => {}, 6 * HELLO_TIMEOUT);
    }
    if (Date.now() - this.askedAt >= HELLO_TIMEOUT)
      this.warn(`No answer from the ${this.connection.peer}: it is busy, was restarted or has ended.`, duration(quiet / 1000));
  }

  /** Show that the view is out of date. */
  warn(/** @type {string} */ problem, quiet = "") {
    this.warning.hidden = false;
    setText(this.problem, problem);
    const { time } = this.state();
    const age = time ? `The state shown is from ${timeOfDay(time)}.` : "";
    setText(this.age, `${quiet && `The last message came ${quiet} ago. `}${age}`);
    this.root.classList.add("nbe-outdated");
  }

  /** A message from the kernel shows that it answers. */
  received() {
    this.lastMessageAt = Date.now();
    this.askedAt = 0;
    this.connection.isClosed = false;
    if (this.warning.hidden) return;
    this.warning.hidden = true;
    setText(this.problem, "");
    this.root.classList.remove("nbe-outdated");
    this.drawSoon();
  }

  setConnected(/** @type {boolean|undefined} */ connected) {
    if (connected === false) {
      this.connection.isClosed = true;
      if (this.state().phase !== "finished")
        this.warn(`The connection to the ${this.connection.peer} is closed: it was restarted or has ended.${this.afterKernel()}`);
      this.drawSoon();
    } else {
      this.connection.isClosed = false;
      this.askedAt = Date.now();
      this.connection.ask({ ask: "hello" }, () => {}, HELLO_TIMEOUT);
    }
  }

  /** What becomes of the cluster when its kernel ends. A server of `nbelastic dashboard` is no kernel. */
  afterKernel() {
    const { driver } = this.state();
    if (!driver || this.connection.peer !== "kernel") return "";
    if (typeof driver.lease === "number") return " The cluster goes on: %elastic_attach shows it.";
    return " Its cluster ends with it, unless %elastic_start has --keep.";
  }

  openLog(/** @type {string} */ worker) {
    this.tabs.select(1);
    this.logs.pick(worker);
    this.logs.node.scrollIntoView({ block: "nearest" });
  }
}
