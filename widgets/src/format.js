/** Numbers, times and names as text. */
/** @import { Checkpoints, Driver, Gpu, KeyFrame, Summary, Writer } from "./contract.js" */

export const plural = (/** @type {number} */ n, /** @type {string} */ word) => `${n} ${word}${n === 1 ? "" : "s"}`;

const GROUPED = new Intl.NumberFormat("en");

export const HUGE = 1e15; // all digits of a number as large as this, as of a loss that diverges, would fill the view

const rounded = (/** @type {number} */ n, /** @type {number} */ digits) => {
  const short = Number(n.toPrecision(digits));
  return Math.abs(n) < HUGE ? short.toString() : short.toExponential();
};

export function number(/** @type {number|string} */ n) {
  if (typeof n === "string") return n;
  return Number.isInteger(n) && Math.abs(n) < HUGE ? GROUPED.format(n) : rounded(n, 3);
}

/** A value that the program has reported: all five digits that the kernel sends. */
export function reported(/** @type {number|string} */ n) {
  if (typeof n === "string") return n;
  const isGrouped = Number.isInteger(n) || Math.abs(n) >= 1000;
  return isGrouped && Math.abs(n) < HUGE ? GROUPED.format(n) : rounded(n, 5);
}

/** `4 (2–8)`, `4 (always 4)` or `3 (at least 2)`. */
export function sizeWithBounds(/** @type {number} */ size, /** @type {number} */ min, /** @type {?number} */ max) {
  return `${size} (${max === null ? `at least ${min}` : min === max ? `always ${min}` : `${min}–${max}`})`;
}

/** `320 MB` or `3.3 GB`; with a total `0.5 / 128 GB`, in the total's unit. */
export function megabytes(/** @type {?number} */ n, /** @type {?number} */ total = null) {
  if (n === null || n === undefined) return "";
  const inGigabytes = (total ?? n) >= 1000;
  const text = (/** @type {number} */ m) =>
    inGigabytes ? (m / 1000).toFixed(m < 99_950 ? 1 : 0) : String(Math.round(m));
  return `${text(n)}${total ? ` / ${text(total)}` : ""}\u00a0${inGigabytes ? "GB" : "MB"}`;
}

/** `93 %, 61.0 / 80.0 GB, 71 °C`; `not known` if NVML cannot read it @param {Gpu} gpu */
export function gpuText([busy, used, total, heat]) {
  const memory = used !== null && total !== null && megabytes(1000 * used, 1000 * total);
  const texts = [percent(busy), memory, heat !== null && `${heat}\u00a0°C`];
  return texts.filter(Boolean).join(", ") || "not known";
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

const DAY = new Intl.DateTimeFormat("en", { day: "numeric", month: "short" });
const dayOf = (/** @type {number} */ seconds) => new Date(seconds * 1000).toDateString();

/** `14:05:31`; with its day, `Nov 26, 14:05:31`, if that is not the day of `now`. */
export function momentOf(/** @type {number} */ seconds, /** @type {number} */ now) {
  const time = timeOfDay(seconds);
  return dayOf(seconds) === dayOf(now) ? time : `${DAY.format(new Date(seconds * 1000))}, ${time}`;
}

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

/** What the progress counts: commits, which are steps unless the program reports a step of its own, as Lightning does. */
export const unit = (/** @type {KeyFrame} */ { report }) => ("step" in report ? "commit" : "step");

export const capital = (/** @type {string} */ text) => `${text[0].toUpperCase()}${text.slice(1)}`;

/** How much longer the job takes, as text; empty if that is unknown. */
export function timeLeft(/** @type {KeyFrame} */ state) {
  const { step, total, steps_per_second: speed } = state;
  if (!state.job || state.outcome || !total || !speed || step >= total) return "";
  return `about ${duration((total - step) / speed)}`;
}

/** `0 steps lost in 3 failures · trained 98.7 % of the time`; a number that is not known is left out. */
export function losses(/** @type {?Summary} */ summary, unitName = "step") {
  const { failures = 0, lost, trained } = summary ?? {};
  const parts = [];
  if (failures && typeof lost === "number") parts.push(`${plural(lost, unitName)} lost in ${plural(failures, "failure")}`);
  if (typeof trained === "number") parts.push(`trained ${trained}\u00a0% of the time`);
  return parts.join(" · ");
}

/** `1,200 · 12 s old · 35 MB`, or `none yet`. */
export function newestCheckpoint(/** @type {Checkpoints} */ { commit, made_at, size }, /** @type {number} */ now) {
  if (typeof commit !== "number") return "none yet"; // a patch deletes what is null
  const space = size < 1 ? `${Math.max(1, Math.round(size * 1000))}\u00a0kB` : megabytes(size);
  return `${number(commit)} · ${duration(now - made_at)} old · ${space}`;
}

/** When the next checkpoint is due: `in 12 s`, or `at 1,300` if the speed is not known. */
export function nextCheckpoint(/** @type {Checkpoints} */ { every }, /** @type {KeyFrame} */ state) {
  const at = (Math.floor(state.step / every) + 1) * every;
  const speed = state.steps_per_second;
  return { at, text: speed ? `in ${duration((at - state.step) / speed)}` : `at ${number(at)}` };
}

/** How long the cluster lives, its driver, and the versions: a sentence for each. */
export function driverFacts(/** @type {Driver} */ { pid, since, restarts, lease, versions }, /** @type {number} */ now) {
  const kept = typeof lease === "number";
  const life = kept ? `Kept for ${duration(lease)} after the last notebook or terminal has left` : "Ends with its kernel";
  const again = restarts ? `, restarted ${restarts === 1 ? "once" : `${restarts} times`}` : "";
  const known = Object.entries(versions).filter(([, version]) => version);
  return [
    life,
    `Driver: process ${pid}, since ${momentOf(since, now)} (${duration(now - since)})${again}`,
    known.map(([name, version]) => `${name} ${version}`).join(", "),
  ];
}

export function sinceFailure(/** @type {?number} */ failedAt, /** @type {number} */ now) {
  return failedAt === null ? "no failure yet" : `${duration(now - failedAt)} since the last failure`;
}
