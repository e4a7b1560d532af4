/** What rank 0 reported over the job, as the kernel sends it: in at most 2,000 rows. */
/** @import { KeyFrame, ReportsAnswer } from "./contract.js" */

const [STEP, TIME, GENERATION, SIZE, VALUES] = [0, 1, 2, 3, 4]; // places in a row
const RATE_TIME = 5; // seconds over which the steps per second are a mean

/**
 * @typedef {(number|null)[]} Row
 * @typedef {{step: number, time: number, generation: number, size: number, before: number}} WorldChange
 */

export class ReportTable {
  constructor() {
    this.version = "";
    /** @type {string[]} */
    this.names = [];
    /** @type {Row[]} */
    this.rows = [];
  }

  /** Take in an answer, and return whether it has changed anything. */
  apply(/** @type {ReportsAnswer} */ { version, start, names, rows }) {
    const isNew = version !== this.version;
    if (!isNew && !rows.length && start === this.rows.length) return false;
    this.rows = [...(isNew ? [] : this.rows.slice(0, start)), ...rows];
    this.version = version;
    this.names = names;
    return true;
  }

  /** All rows and, if it is newer, the state's own report: in a long job, a row comes only every few seconds. */
  shownRows(/** @type {KeyFrame} */ state) {
    const last = this.rows[this.rows.length - 1];
    const values = this.names.map((name) => state.report[name]);
    if (!last || state.step <= (last[STEP] ?? 0) || !values.some(isNumber)) return this.rows;
    const numbers = values.map((value) => (isNumber(value) ? value : null));
    const end = state.outcome ? state.events.findLast(({ kind }) => kind === `job-${state.outcome}`)?.time : state.time;
    if (end === undefined) return this.rows;
    return [...this.rows, [state.step, end, state.generation, state.world_size, ...numbers]];
  }
}

/** The name of the chart that is made of the others' places. */
export const rateName = (/** @type {string} */ unit) => `${unit}s per second`;
export const isRate = (/** @type {string} */ name) => name === rateName("step") || name === rateName("commit");

/** @returns {value is number} */
export const isNumber = (/** @type {unknown} */ value) => Number.isFinite(value);

export const stepsOf = (/** @type {Row[]} */ rows) => rows.map((row) => row[STEP] ?? 0);
export const timesOf = (/** @type {Row[]} */ rows) => rows.map((row) => row[TIME] ?? 0);

/** The values of the name at this place. @returns {(number|null)[]} */
export const valuesOf = (/** @type {Row[]} */ rows, /** @type {number} */ place) =>
  rows.map((row) => row[VALUES + place] ?? null);

/** Steps per second at each row, over the last seconds before it. @returns {(number|null)[]} */
export function ratesOf(/** @type {Row[]} */ rows) {
  const [steps, times] = [stepsOf(rows), timesOf(rows)];
  let first = 0;
  return rows.map((_, i) => {
    while (first < i - 1 && times[i] - times[first + 1] >= RATE_TIME) first += 1;
    const seconds = times[i] - times[first];
    return seconds > 0.2 ? (steps[i] - steps[first]) / seconds : null;
  });
}

/** Where the world changed: the first row of each generation after the first one. @returns {WorldChange[]} */
export function worldChanges(/** @type {Row[]} */ rows) {
  /** @type {WorldChange[]} */
  const changes = [];
  for (let i = 1; i < rows.length; i += 1) {
    const [row, before] = [rows[i], rows[i - 1]];
    if (row[GENERATION] === before[GENERATION]) continue;
    const [step, time, generation, size] = row.map((value) => value ?? 0);
    changes.push({ step, time, generation, size, before: before[SIZE] ?? 0 });
  }
  return changes;
}

/** The rows as a text for spreadsheets. */
export function asCsv(/** @type {string[]} */ names, /** @type {Row[]} */ rows) {
  const quoted = (/** @type {string} */ text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const header = [names.includes("step") ? "commit" : "step", "time", "generation", "size", ...names].map(quoted);
  const width = header.length;
  const lines = rows.map((row) => Array.from({ length: width }, (_, i) => row[i] ?? "").join(","));
  return `${[header.join(","), ...lines].join("\n")}\n`;
}
