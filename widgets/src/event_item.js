/** One event in the list of the timeline. A change of the world opens to its phases and reasons. */
/** @import { Event as ClusterEvent } from "./contract.js" */
import { element, setText } from "./dom.js";
import { categories, reasonsFor, waterfall } from "./events.js";
import { milliseconds, momentOf } from "./format.js";
import { tone } from "./tones.js";

const EVENT_SIGNS = { bad: "✕", good: "●", busy: "◔", quiet: "·" };

export class EventItem {
  /** @param {ClusterEvent} event @param {() => ClusterEvent[]} events all that are known, oldest first */
  constructor(event, events) {
    const eventTone = tone(event.kind);
    const sign = element("span", { class: "nbe-sign", "aria-hidden": "true" }, EVENT_SIGNS[eventTone]);
    this.event = event;
    this.drawnAt = -1; // the quarter of an hour in which its time was drawn last: midnights of all time zones begin one
    this.time = element("time", { datetime: new Date(event.time * 1000).toISOString() });
    const all = event.took?.all;
    const text = element("span", {}, event.text, all === undefined ? "" : ` · ${milliseconds(all)} in all`);
    const attributes = { "data-tone": eventTone, "data-kinds": categories(event), title: event.kind };
    const kind = element("span", { class: "nbe-hidden" }, event.kind); // screen readers do not read a tooltip
    this.node = element("li", attributes, this.time, sign, kind);
    if (!Object.keys(event.took ?? {}).length) {
      this.node.append(text);
      return;
    }
    const details = element("details", {}, element("summary", {}, text));
    const fill = () => details.childElementCount === 1 && details.append(...explanation(event, events()));
    details.addEventListener("toggle", fill);
    this.node.append(details);
  }

  /** An event does not change; after midnight its time has a day. */
  draw(/** @type {ClusterEvent} */ _, /** @type {number} */ now) {
    const quarter = Math.floor(now / 900);
    if (quarter !== this.drawnAt) setText(this.time, momentOf(this.event.time, now));
    this.drawnAt = quarter;
  }
}

/** The duration of each phase of a change, and the reasons for the change. */
function explanation(/** @type {ClusterEvent} */ event, /** @type {ClusterEvent[]} */ events) {
  const caption = element("caption", { class: "nbe-hidden" }, "How long each phase took");
  const table = element("table", { class: "nbe-waterfall" }, caption, element("tbody", {}, ...phaseRows(event.took)));
  const reasons = reasonsFor(event, events);
  if (!reasons.length) return [table];
  const list = element("ul", { class: "nbe-why" }, ...reasons.map((reason) => element("li", {}, reason)));
  return [element("div", { class: "nbe-why" }, element("b", {}, "Why"), list), table];
}

function phaseRows(/** @type {Record<string, number>} */ took) {
  const rows = waterfall(took).map(({ name, ms, from, share }) => {
    const bar = element("i", { class: "nbe-span" });
    bar.style.marginLeft = `${from.toFixed(2)}%`;
    bar.style.width = `${share.toFixed(2)}%`;
    return element(
      "tr",
      {},
      element("th", { scope: "row" }, name),
      element("td", {}, milliseconds(ms)),
      element("td", { "aria-hidden": "true" }, ...(share ? [bar] : [])),
    );
  });
  if (took.all !== undefined) {
    const cells = [element("th", { scope: "row" }, "all"), element("td", {}, milliseconds(took.all)), element("td")];
    rows.push(element("tr", { class: "nbe-all" }, ...cells));
  }
  return rows;
}
