/** The state that a view shows: a key frame and the change since then. */
/** @import { Change, KeyFrame } from "./contract.js" */

/** Apply a JSON merge patch (RFC 7386). Parts that the patch does not name stay the same objects. @returns {any} */
export function merge(/** @type {any} */ target, /** @type {any} */ patch) {
  const isObject = (/** @type {any} */ x) => typeof x === "object" && x !== null && !Array.isArray(x);
  if (!isObject(patch)) return patch;
  const merged = new Map(isObject(target) ? Object.entries(target) : []); // in an object, `__proto__` is not a name like others
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) merged.delete(name);
    else merged.set(name, merge(merged.get(name), value));
  }
  return Object.fromEntries(merged);
}

/** @type {KeyFrame} */
const EMPTY = {
  n: 0,
  time: 0,
  name: "",
  phase: "",
  reason: "",
  generation: 0,
  world_size: 0,
  min: 0,
  max: null,
  job: null,
  outcome: "",
  step: 0,
  total: null,
  steps_per_second: null,
  report: {},
  failed_at: null,
  copies: null,
  checkpoints: null,
  summary: null,
  driver: null,
  hosts: {},
  events: [],
  orders: [],
};

/**
 * The key frame with the change that belongs to it. A missing field is null or empty.
 * @param {KeyFrame | undefined} frame @param {Change | undefined} change @returns {KeyFrame}
 */
export function currentState(frame, change) {
  const state = frame && change && change.base === frame.n ? merge(frame, change.patch ?? {}) : frame;
  return { ...EMPTY, ...state };
}

const MAX_DELAY = 30; // seconds; a message that seems to be older shows that one of the clocks was set

/**
 * By how many seconds this clock is ahead of the kernel's, after a message with the offset `seen`. A delayed message has a
 * larger offset, so the smallest offset is the most exact.
 */
export const clockOffset = (/** @type {number} */ known, /** @type {number} */ seen) =>
  seen > known + MAX_DELAY ? seen : Math.min(known, seen);
