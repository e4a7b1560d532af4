/** One slot on the board, as a button that opens its details. */
/** @import { KeyFrame } from "./contract.js" */
/** @import { Slot } from "./slots.js" */
import { element, setAttribute, setText } from "./dom.js";
import { duration, megabytes, number, percent, plural, unit } from "./format.js";
import { stateOf } from "./slots.js";
import { SIGNS, stateTone } from "./tones.js";

/** @type {Record<string, string>} */
const SHORT_NAMES = { starting: "start", succeeded: "done", stopped: "stop", backoff: "wait" };

/**
 * What the parts of the board share while they are drawn. `roomy`: few slots, each with more detail. `changes`: nodes to
 * highlight. `locked`: no requests; `closed`: no queries either.
 * @typedef {{state: KeyFrame, now: number, roomy: boolean, gpus: boolean, locked: boolean, closed: boolean,
 *   changes: Element[]}} BoardContext
 * @typedef {{isOpen(chip: SlotChip): boolean, toggle(chip: SlotChip): void, detailId: string}} ChipOwner
 */

const NO_WORKER = { rank: null, behind: 0, restarts: 0, cpu: null, memory: null, gpu: null, reason: "" };

const joined = (/** @type {(string|number|false|null)[]} */ parts, /** @type {string} */ separator) =>
  parts.filter(Boolean).join(separator);

export class SlotChip {
  constructor(/** @type {ChipOwner} */ owner) {
    this.sign = element("span", { class: "nbe-sign", "aria-hidden": "true" });
    this.name = element("b");
    this.word = element("span", { class: "nbe-word" });
    this.more = element("small");
    this.node = element(
      "button",
      { type: "button", class: "nbe-chip", tabindex: "-1" },
      this.sign,
      this.name,
      this.word,
      this.more,
    );
    this.node.addEventListener("click", () => owner.toggle(this));
    this.owner = owner;
    this.drawn = ""; // all that was drawn last, as one text
    this.state = "";
    this.id = "";
    /** @type {?Slot} */
    this.slot = null;
  }

  draw(/** @type {Slot} */ slot, /** @type {BoardContext} */ context) {
    this.slot = slot;
    const { rank, behind, restarts, reason } = slot.worker ?? NO_WORKER;
    const state = stateOf(slot, context.now);
    const more = this.moreText(slot, state, context);
    const isOpen = this.owner.isOpen(this);
    const face = `${rank}|${state}|${behind}|${restarts}|${more}|${isOpen}|${reason}|${slot.id}`;
    if (face === this.drawn) return;
    this.drawn = face;
    const { roomy } = context;
    setAttribute(this.node, "data-rank", rank === null ? null : "");
    setText(this.sign, SIGNS[state] ?? "?");
    setText(
      this.name,
      rank !== null ? String(rank) : roomy ? `slot ${slot.slot}` : (SHORT_NAMES[state] ?? state),
    );
    setText(this.word, roomy ? joined([state, behind && `${behind} behind`, restarts && `↻${restarts}`], " · ") : "");
    setText(this.more, more);
    const description = this.description(slot, state, context.now);
    setAttribute(this.node, "aria-label", description);
    setAttribute(this.node, "title", description);
    setAttribute(this.node, "data-state", state);
    setAttribute(this.node, "data-tone", stateTone(state));
    setAttribute(this.node, "data-behind", behind ? "" : null);
    setAttribute(this.node, "aria-expanded", String(isOpen));
    setAttribute(this.node, "aria-controls", isOpen ? this.owner.detailId : null);
    if (this.state !== state || this.id !== slot.id) context.changes.push(this.node);
    this.state = state;
    this.id = slot.id;
  }

  moreText(/** @type {Slot} */ slot, /** @type {string} */ state, /** @type {BoardContext} */ context) {
    const { behind, restarts, cpu, memory, gpu } = slot.worker ?? NO_WORKER;
    if (!context.roomy) return joined([behind && `−${behind}`, restarts && `↻${restarts}`], " ");
    const step = state === "running" ? `${unit(context.state)} ${number(Math.max(0, context.state.step - behind))}` : "";
    const left = state === "backoff" && `${duration(slot.backoffUntil - context.now)} left`;
    const ofGpu = gpu && gpu.figures[0] !== null && `GPU ${percent(gpu.figures[0])}`;
    return joined([step, percent(cpu), megabytes(memory), ofGpu, left], " · ");
  }

  /** The tooltip, also for screen readers. */
  description(/** @type {Slot} */ slot, /** @type {string} */ state, /** @type {number} */ now) {
    const { rank, behind, restarts, reason } = slot.worker ?? NO_WORKER;
    const parts = [
      rank === null ? `slot ${slot.slot}` : `rank ${rank}, slot ${slot.slot}`,
      state,
      state === "backoff" && `for ${duration(slot.backoffUntil - now)}`,
      behind && `${plural(behind, "commit")} behind`,
      restarts && plural(restarts, "restart"),
      reason,
    ];
    return joined(parts, ", ");
  }
}
