/** One host on the board: a row with its figures, its slots, and the buttons that remove it. */
/** @import { Gpu, Host } from "./contract.js" */
/** @import { RequestList } from "./request_list.js" */
/** @import { BoardContext } from "./slot_chip.js" */
/** @import { Timers } from "./timers.js" */
import { button, confirmedButton, element, setAttribute, setDisabled, setText } from "./dom.js";
import { duration, gpuText, megabytes, percent } from "./format.js";
import { KeyedList } from "./keyed_list.js";
import { SlotChip } from "./slot_chip.js";
import { slotsOf } from "./slots.js";
import { SIGNS, stateTone } from "./tones.js";

/**
 * @typedef {{send: RequestList["send"], timers: Timers, isOpen(chip: SlotChip): boolean,
 *   toggle(host: string, chip: SlotChip): void, detailId: string}} RowOwner
 */

/** A figure with a thin bar below it. */
class Meter {
  constructor(/** @type {string} */ name, classes = "") {
    this.text = element("span");
    this.bar = element("i", { class: "nbe-meter", "aria-hidden": "true" });
    this.small = element("small");
    const parts = [this.text, this.bar, this.small];
    this.node = element("td", { role: "cell", class: `nbe-usage ${classes}`.trim(), "data-label": name }, ...parts);
    this.share = -1;
  }

  draw(/** @type {string} */ text, /** @type {?number} */ share, small = "", title = "") {
    setText(this.text, text || "–");
    setText(this.small, small);
    setAttribute(this.node, "title", title || null);
    const rounded = share === null ? 0 : Math.min(100, Math.round(share));
    if (rounded !== this.share) this.bar.style.setProperty("--nbe-share", `${rounded}%`);
    this.share = rounded;
  }
}

export class HostRow {
  constructor(/** @type {RowOwner} */ owner, /** @type {string} */ name) {
    this.name = name;
    this.address = element("small");
    this.sign = element("span", { class: "nbe-sign", "aria-hidden": "true" });
    this.phase = element("span");
    this.reason = element("small");
    this.state = element(
      "td",
      { role: "cell", class: "nbe-hoststate" },
      element("span", {}, this.sign, this.phase),
      this.reason,
    );
    this.cpu = new Meter("CPU");
    this.memory = new Meter("Memory");
    this.gpu = new Meter("GPU", "nbe-gpu");
    this.slots = element("div", { class: "nbe-chips", role: "group", "aria-label": `Slots of ${name}` });
    const { isOpen, detailId } = owner;
    const chipOwner = { isOpen, detailId, toggle: (/** @type {SlotChip} */ chip) => owner.toggle(name, chip) };
    this.chips = new KeyedList(this.slots, () => new SlotChip(chipOwner));
    const request = (/** @type {boolean} */ now) =>
      owner.send({ order: "remove_host", host: name, now }, `remove ${name}${now ? " now" : ""}`);
    this.remove = button("Remove", () => request(false), "nbe-small", `Remove host ${name}`);
    this.remove.title = "Let its workers leave at the next commit";
    const label = `Remove ${name} now`;
    this.removeNow = confirmedButton(owner.timers, "Remove now", "Really?", () => request(true), "nbe-small nbe-danger", label);
    this.removeNow.title = "End its workers at once";
    this.row = element(
      "tr",
      { role: "row", class: "nbe-hostrow" },
      element("th", { role: "rowheader", scope: "row" }, element("span", {}, name), this.address),
      this.state,
      this.cpu.node,
      this.memory.node,
      this.gpu.node,
      element("td", { role: "cell", class: "nbe-slots" }, this.slots),
      element("td", { role: "cell", class: "nbe-actions" }, element("div", {}, this.remove, this.removeNow)),
    );
    this.node = element("tbody", { role: "rowgroup" }, this.row);
    this.before = "";
    this.reachable = { slots: true, buttons: true };
    /** @type {?Element} */
    this.tabStop = null;
    /** @type {?Gpu[]} */
    this.gpus = null;
  }

  draw(/** @type {Host} */ host, /** @type {BoardContext} */ context) {
    const { now, locked } = context;
    setText(this.address, host.address === this.name ? "" : host.address);
    setText(this.sign, SIGNS[host.phase] ?? "○");
    setText(this.phase, host.phase);
    setAttribute(this.state, "data-tone", stateTone(host.phase));
    let left = host.backoff_until > now ? `again in ${duration(host.backoff_until - now)}` : "";
    if (host.ends_at) left = `ends in ${duration(Math.max(0, host.ends_at - now))}`;
    setText(this.reason, [host.reason === host.phase ? "" : host.reason, left].filter(Boolean).join(" · "));
    setAttribute(this.row, "data-explained", (host.cpu ?? null) === null && this.reason.textContent ? "" : null);
    this.cpu.draw(percent(host.cpu), host.cpu);
    const full = host.memory && host.memory_total ? (host.memory * 100) / host.memory_total : null;
    this.memory.draw(megabytes(host.memory, host.memory_total), full);
    if (context.gpus) this.drawGpus(host.gpus);
    this.chips.draw(
      slotsOf(this.name, host).map((slot) => [slot.key, slot]),
      context,
    );
    if (!this.slots.contains(this.tabStop)) this.setTabStop(this.slots.firstElementChild);
    setDisabled(this.remove, locked || host.phase === "draining");
    setDisabled(this.removeNow, locked);
    if (this.before !== host.phase) context.changes.push(this.row);
    this.before = host.phase;
  }

  /** The tab key stops at this slot of the row only. */
  setTabStop(/** @type {?Element} */ chip) {
    if (this.tabStop) setAttribute(this.tabStop, "tabindex", "-1");
    this.tabStop = chip;
    this.drawTabStops();
  }

  /** Whether the tab key stops in this row at all. The arrow keys reach everything in it. */
  setReachable(/** @type {boolean} */ slots, /** @type {boolean} */ buttons) {
    this.reachable = { slots, buttons };
    this.drawTabStops();
  }

  drawTabStops() {
    const { slots, buttons } = this.reachable;
    if (this.tabStop) setAttribute(this.tabStop, "tabindex", slots ? "0" : "-1");
    for (const node of [this.remove, this.removeNow]) setAttribute(node, "tabindex", buttons ? null : "-1");
  }

  drawGpus(/** @type {Gpu[]} */ gpus) {
    if (gpus === this.gpus) return;
    this.gpus = gpus;
    if (!gpus.length) return this.gpu.draw("", null);
    const sum = (/** @type {0|1|2} */ i) => gpus.reduce((all, gpu) => all + (gpu[i] ?? 0), 0);
    const known = gpus.filter(([busy]) => busy !== null).length;
    const share = known ? sum(0) / known : null;
    const lines = gpus.map((gpu, i) => `GPU ${i}: ${gpuText(gpu)}`);
    const memory = sum(2) ? megabytes(1000 * sum(1), 1000 * sum(2)) : "";
    this.gpu.draw(percent(share), share, memory, lines.join("\n"));
  }
}
