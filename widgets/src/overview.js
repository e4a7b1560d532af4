/** The top of the view: phase, reason, figures and progress. */
/** @import { Checkpoints, Copies, KeyFrame } from "./contract.js" */
/** @import { FigureContent } from "./figure.js" */
import { element, setAttribute, setText } from "./dom.js";
import { announcement } from "./events.js";
import { Figure } from "./figure.js";
import {
  capital,
  driverFacts,
  duration,
  losses,
  megabytes,
  milliseconds,
  newestCheckpoint,
  nextCheckpoint,
  number,
  plural,
  reported,
  sinceFailure,
  sizeWithBounds,
  timeLeft,
  unit,
} from "./format.js";
import { KeyedList } from "./keyed_list.js";
import { tone } from "./tones.js";

const REPORTED = "report: "; // in front of a reported name, which may be that of another figure

/** @returns {[string, FigureContent][]} */
function copyFigures(/** @type {Copies} */ { commit, made_at, seconds, memory, workers }, /** @type {number} */ now) {
  const isWhole = typeof commit === "number"; // a patch deletes what is null
  const whole = isWhole ? `${number(commit)} · ${duration(now - made_at)} old` : "none yet";
  const took = isWhole ? ` · copied in ${milliseconds(seconds * 1000)}` : "";
  const title = memory ? `Memory of all copies, on ${plural(workers, "worker")}` : "The new world has no copies yet";
  return [
    ["Whole commit", { value: whole, title: "All ranks return to it if one is lost: its copies are complete" }],
    ["Copies", { value: memory ? `${megabytes(memory)}${took}` : "–", title }],
  ];
}

/** @returns {[string, FigureContent][]} */
function checkpointFigures(/** @type {Checkpoints} */ checkpoints, /** @type {KeyFrame} */ state, /** @type {number} */ now, /** @type {boolean} */ training) {
  /** @type {[string, FigureContent][]} */
  const items = [["Checkpoint", { value: newestCheckpoint(checkpoints, now), title: `The newest one: ${unit(state)}, age, size` }]];
  const { at, text } = nextCheckpoint(checkpoints, state);
  const title = `At ${unit(state)} ${number(at)}: one is written every ${plural(checkpoints.every, unit(state))}`;
  if (training) items.push(["Next checkpoint", { value: text, title }]);
  return items;
}

/** The cluster's name, which opens to its lease, its driver and versions. */
class About {
  constructor() {
    this.name = element("summary");
    this.list = element("ul");
    this.node = element("details", { class: "nbe-about" }, this.name, this.list);
    this.node.addEventListener("toggle", () => this.fill());
    /** @type {string[]} */
    this.facts = [];
  }

  draw(/** @type {KeyFrame} */ state, /** @type {number} */ now) {
    setText(this.name, state.name);
    this.facts = state.driver ? driverFacts(state.driver, now) : [];
    this.fill();
  }

  fill() {
    if (!this.node.open) return;
    const known = this.list.children;
    while (known.length > this.facts.length) known[known.length - 1].remove();
    while (known.length < this.facts.length) this.list.append(element("li"));
    for (const [i, fact] of this.facts.entries()) setText(known[i], fact);
  }
}

export class Overview {
  constructor() {
    this.phase = element("strong", { class: "nbe-phase" });
    this.reason = element("span", { class: "nbe-reason" });
    this.about = new About();
    this.since = element("span");
    this.losses = element("span", { class: "nbe-losses" });
    this.facts = element("dl", { class: "nbe-facts" });
    this.figures = new KeyedList(this.facts, (key) => new Figure(key.replace(REPORTED, "")));
    this.done = element("div", { class: "nbe-done" });
    this.bar = element("div", { class: "nbe-progress", role: "progressbar", "aria-label": "Steps done" }, this.done);
    this.announced = element("p", { class: "nbe-hidden", role: "status", "aria-label": "News" });
    const sentence = element("p", { class: "nbe-state" }, this.phase, " ", this.reason);
    const past = element("p", { class: "nbe-since" }, this.losses, this.since);
    const head = element("header", { class: "nbe-head" }, sentence, past, this.about.node);
    this.node = element("div", {}, head, this.facts, this.bar, this.announced);
    /** @type {?KeyFrame} */
    this.before = null;
  }

  draw(/** @type {KeyFrame} */ state, /** @type {Record<string, number>} */ counts, /** @type {number} */ now) {
    const training = Boolean(state.job) && !state.outcome;
    const ready = counts.ready ?? 0;
    const idle = state.phase === "waiting" && !training && ready >= state.min;
    const isNew = state.phase === "finished" && !state.events.length; // the driver's process starts
    setText(this.phase, idle ? "ready" : isNew ? "not started" : state.phase);
    setAttribute(this.phase, "data-tone", idle ? "good" : tone(state.phase));
    setText(this.reason, isNew ? "" : state.reason);
    setText(this.since, state.phase === "finished" ? "" : sinceFailure(state.failed_at, now));
    setText(this.losses, losses(state.summary, unit(state)));
    this.about.draw(state, now);
    this.figures.draw(this.items(state, training, ready, now), null);
    this.drawProgress(state, training ? state.total : null);
    this.announce(state);
  }

  /** Screen readers speak what has happened, also while the view is out of sight. */
  announce(/** @type {KeyFrame} */ state) {
    const text = this.before ? announcement(this.before, state) : "";
    if (text) setText(this.announced, text);
    this.before = state;
  }

  drawProgress(/** @type {KeyFrame} */ state, /** @type {?number} */ total) {
    setAttribute(this.bar, "hidden", total ? null : "");
    if (!total) return;
    const share = Math.min(100, (state.step * 100) / total);
    this.done.style.width = `${share.toFixed(2)}%`;
    setAttribute(this.bar, "aria-valuenow", String(Math.round(share)));
    setAttribute(this.bar, "aria-valuetext", `${number(state.step)} of ${number(total)} ${unit(state)}s`);
  }

  /** @param {KeyFrame} state @param {boolean} training @param {number} ready @param {number} now */
  items(state, training, ready, now) {
    const bounds = `at least ${state.min}, at most ${state.max ?? "any number of"} workers`;
    /** @type {[string, FigureContent][]} */
    const items = [];
    if (state.job) items.push(["Job", { value: `${state.job}${state.outcome ? ` ${state.outcome}` : ""}` }]);
    if (state.phase !== "finished") {
      const name = training ? "Workers" : "Workers ready";
      const value = sizeWithBounds(training ? state.world_size : ready, state.min, state.max);
      items.push([name, { value, title: bounds }]);
    }
    items.push(["Generation", { value: number(state.generation), title: "It grows by one with each change of the world" }]);
    items.push([
      capital(unit(state)),
      { value: state.total ? `${number(state.step)} of ${number(state.total)}` : number(state.step) },
    ]);
    if (training && state.steps_per_second !== null)
      items.push([`${capital(unit(state))}s per second`, { value: number(state.steps_per_second) }]);
    if (timeLeft(state)) items.push(["Time left", { value: timeLeft(state) }]);
    if (state.checkpoints) items.push(...checkpointFigures(state.checkpoints, state, now, training));
    if (training && state.copies) items.push(...copyFigures(state.copies, now));
    for (const [name, value] of Object.entries(state.report)) items.push([`${REPORTED}${name}`, { value: reported(value) }]);
    return items;
  }
}
