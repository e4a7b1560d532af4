/** The board: hosts, their slots and the workers in them. */
/** @import { Host, KeyFrame } from "./contract.js" */
/** @import { RequestList } from "./request_list.js" */
/** @import { BoardContext, SlotChip } from "./slot_chip.js" */
/** @import { Timers } from "./timers.js" */
import { element, highlight, setAttribute, setText } from "./dom.js";
import { number } from "./format.js";
import { HostFilter } from "./host_filter.js";
import { HostRow } from "./host_row.js";
import { KeyedList } from "./keyed_list.js";
import { SlotDetail } from "./slot_detail.js";
import { slotsOf, stateOf } from "./slots.js";
import { SIGNS, stateTone } from "./tones.js";

const ROOMY = 16; // up to so many slots, each shows more detail
const MAX_HIGHLIGHTS = 24; // if more change at once, none is highlighted

/**
 * @typedef {{send: RequestList["send"], timers: Timers, openLog(worker: string): void, redraw(): void,
 *   id: string}} BoardOwner
 */

export class Board {
  constructor(/** @type {BoardOwner} */ owner) {
    const { send, timers, openLog, id } = owner;
    this.redraw = owner.redraw;
    /** @type {?SlotChip} */
    this.openChip = null;
    this.legend = element("span", { class: "nbe-legend" });
    /** @type {KeyedList<number, null>} */
    this.counts = new KeyedList(this.legend, (state) => this.makeCount(state));
    this.table = this.makeTable();
    this.filter = new HostFilter(() => this.redraw());
    this.node = element("div", { class: "nbe-board" }, this.filter.node, this.table);
    const detailId = `${id}detail`;
    this.detail = new SlotDetail({ send, timers, openLog, close: () => this.closeDetail(), detailId });
    const rowOwner = {
      ...{ send, timers, detailId },
      isOpen: (/** @type {SlotChip} */ chip) => this.openChip === chip,
      toggle: (/** @type {string} */ host, /** @type {SlotChip} */ chip) => this.toggle(host, chip),
    };
    /** @type {KeyedList<Host, BoardContext>} */
    this.hosts = new KeyedList(this.table, (name) => new HostRow(rowOwner, name));
    this.table.addEventListener("keydown", (event) => this.moveFocus(event));
    // The tab key stops once in each row, at the slot that had the focus last; with many slots once in the table.
    this.table.addEventListener("focusin", ({ target }) => {
      const row = target instanceof Element && target.closest(".nbe-hostrow") && this.rowOf(target);
      if (!row) return;
      this.tabRow = row;
      if (target.closest(".nbe-chip")) row.setTabStop(target);
      this.drawTabStops();
    });
    /** @type {?HostRow} the row that had the focus last */
    this.tabRow = null;
    this.roomy = true;
    this.isFirst = true;
  }

  makeTable() {
    const hint = element("span", { class: "nbe-hidden" }, ". The arrow keys move from slot to slot.");
    const caption = element("caption", { class: "nbe-title" }, element("span", {}, "Hosts"), hint, this.legend);
    const head = ["Host", "State", "CPU", "Memory", "GPU", "Slots", "Actions"].map((name) =>
      element("th", { role: "columnheader", scope: "col", class: name === "GPU" ? "nbe-gpu" : "" }, name),
    );
    const thead = element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...head));
    return element("table", { role: "table", class: "nbe-table" }, caption, thead);
  }

  makeCount(/** @type {string} */ state) {
    const sign = element("span", { class: "nbe-sign", "aria-hidden": "true" }, SIGNS[state] ?? "?");
    const text = element("span");
    const draw = (/** @type {number} */ n) => setText(text, `${number(n)} ${state}`);
    return { node: element("span", { "data-tone": stateTone(state) }, sign, text), draw };
  }

  /** How many slots there are in each state. */
  count(/** @type {KeyFrame} */ state, /** @type {number} */ now) {
    /** @type {Record<string, number>} */
    const counts = {};
    for (const [name, host] of Object.entries(state.hosts)) {
      for (const slot of slotsOf(name, host)) {
        const slotState = stateOf(slot, now);
        counts[slotState] = (counts[slotState] ?? 0) + 1;
      }
    }
    return counts;
  }

  /** @param {KeyFrame} state @param {Record<string, number>} counts @param {number} now @param {boolean} closed */
  draw(state, counts, now, closed) {
    const hosts = Object.entries(state.hosts);
    const roomy = Object.values(counts).reduce((sum, n) => sum + n, 0) <= ROOMY;
    const gpus = hosts.some(([, host]) => host.gpus.length > 0);
    const locked = closed || state.phase === "finished" || state.phase === "stopping";
    /** @type {BoardContext} */
    const context = { state, now, roomy, gpus, locked, closed, changes: [] };
    setAttribute(this.table, "data-gpus", gpus ? "" : null);
    setAttribute(this.table, "data-roomy", roomy ? "" : null);
    setAttribute(this.node, "data-many", roomy ? null : "");
    const states = Object.keys(SIGNS).filter((slotState) => counts[slotState]);
    this.counts.draw(
      states.map((slotState) => [slotState, counts[slotState]]),
      null,
    );
    this.hosts.draw(this.filter.apply(hosts, now), context);
    this.roomy = roomy;
    this.drawTabStops();
    if (!this.isFirst && context.changes.length <= MAX_HIGHLIGHTS) context.changes.forEach(highlight);
    this.isFirst = false;
    if (this.openChip && !this.openChip.node.isConnected) this.closeDetail();
    if (this.openChip?.slot) this.detail.draw(this.openChip.slot, context);
  }

  /** With many slots the tab key stops once in the table: the arrow keys go on from there, to the buttons too. */
  drawTabStops() {
    const rows = /** @type {HostRow[]} */ ([...this.hosts.parts.values()]);
    if (!this.tabRow || !rows.includes(this.tabRow)) this.tabRow = rows[0] ?? null;
    for (const row of rows) row.setReachable(this.roomy || row === this.tabRow, this.roomy);
  }

  rowOf(/** @type {Element} */ node) {
    const rows = /** @type {Iterable<HostRow>} */ (this.hosts.parts.values());
    return [...rows].find((row) => row.node.contains(node));
  }

  /** Open the details of a slot, or close them. */
  toggle(/** @type {string} */ host, /** @type {SlotChip} */ chip) {
    if (this.openChip === chip) return this.closeDetail();
    this.openChip = chip;
    this.hosts.parts.get(host)?.node.append(this.detail.node);
    this.redraw();
  }

  closeDetail() {
    const chip = this.openChip;
    const hadFocus = this.detail.node.contains(document.activeElement);
    this.openChip = null;
    this.detail.node.remove();
    if (hadFocus) chip?.node.focus();
    this.redraw();
  }

  /** The arrow keys: left and right through all slots and buttons, up and down from host to host. */
  moveFocus(/** @type {KeyboardEvent} */ event) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const move = moves[/** @type {keyof typeof moves} */ (event.key)];
    const from = event.target instanceof Element ? event.target.closest(".nbe-chip, .nbe-actions button") : null;
    if (!move || !from) return;
    event.preventDefault();
    const parts = (/** @type {Element} */ row) => [...row.querySelectorAll(".nbe-chip, .nbe-actions button")];
    const rows = Array.from(this.table.querySelectorAll(".nbe-hostrow"), parts);
    const row = rows.findIndex((parts) => parts.includes(from));
    const all = rows.flat();
    const vertical = rows[row + move[0]]?.[Math.min(rows[row].indexOf(from), rows[row + move[0]].length - 1)];
    const next = move[1] ? all[all.indexOf(from) + move[1]] : vertical;
    if (next instanceof HTMLElement) next.focus();
  }
}
