/** Chooses the hosts that the board shows, and their order: for clusters of many hosts. */
/** @import { Host } from "./contract.js" */
import { element, setText } from "./dom.js";
import { plural } from "./format.js";
import { slotsOf, stateOf } from "./slots.js";

const MANY = 8; // with more hosts than this, the filter is shown

/** @typedef {[string, Host][]} Hosts */

/** Whether a host, or a worker on it, needs attention: it is not up, a slot has failed or waits, or a worker is behind. */
export function hasProblem(/** @type {string} */ name, /** @type {Host} */ host, /** @type {number} */ now) {
  if (host.phase !== "up") return true;
  return slotsOf(name, host).some((slot) => {
    return Boolean(slot.worker?.behind) || /failed|lost|backoff/.test(stateOf(slot, now));
  });
}

/** The hosts whose name, address or ranks match `text`. @param {Hosts} hosts @param {string} text */
export function matching(hosts, text) {
  const searched = text.trim().toLowerCase();
  if (!searched) return hosts;
  const rank = /^rank\s*(\d+)$/.exec(searched)?.[1];
  if (rank) return hosts.filter(([, host]) => Object.values(host.workers).some((worker) => String(worker[0]) === rank));
  return hosts.filter(([name, { address }]) => `${name} ${address}`.toLowerCase().includes(searched));
}

export class HostFilter {
  constructor(/** @type {() => void} */ onChange) {
    const search = { type: "search", placeholder: "Host, or rank 17", "aria-label": "Find hosts", spellcheck: "false" };
    this.search = element("input", search);
    const options = Object.entries({ plain: "in order", first: "problems first", only: "only problems" });
    this.order = element("select", { "aria-label": "Order of hosts" }, ...options.map(([value, text]) => element("option", { value }, text)));
    this.note = element("span", { class: "nbe-note", role: "status" });
    const bar = { class: "nbe-bar nbe-hostfilter", hidden: "" };
    this.node = element("div", bar, this.search, this.order, this.note);
    this.search.addEventListener("input", onChange);
    this.order.addEventListener("change", onChange);
  }

  /** The hosts to show. @param {Hosts} hosts @param {number} now @returns {Hosts} */
  apply(hosts, now) {
    this.node.hidden = hosts.length <= MANY;
    if (this.node.hidden) return hosts;
    const isBad = new Set(hosts.filter(([name, host]) => hasProblem(name, host, now)).map(([name]) => name));
    let shown = matching(hosts, this.search.value);
    const [bad, good] = [shown.filter(([name]) => isBad.has(name)), shown.filter(([name]) => !isBad.has(name))];
    if (this.order.value !== "plain") shown = this.order.value === "first" ? [...bad, ...good] : bad;
    const share = shown.length === hosts.length ? "" : `${shown.length} of ${hosts.length} shown · `;
    setText(this.note, `${share}${isBad.size ? `${plural(isBad.size, "host")} with problems` : "no problems"}`);
    return shown;
  }
}
