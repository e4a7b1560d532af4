/** Values that the timeline and the announcements derive from events. */
/** @import { Event, KeyFrame } from "./contract.js" */
import { plural } from "./format.js";
import { FAILURE } from "./tones.js";

/** The text for screen readers when `before` becomes `after`: phases, sizes and losses, not each number. */
export function announcement(/** @type {KeyFrame} */ before, /** @type {KeyFrame} */ after) {
  const sentences = [];
  if (after.phase !== before.phase) sentences.push(`${after.phase}: ${after.reason}`);
  else if (after.world_size !== before.world_size) sentences.push(`${plural(after.world_size, "worker")} in the world`);
  const [known, newest] = [before, after].map(({ events }) => events[events.length - 1]?.n ?? 0);
  const last = newest < known ? 0 : known; // a cluster that is started again numbers its events anew
  const isNewFailure = (/** @type {Event} */ event) => event.n > last && FAILURE.test(event.kind);
  const losses = withoutRepeats(after.events.filter(isNewFailure)).map((event) => event.text);
  sentences.push(...losses.slice(0, 3));
  if (losses.length > 3) sentences.push(`and ${losses.length - 3} more`);
  return sentences.join(". ");
}

/** The number of the newest event directly before which events are missing; 0 if none are. */
export function firstAfterGap(/** @type {Event[]} */ events) {
  for (let i = events.length - 1; i > 0; i -= 1) if (events[i - 1].n < events[i].n - 1) return events[i].n;
  return 0;
}

/** A loss and the break of the world that it causes have the same text: keep the first of such neighbours. */
export function withoutRepeats(/** @type {Event[]} */ events) {
  return events.filter((event, i) => !i || event.text !== events[i - 1].text || !FAILURE.test(event.kind));
}

/** `change` (of the world), `failure`, both or neither. The timeline's filter uses it. */
export function categories(/** @type {Event} */ event) {
  const change = Object.keys(event.took ?? {}).length > 0 || /^(world-|training|change-|scaled)/.test(event.kind);
  const failure = FAILURE.test(event.kind);
  return [change ? "change" : "", failure ? "failure" : ""].filter(Boolean).join(" ");
}

/**
 * The size of the world over time as a step line in a box of 100 by 100, with the place of each event and a lane per host.
 * @param {Event[]} events oldest first @param {number} now @param {number} seconds of the time before `now` to show
 */
export function sizeChart(events, now, seconds = Infinity) {
  if (!events.length) return null;
  const to = Math.max(now, events[events.length - 1].time, events[0].time + 1);
  const from = Math.max(events[0].time, to - seconds);
  const shown = events.filter((event) => event.time >= from);
  const before = events[events.length - shown.length - 1];
  let size = before?.size ?? events[0].size ?? 0;
  const largest = Math.max(1, size, ...shown.map((event) => event.size ?? 0));
  const x = (/** @type {number} */ time) => +(((Math.max(from, time) - from) * 100) / (to - from)).toFixed(2);
  const y = (/** @type {number} */ size) => +(100 - (size * 100) / largest).toFixed(2);
  let path = `M0 ${y(size)}`;
  for (const event of shown) {
    if (event.size === undefined || event.size === size) continue;
    size = event.size;
    path += `H${x(event.time)}V${y(size)}`;
  }
  const marks = shown.map((event) => ({ event, x: x(event.time) }));
  const lanes = hostLanes(events, to).map((lane) => ({
    ...lane,
    spans: lane.spans.map(([start, end]) => [x(start), x(end)]).filter(([start, end]) => end > start),
    losses: lane.losses.filter(({ time }) => time >= from).map((event) => x(event.time)),
  }));
  return { from, to, largest, size, path: `${path}H100`, marks, lanes };
}

export const FEW_LANES = 8; // with more hosts than this, the lanes are sorted
const UP = /^host-(up|reconnected)$/;
const DOWN = /^host-(lost|gone|refused|unreachable|disconnected)$/;

/**
 * For each host the times at which it was up, and the losses on it; of many hosts those with losses and the newest ones come first.
 * @param {Event[]} events oldest first @param {number} to @returns {{host: string, spans: number[][], losses: Event[]}[]}
 */
export function hostLanes(events, to) {
  /** @type {Map<string, {host: string, spans: number[][], losses: Event[], isUp: boolean}>} */
  const lanes = new Map();
  const isWhole = events[0]?.n === 1;
  for (const event of events) {
    if (!event.host) continue;
    let lane = lanes.get(event.host);
    if (!lane) {
      // Its beginning may be older than the events: then it was up.
      const isUp = !isWhole && (!/^host-|^environment-/.test(event.kind) || DOWN.test(event.kind));
      lane = { host: event.host, spans: isUp ? [[events[0].time, to]] : [], losses: [], isUp };
      lanes.set(event.host, lane);
    }
    if (UP.test(event.kind) && !lane.isUp) lane.spans.push([event.time, to]);
    if (DOWN.test(event.kind) && lane.isUp) lane.spans[lane.spans.length - 1][1] = event.time;
    lane.isUp = UP.test(event.kind) || (lane.isUp && !DOWN.test(event.kind));
    if (FAILURE.test(event.kind)) lane.losses.push(event);
  }
  const all = [...lanes.values()];
  if (all.length <= FEW_LANES) return all;
  const last = (/** @type {{spans: number[][]}} */ { spans }) => spans[spans.length - 1]?.[1] ?? 0;
  return all.sort((a, b) => b.losses.length - a.losses.length || last(b) - last(a));
}

const BESIDE_TRAINING = "prepare"; // this phase delays no step, so it is not a part of the whole

/** The phases of a change in the order in which the kernel sends them: start and length in percent of the whole. */
export function waterfall(/** @type {Record<string, number>} */ took) {
  const phases = Object.entries(took).filter(([name]) => name !== "all");
  const sum = phases.reduce((sum, [name, ms]) => sum + (name === BESIDE_TRAINING ? 0 : ms), 0);
  const whole = Math.max(sum, took.all ?? 0, 0.001);
  let start = 0;
  return phases.map(([name, ms]) => {
    if (name === BESIDE_TRAINING) return { name, ms, from: 0, share: 0 };
    const bar = { name, ms, from: (start * 100) / whole, share: (ms * 100) / whole };
    start += ms;
    return bar;
  });
}

/** The reasons for the change that ends with `event`: the newest texts since the change before it, oldest first. */
export function reasonsFor(/** @type {Event} */ event, /** @type {Event[]} */ events) {
  /** @type {string[]} */
  const reasons = [];
  for (let i = events.findIndex((other) => other.n === event.n) - 1; i >= 0 && reasons.length < 4; i -= 1) {
    if (events[i].took?.all !== undefined || /^job-/.test(events[i].kind)) break;
    if (/lost|broken|planned|removed|added|changed|scaled|killed|gone|failed/.test(events[i].kind)) {
      if (!reasons.includes(events[i].text)) reasons.unshift(events[i].text);
    }
  }
  return reasons;
}
