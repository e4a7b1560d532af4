/** Numbers, times and names as text. */
/** @import { KeyFrame, Writer } from "./contract.js" */

export const plural = (/** @type {number} */ n, /** @type {string} */ word) => `${n} ${word}${n === 1 ? "" : "s"}`;

const GROUPED = new Intl.NumberFormat("en");

export function number(/** @type {number|string} */ n) {
  if (typeof n === "string") return n;
  return Number.isInteger(n) ? GROUPED.format(n) : Number(n.toPrecision(3)).toString();
}

/** `4 / 2–8`, `4 / 4` or `3 / 2+`. */
export function sizeWithBounds(/** @type {number} */ size, /** @type {number} */ min, /** @type {?number} */ max) {
  return `${size} / ${max === null ? `${min}+` : min === max ? min : `${min}–${max}`}`;
}

/** `320 MB` or `3.3 GB`; with a total `0.5 / 128 GB`, in the total's unit. */
export function megabytes(/** @type {?number} */ n, /** @type {?number} */ total = null) {
  if (n === null || n === undefined) return "";
  const inGigabytes = (total ?? n) >= 1000;
  const text = (/** @type {number} */ m) =>
    inGigabytes ? (m / 1000).toFixed(m < 99_950 ? 1 : 0) : String(Math.round(m));
  return `${text(n)}${total ? ` / ${text(total)}` : ""}\u00a0${inGigabytes ? "GB" : "MB"}`;
}

export const percent = (/** @type {?number} */ n) => (n === null || n === undefined ? "" : `${Math.round(n)}\u00a0%`);

/** `8 s`, `3 min`, `2 h 5 min`, `1 d 3 h`. */
export function duration(/** @type {number} */ seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 120) return `${s} s`;
  const minutes = Math.floor(s / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  return hours % 24 ? `${Math.floor(hours / 24)} d ${hours % 24} h` : `${hours / 24} d`;
}

export function milliseconds(/** @type {number} */ ms) {
  if (ms >= 10_000) return `${(ms / 1000).toFixed(1)} s`;
  return `${ms < 10 ? Number(ms.toFixed(1)) : GROUPED.format(Math.round(ms))} ms`;
}

/** `14:05:31`, in the reader's time zone; `seconds` since 1970. */
export const timeOfDay = (/** @type {number} */ seconds) => new Date(seconds * 1000).toTimeString().slice(0, 8);

/** `2026-11-26 14:05:31`, in the reader's time zone; `seconds` since 1970. */
export function dateAndTime(/** @type {number} */ seconds) {
  const date = new Date(seconds * 1000);
  const parts = [date.getFullYear(), date.getMonth() + 1, date.getDate()].map((n) => String(n).padStart(2, "0"));
  return `${parts.join("-")} ${timeOfDay(seconds)}`;
}

/** Sorted numbers with neighbours joined: `0–3, 6`. */
export function ranges(/** @type {number[]} */ numbers) {
  const sorted = [...new Set(numbers)].sort((a, b) => a - b);
  /** @type {number[][]} */
  const runs = [];
  for (const n of sorted) {
    const run = runs[runs.length - 1];
    if (run && run[1] === n - 1) run[1] = n;
    else runs.push([n, n]);
  }
  return runs.map(([a, b]) => (a === b ? `${a}` : b === a + 1 ? `${a}, ${b}` : `${a}–${b}`)).join(", ");
}

/** `rank 0` or `ranks 0–3`; a worker without a rank is named by its id. */
export function rankNames(/** @type {Writer[]} */ writers) {
  const ranks = writers.flatMap(([, rank]) => (rank === null || rank === undefined ? [] : [rank]));
  const others = writers.filter(([, rank]) => rank === null || rank === undefined).map(([id]) => id);
  const names = ranks.length ? [`${ranks.length === 1 ? "rank" : "ranks"} ${ranges(ranks)}`] : [];
  return [...names, ...others.slice(0, 3), ...(others.length > 3 ? [`${others.length - 3} more`] : [])].join(", ");
}

/** How much longer the job takes, as text; empty if that is unknown. */
export function timeLeft(/** @type {KeyFrame} */ state) {
  const { step, total, steps_per_second: speed } = state;
  if (!state.job || state.outcome || !total || !speed || step >= total) return "";
  return `about ${duration((total - step) / speed)}`;
}

export function sinceFailure(/** @type {?number} */ failedAt, /** @type {number} */ now) {
  return failedAt === null ? "no failure yet" : `${duration(now - failedAt)} since the last failure`;
}
