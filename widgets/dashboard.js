// @ts-check
/**
 * The live view of a cluster. It draws what the kernel tells, sends back what people ask for, and decides nothing.
 * Plain DOM, no build, no network; one file, because a widget is one module. Text from outside goes through
 * textContent only. First come pure functions, then the panels from top to bottom, then the view that joins them.
 *
 * Down: `state`, a key frame, and `change`, a merge patch against it. Up: orders and questions as custom messages.
 *
 * @typedef {[?number, string, number, number, number, ?number, ?number, string]} Row  of a worker: rank, state, commits
 *   behind the others, restarts, pid, percent of a core, MB, reason
 * @typedef {{address: string, slots: number, phase: string, reason: string, until: number, cpu: ?number,
 *   memory: ?number, of: ?number, gpus: number[][], workers: Record<string, Row>,
 *   slots_until: Record<string, number>}} Host
 * @typedef {{n: number, time: number, kind: string, text: string, host: string, worker: string, generation: number,
 *   size: number, took: Record<string, number>}} Entry  `time` in seconds since 1970, `took` in milliseconds
 * @typedef {{id: string, by: string, text: string, word: string, why: string}} Told  what became of an order
 * @typedef {{n: number, time: number, name: string, phase: string, reason: string, generation: number, world_size: number,
 *   min: number, max: ?number, job: ?string, outcome: string, step: number, total: ?number,
 *   steps_per_second: ?number, report: Record<string, number|string>, curves: Record<string, number[]>,
 *   failed_at: ?number, hosts: Record<string, Host>, events: Entry[], orders: Told[]}} State
 * @typedef {[string, ?number]} Writer  a worker's id and its rank
 * @typedef {{get(name: string): any, on(name: string, f: Function): void, off(name: string, f: Function): void,
 *   send(content: unknown): void}} Model
 */

const PATIENCE = 3000; // ms until an order without an answer says so
const SURE = 4000; // ms in which the second click on what is asked twice counts
const CALM = 400; // ms after the first click in which a second one does not count: it is a double click
const NEWS = 5000; // ms that an answered order stays in sight; a refused one stays three times as long
const FORGOTTEN = 60_000; // ms after which an order that nobody ever answered leaves
const QUIET = 10_000; // ms without a word after which the kernel is asked whether it is there
const DEAF = 5000; // ms that it has for its answer
const POLL = 500; // ms between two looks at the logs
const MISSED = 1000; // ms that a change may wait for its key frame before another one is asked for
const KEPT = 1000; // lines of the logs
const CLOSE = 200; // lines among which equal ones of different ranks are folded into one
const ROOMY = 16; // up to so many slots, each tells more of itself
const MOST_EVENTS = 4000; // in the timeline; a view may be open for weeks
const MOST_NEWS = 24; // more changes than this at once are not lit up one by one

// ---- Pure: what is shown, and in which words -----------------------------------------------------------------------

/** A JSON merge patch (RFC 7386). What the patch does not name stays the same object. @returns {any} */
export function merge(/** @type {any} */ target, /** @type {any} */ patch) {
  const plain = (/** @type {any} */ x) => typeof x === "object" && x !== null && !Array.isArray(x);
  if (!plain(patch)) return patch;
  const merged = plain(target) ? { ...target } : {};
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) delete merged[name];
    else merged[name] = merge(merged[name], value);
  }
  return merged;
}

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
  curves: {},
  failed_at: null,
  hosts: {},
  events: [],
  orders: [],
};

/** What a view shows: the key frame, with the change that belongs to it. What is missing is null. @returns {State} */
export function shown(/** @type {any} */ frame, /** @type {any} */ change) {
  const state = frame && change && change.base === frame.n ? merge(frame, change.patch ?? {}) : frame;
  return { ...EMPTY, ...state };
}

export const plural = (/** @type {number} */ n, /** @type {string} */ word) => `${n} ${word}${n === 1 ? "" : "s"}`;

const GROUPED = new Intl.NumberFormat("en");

export function number(/** @type {number|string} */ n) {
  if (typeof n === "string") return n;
  return Number.isInteger(n) ? GROUPED.format(n) : Number(n.toPrecision(3)).toString();
}

/** `4 / 2–8`, `4 / 4` or `3 / 2+`. */
export function size(/** @type {number} */ now, /** @type {number} */ min, /** @type {?number} */ max) {
  return `${now} / ${max === null ? `${min}+` : min === max ? min : `${min}–${max}`}`;
}

/** `320 MB` or `3.3 GB`; in the unit of `like` if that is given. */
export function megabytes(/** @type {?number} */ n, /** @type {?number} */ of = null) {
  if (n === null || n === undefined) return "";
  const big = (of ?? n) >= 1000;
  const text = (/** @type {number} */ m) => (big ? (m / 1000).toFixed(m < 99_950 ? 1 : 0) : String(Math.round(m)));
  return `${text(n)}${of ? ` / ${text(of)}` : ""}\u00a0${big ? "GB" : "MB"}`;
}

export const percent = (/** @type {?number} */ n) => (n === null || n === undefined ? "" : `${Math.round(n)}\u00a0%`);

/** `8 s`, `3 min`, `2 h 5 min`, `1 d 3 h`: as exact as one wants to know it. */
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

const clock = (/** @type {number} */ seconds) => new Date(seconds * 1000).toTimeString().slice(0, 8);

/** Numbers in order, neighbours joined: `0–3, 6`. */
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

/** `rank 0`, `ranks 0–3`; those without a rank go by their ids. */
export function who(/** @type {Writer[]} */ writers) {
  const ranks = writers.flatMap(([, rank]) => (rank === null || rank === undefined ? [] : [rank]));
  const others = writers.filter(([, rank]) => rank === null || rank === undefined).map(([id]) => id);
  const words = ranks.length ? [`${ranks.length === 1 ? "rank" : "ranks"} ${ranges(ranks)}`] : [];
  return [...words, ...others.slice(0, 3), ...(others.length > 3 ? [`${others.length - 3} more`] : [])].join(", ");
}

/** Is an event of this kind a loss or an error? A worker that is behind and a refused order are not. */
const FAILURE = /lost|failed|broken|killed|error|unreachable|host-refused|not-finite/;

/** good, bad, busy or quiet: the four colours. Each comes with a sign and a word. */
export function tone(/** @type {string} */ word) {
  if (FAILURE.test(word) || word === "refused") return "bad";
  if (/running|formed|training|up$|succeeded|ready|recovered/.test(word)) return "good";
  if (/start|form|drain|plan|stopping|waiting|remove|added|changed|scaled|backoff|behind|refused/.test(word)) return "busy";
  return "quiet";
}

/** @type {Record<string, string>} */
const SIGNS = {
  starting: "◔",
  ready: "○",
  running: "●",
  succeeded: "✓",
  failed: "!",
  lost: "✕",
  stopped: "■",
  backoff: "◷",
  empty: "–",
  up: "●",
  draining: "↓",
};
/** @type {Record<string, string>} */
const SHORT = { starting: "start", succeeded: "done", stopped: "stop", backoff: "wait" };
/** @type {Record<string, string>} */
const TONES = { backoff: "busy", ready: "ready", empty: "quiet" };
const toneOf = (/** @type {string} */ state) => TONES[state] ?? tone(state);

/** How long the job will still take, in words; nothing where nobody can know. */
export function eta(/** @type {State} */ state) {
  const { step, total, steps_per_second: speed } = state;
  if (!state.job || state.outcome || !total || !speed || step >= total) return "";
  return `about ${duration((total - step) / speed)}`;
}

export function sinceFailure(/** @type {?number} */ at, /** @type {number} */ now) {
  return at === null ? "no failure yet" : `${duration(now - at)} since the last failure`;
}

/** @typedef {{key: string, id: string, slot: number, row: ?Row, until: number}} Slot */

/** @type {WeakMap<Host, Slot[]>} a host that no update has touched is the same object, with the same slots */
const SEEN = new WeakMap();

/**
 * The slots of a host in order, each with its newest worker; older ones that still live have a place of their own.
 * @param {string} name @param {Host} host @returns {Slot[]}
 */
export function slotsOf(name, host) {
  const seen = SEEN.get(host);
  if (seen) return seen;
  /** @type {Map<number, {slot: number, incarnation: number, id: string, row: Row}[]>} */
  const bySlot = new Map();
  for (const [place, row] of Object.entries(host.workers)) {
    const at = place.indexOf("#");
    const [slot, incarnation] = [Number(place.slice(0, at)), Number(place.slice(at + 1))];
    const worker = { slot, incarnation, id: `${name}/${place}`, row };
    bySlot.get(slot)?.push(worker) ?? bySlot.set(slot, [worker]);
  }
  const numbers = new Set([...Array(host.slots).keys(), ...bySlot.keys()]);
  const slots = [...numbers]
    .sort((a, b) => a - b)
    .flatMap((slot) => {
      const workers = (bySlot.get(slot) ?? []).sort((a, b) => b.incarnation - a.incarnation);
      const until = host.slots_until[slot] ?? 0;
      const first = { key: String(slot), id: workers[0]?.id ?? "", slot, row: workers[0]?.row ?? null, until };
      const others = workers.slice(1).filter(({ row }) => /^(starting|ready|running)$/.test(row[1]));
      return [first, ...others.map(({ id, row }) => ({ key: id, id, slot, row, until: 0 }))];
    });
  SEEN.set(host, slots);
  return slots;
}

/** A slot's state in a word: its worker's, else backoff or empty. */
export function stateOf(/** @type {{row: ?Row, until: number}} */ slot, /** @type {number} */ now) {
  if (slot.row) return slot.row[1];
  return slot.until > now ? "backoff" : "empty";
}

/** What a screen reader is told when `before` becomes `after`: phases, sizes and losses, not every number. */
export function announcement(/** @type {State} */ before, /** @type {State} */ after) {
  const news = [];
  if (after.phase !== before.phase) news.push(`${after.phase}: ${after.reason}`);
  else if (after.world_size !== before.world_size) news.push(`${plural(after.world_size, "worker")} in the world`);
  const last = before.events.length ? before.events[before.events.length - 1].n : 0;
  const losses = once(after.events.filter((entry) => entry.n > last && FAILURE.test(entry.kind))).map(
    (entry) => entry.text,
  );
  news.push(...losses.slice(0, 3));
  if (losses.length > 3) news.push(`and ${losses.length - 3} more`);
  return news.join(". ");
}

/** The path of a curve in a box of `width` by `height`; where a value is no number it has a gap. */
export function sparkline(/** @type {number[]} */ points, width = 100, height = 24) {
  const known = points.filter(Number.isFinite);
  if (known.length < 2) return "";
  const low = Math.min(...known);
  const span = Math.max(...known) - low;
  const x = (/** @type {number} */ i) => +((i * width) / (points.length - 1)).toFixed(1);
  const y = (/** @type {number} */ v) => +(span ? height - ((v - low) * height) / span : height / 2).toFixed(1);
  return points
    .map((v, i) => (Number.isFinite(v) ? `${Number.isFinite(points[i - 1]) ? "L" : "M"}${x(i)} ${y(v)}` : ""))
    .join("");
}

/** The number of the newest entry before which others are missing; 0 if none is. */
export function gap(/** @type {Entry[]} */ entries) {
  for (let i = entries.length - 1; i > 0; i -= 1) if (entries[i - 1].n < entries[i].n - 1) return entries[i].n;
  return 0;
}

/** A death and the break of the world that it is have one text: of neighbours with the same text the first. */
export function once(/** @type {Entry[]} */ entries) {
  return entries.filter((entry, i) => !i || entry.text !== entries[i - 1].text || !FAILURE.test(entry.kind));
}

/** Is it a change of the world, a failure, or both? The timeline is filtered by it. */
export function kinds(/** @type {Entry} */ entry) {
  const change = Object.keys(entry.took ?? {}).length > 0 || /^(world-|training|change-|scaled)/.test(entry.kind);
  const failure = FAILURE.test(entry.kind);
  return [change ? "change" : "", failure ? "failure" : ""].filter(Boolean).join(" ");
}

/**
 * The size of the world over time as a step line in a box of 100 by 100, and where on it each event stands.
 * @param {Entry[]} entries oldest first @param {number} now
 */
export function chart(entries, now) {
  if (!entries.length) return null;
  const from = entries[0].time;
  const to = Math.max(now, entries[entries.length - 1].time, from + 1);
  const most = Math.max(1, ...entries.map((entry) => entry.size ?? 0));
  const x = (/** @type {number} */ time) => +(((time - from) * 100) / (to - from)).toFixed(2);
  const y = (/** @type {number} */ size) => +(100 - (size * 100) / most).toFixed(2);
  let size = entries[0].size ?? 0;
  let path = `M0 ${y(size)}`;
  for (const entry of entries) {
    if (entry.size === undefined || entry.size === size) continue;
    size = entry.size;
    path += `H${x(entry.time)}V${y(size)}`;
  }
  return { from, to, most, size, path: `${path}H100`, marks: entries.map((entry) => ({ entry, x: x(entry.time) })) };
}

const BESIDE = "prepare"; // while the training went on: not a part of the whole

/**
 * The phases of a change one after the other, in the order in which the kernel sends them: where each begins and how long
 * it is, in percent of the whole.
 */
export function waterfall(/** @type {Record<string, number>} */ took) {
  const parts = Object.entries(took).filter(([name]) => name !== "all");
  const sum = parts.reduce((sum, [name, ms]) => sum + (name === BESIDE ? 0 : ms), 0);
  const whole = Math.max(sum, took.all ?? 0, 0.001);
  let begun = 0;
  return parts.map(([name, ms]) => {
    if (name === BESIDE) return { name, ms, from: 0, share: 0 };
    const bar = { name, ms, from: (begun * 100) / whole, share: (ms * 100) / whole };
    begun += ms;
    return bar;
  });
}

/** Why the change that ends in `entry` was made: what was planned, added or lost since the change before it. */
export function why(/** @type {Entry[]} */ entries, /** @type {Entry} */ entry) {
  /** @type {string[]} */
  const reasons = [];
  for (let i = entries.findIndex((other) => other.n === entry.n) - 1; i >= 0 && reasons.length < 4; i -= 1) {
    if (entries[i].took?.all !== undefined || /^job-/.test(entries[i].kind)) break;
    if (/lost|broken|planned|removed|added|changed|scaled|killed|gone|failed/.test(entries[i].kind)) {
      if (!reasons.includes(entries[i].text)) reasons.unshift(entries[i].text); // a death, and the break that it is
    }
  }
  return reasons;
}

/** A line as a terminal would leave it: without colours, and of a progress bar its last state. */
export function clean(/** @type {string} */ text) {
  if (!/[\u001b\r]/.test(text)) return text;
  const plain = text.replace(/\u001b\[[0-9;?]*[ -/]*[@-~]/g, "").replace(/\r+$/, "");
  return plain.slice(plain.lastIndexOf("\r") + 1);
}

/** @typedef {{seq: number, stream: string, text: string, writers: Map<string, ?number>}} Line  writers and their ranks then */

/** Lines of many writers; equal ones of different writers close together are one. Each writer's order is kept. */
export class Fold {
  constructor(most = KEPT) {
    this.most = most;
    /** @type {Line[]} */
    this.lines = [];
    this.seq = 0;
    /** @type {Map<string, number>} the last line each writer has a part in */
    this.last = new Map();
  }

  /**
   * Returns the line that was made or joined.
   * @param {string} writer @param {string} stream @param {string} text @param {?number} rank
   */
  add(writer, stream, text, rank = null) {
    const first = Math.max((this.last.get(writer) ?? -1) + 1, this.seq - CLOSE);
    for (let i = Math.max(0, first - (this.seq - this.lines.length)); i < this.lines.length; i += 1) {
      const line = this.lines[i];
      if (line.text === text && line.stream === stream && !line.writers.has(writer)) {
        line.writers.set(writer, rank);
        this.last.set(writer, line.seq);
        return line;
      }
    }
    const line = { seq: this.seq++, stream, text, writers: new Map([[writer, rank]]) };
    this.lines.push(line);
    this.last.set(writer, line.seq);
    return line;
  }

  /** Forget the oldest lines beyond the most that are kept; returns them. */
  trim() {
    return this.lines.splice(0, Math.max(0, this.lines.length - this.most));
  }
}

// ---- The page: small tools -----------------------------------------------------------------------------------------

/**
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag @param {Record<string, string>} [attributes] @param {...(Node|string)} children
 * @returns {HTMLElementTagNameMap[T]}
 */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function drawing(
  /** @type {string} */ tag,
  /** @type {Record<string, string>} */ attributes,
  /** @type {Node[]} */ ...children
) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Change a node's text only if it differs: selections and screen readers are left in peace. */
function say(/** @type {Element} */ node, /** @type {string} */ text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Change an attribute only if it differs; null takes it away. */
function mark(/** @type {Element} */ node, /** @type {string} */ name, /** @type {?string} */ value) {
  if (node.getAttribute(name) === value) return;
  if (value === null) node.removeAttribute(name);
  else node.setAttribute(name, value);
}

/** A button without an order keeps the focus: it is only said to be disabled, and does nothing. */
function disable(/** @type {Element} */ button, /** @type {boolean} */ off) {
  mark(button, "aria-disabled", off ? "true" : null);
}

function button(
  /** @type {string} */ text,
  /** @type {(event: MouseEvent) => void} */ act,
  more = "",
  /** @type {string} */ label = "",
) {
  const node = element("button", { type: "button", class: `nbe-button ${more}`.trim() }, text);
  if (label) node.setAttribute("aria-label", label);
  node.addEventListener("click", (event) => node.hasAttribute("aria-disabled") || act(event));
  return node;
}

/**
 * A button whose act is asked twice, the second time in the words of `sure`. Neither a double click nor a key that is held
 * confirms it.
 */
function twice(
  /** @type {Timers} */ timers,
  /** @type {string} */ text,
  /** @type {string} */ sure,
  /** @type {() => void} */ act,
  more = "",
  label = "",
) {
  /** @type {?number} */
  let asked = null;
  let since = 0;
  const calm = () => {
    if (asked !== null) timers.cancel(asked);
    asked = null;
    node.classList.remove("nbe-sure");
    say(node, text);
    if (label) mark(node, "aria-label", label);
  };
  const node = button(
    text,
    (event) => {
      if (asked !== null) {
        if (event.detail > 1 || Date.now() - since < CALM) return;
        calm();
        act();
        return;
      }
      since = Date.now();
      asked = timers.later(calm, SURE);
      node.classList.add("nbe-sure");
      say(node, sure);
      if (label) mark(node, "aria-label", `${label}: really?`);
    },
    more,
    label,
  );
  node.addEventListener("keydown", (event) => event.repeat && event.preventDefault());
  return node;
}

/** Light a node up for a moment; the style sheet knows how, and whether motion is welcome. */
function light(/** @type {Element} */ node) {
  node.classList.add("nbe-news");
}

/**
 * One part of the page per item, in the items' order. Those that stay are not touched, so their focus stays too.
 * @template T, C
 * @typedef {{node: Element, draw(item: T, context: C): void}} Part
 */

/** @template T, C */
class Many {
  /** @param {Element} parent @param {(key: string, item: T) => Part<T, C>} make */
  constructor(parent, make) {
    this.parent = parent;
    this.make = make;
    this.first = parent.lastElementChild; // what was there before stays in front
    /** @type {Map<string, Part<T, C>>} */
    this.parts = new Map();
  }

  /** @param {[string, T][]} items @param {C} context */
  draw(items, context) {
    const wanted = new Set(items.map(([key]) => key));
    for (const [key, part] of this.parts) {
      if (wanted.has(key)) continue;
      // Focus does not fall out of the view when what had it goes.
      if (part.node.contains(document.activeElement)) this.parent.closest("section")?.focus({ preventScroll: true });
      part.node.remove();
      this.parts.delete(key);
    }
    let last = this.first;
    for (const [key, item] of items) {
      let part = this.parts.get(key);
      if (!part) this.parts.set(key, (part = this.make(key, item)));
      const next = last ? last.nextElementSibling : this.parent.firstElementChild;
      if (next !== part.node) this.parent.insertBefore(part.node, next);
      last = part.node;
      part.draw(item, context);
    }
  }
}

/** All timers of a view, so that closing it ends them. */
class Timers {
  constructor() {
    /** @type {Set<number>} */
    this.running = new Set();
  }

  later(/** @type {() => void} */ act, /** @type {number} */ ms) {
    const timer = window.setTimeout(() => (this.running.delete(timer), act()), ms);
    this.running.add(timer);
    return timer;
  }

  cancel(/** @type {number} */ timer) {
    clearTimeout(timer);
    this.running.delete(timer);
  }

  close() {
    for (const timer of this.running) clearTimeout(timer);
    this.running.clear();
  }
}

/** What goes up and comes back: orders, and questions with their answers. */
class Wire {
  /** @param {Model} model @param {Timers} timers @param {() => void} heard called when an answer came */
  constructor(model, timers, heard) {
    this.model = model;
    this.timers = timers;
    this.heard = heard;
    this.cut = false; // the connection is closed: nothing is asked
    this.mine = `${Array.from(crypto.getRandomValues(new Uint32Array(2)), (n) => n.toString(36)).join("")}-`;
    this.count = 0;
    /** @type {Map<string, {ask: string, answer: (reply: any) => void, timer: number}>} */
    this.open = new Map();
    this.take = (/** @type {any} */ content) => this.taken(content);
    model.on("msg:custom", this.take);
  }

  close() {
    this.model.off("msg:custom", this.take);
    this.open.clear();
  }

  send(/** @type {Record<string, unknown>} */ content) {
    const id = this.mine + ++this.count;
    this.model.send({ ...content, id });
    return id;
  }

  /**
   * Ask; `answer` gets the reply, which has an `error` if there is none. One question of a kind at a time: a second one
   * is not asked.
   * @param {string} ask @param {Record<string, unknown>} about @param {(reply: any) => void} answer
   */
  ask(ask, about, answer, patience = 10_000) {
    if ([...this.open.values()].some((question) => question.ask === ask)) return;
    if (this.cut) return answer({ error: "the connection to the kernel is closed" });
    const id = this.mine + ++this.count;
    const silent = () => this.settle(id, { error: `no answer from the kernel for ${patience / 1000} s` });
    this.open.set(id, { ask, answer, timer: this.timers.later(silent, patience) });
    try {
      this.model.send({ ask, ...about, id });
    } catch (error) {
      this.settle(id, { error: `the kernel does not listen: ${error}` });
    }
  }

  taken(/** @type {any} */ content) {
    if (typeof content?.reply !== "string" || !content.reply.startsWith(this.mine)) return;
    this.heard();
    this.settle(content.reply, content);
  }

  settle(/** @type {string} */ id, /** @type {any} */ reply) {
    const question = this.open.get(id);
    if (!question) return;
    this.open.delete(id);
    this.timers.cancel(question.timer);
    question.answer(reply);
  }
}

// ---- Orders: sent at once, answered by the kernel ------------------------------------------------------------------

class Orders {
  /** @param {Wire} wire @param {Timers} timers */
  constructor(wire, timers) {
    this.wire = wire;
    this.timers = timers;
    /** @type {Map<string, Told & {settled?: () => void, told?: boolean}>} */
    this.shown = new Map();
    /** @type {?Set<string>} those whose answer has been seen; null before the first look */
    this.over = null;
    const list = element("ul", { class: "nbe-orders" });
    this.node = element("div", { role: "status", "aria-live": "polite", "aria-label": "Orders" }, list);
    this.list = new Many(list, () => {
      const node = element("li");
      return { node, draw: (/** @type {Told} */ told) => this.fill(node, told) };
    });
  }

  /** @param {Record<string, unknown>} order @param {string} text @param {() => void} [settled]  when it is done */
  send(order, text, settled) {
    /** @type {Told & {settled?: () => void}} */
    const told = { id: "", by: "", text, word: "sent", why: "", settled };
    try {
      told.id = this.wire.send(order);
      const unanswered = () => {
        const now = this.shown.get(told.id);
        return now?.word === "sent" ? now : null;
      };
      this.timers.later(() => {
        const now = unanswered();
        if (now) now.why = "no answer yet; is the kernel busy or gone?";
        this.show();
      }, PATIENCE);
      this.timers.later(() => unanswered() && this.drop(told.id), FORGOTTEN);
    } catch (error) {
      told.id = `unsent ${text}`;
      Object.assign(told, { word: "refused", why: `the kernel does not listen: ${error}` });
      this.timers.later(() => this.drop(told.id), 3 * NEWS);
    }
    this.shown.set(told.id, told);
    this.show();
  }

  drop(/** @type {string} */ id) {
    if (this.shown.delete(id)) this.show();
  }

  draw(/** @type {Told[]} */ told) {
    const first = this.over === null;
    const over = (this.over ??= new Set());
    for (const order of told) {
      const settled = order.word !== "under way";
      if (over.has(order.id)) continue;
      if (settled) over.add(order.id);
      if (settled && first && !this.shown.has(order.id)) continue; // answered before this view was there
      const mine = this.shown.get(order.id);
      const by = order.id.startsWith(this.wire.mine) ? "" : order.by;
      this.shown.set(order.id, { ...mine, ...order, by, told: true });
      if (!settled) continue;
      if (order.word === "done") mine?.settled?.();
      this.timers.later(() => this.drop(order.id), order.word === "refused" ? 3 * NEWS : NEWS);
    }
    const known = new Set(told.map((order) => order.id));
    for (const [id, order] of this.shown) {
      if (order.told && order.word === "under way" && !known.has(id)) this.shown.delete(id); // older than the last few
    }
    this.show();
  }

  show() {
    this.list.draw([...this.shown], null);
  }

  fill(/** @type {Element} */ node, /** @type {Told} */ { word, text, by, why }) {
    mark(node, "data-word", word);
    say(node, `${text}${by ? ` (by ${by})` : ""}: ${word}${why ? `, ${why}` : ""}`);
  }
}

// ---- At a glance ---------------------------------------------------------------------------------------------------

/** A name, a value and, if there is one, its curve. */
class Figure {
  constructor(/** @type {string} */ name) {
    this.name = name;
    this.value = element("span");
    this.dd = element("dd", {}, this.value);
    this.node = element("div", {}, element("dt", {}, name), this.dd);
    /** @type {?{svg: Element, line: Element, title: Element}} */
    this.curve = null;
    /** @type {?number[]} */
    this.points = null;
  }

  draw(/** @type {{value: string, points?: number[], title?: string}} */ { value, points, title }) {
    say(this.value, value);
    mark(this.node, "title", title ?? null);
    if (points === this.points || (points && this.points && String(points) === String(this.points))) return;
    this.points = points ?? null;
    const path = points ? sparkline(points) : "";
    if (!path) {
      this.curve?.svg.remove();
      this.curve = null;
      return;
    }
    const curve = (this.curve ??= this.makeCurve());
    const known = /** @type {number[]} */ (points).filter(Number.isFinite);
    const words = `${this.name} from ${number(known[0])} to ${number(known[known.length - 1])}`;
    mark(curve.line, "d", path);
    mark(curve.svg, "aria-label", words);
    say(curve.title, words);
  }

  makeCurve() {
    const line = drawing("path", { "vector-effect": "non-scaling-stroke" });
    const title = drawing("title", {});
    const box = { class: "nbe-curve", viewBox: "0 -2 100 28", preserveAspectRatio: "none", role: "img" };
    const svg = drawing("svg", box, title, line);
    this.dd.append(svg);
    return { svg, line, title };
  }
}

class Glance {
  constructor() {
    this.phase = element("strong", { class: "nbe-phase" });
    this.reason = element("span", { class: "nbe-reason" });
    this.since = element("p", { class: "nbe-since" });
    this.facts = element("dl", { class: "nbe-facts" });
    this.figures = new Many(this.facts, (name) => new Figure(name));
    this.done = element("div", { class: "nbe-done" });
    this.bar = element("div", { class: "nbe-progress", role: "progressbar", "aria-label": "Steps done" }, this.done);
    this.spoken = element("p", { class: "nbe-hidden", role: "status", "aria-label": "News" });
    const words = element("p", { class: "nbe-state" }, this.phase, " ", this.reason);
    const head = element("header", { class: "nbe-head" }, words, this.since);
    this.node = element("div", {}, head, this.facts, this.bar, this.spoken);
    /** @type {?State} */
    this.before = null;
  }

  draw(/** @type {State} */ state, /** @type {Record<string, number>} */ counts, /** @type {number} */ now) {
    const training = Boolean(state.job) && !state.outcome;
    const ready = counts.ready ?? 0;
    const idle = state.phase === "waiting" && !training && ready >= state.min;
    say(this.phase, idle ? "ready" : state.phase);
    mark(this.phase, "data-tone", idle ? "good" : tone(state.phase));
    say(this.reason, state.reason);
    say(this.since, state.phase === "finished" ? "" : sinceFailure(state.failed_at, now));
    this.figures.draw(this.items(state, training, ready), null);
    const total = training ? state.total : null;
    mark(this.bar, "hidden", total ? null : "");
    if (total) {
      const share = Math.min(100, (state.step * 100) / total);
      this.done.style.width = `${share.toFixed(2)}%`;
      mark(this.bar, "aria-valuenow", String(Math.round(share)));
      mark(this.bar, "aria-valuetext", `${number(state.step)} of ${number(total)} steps`);
    }
    if (this.before) {
      const news = announcement(this.before, state);
      if (news) say(this.spoken, news);
    }
    this.before = state;
  }

  items(/** @type {State} */ state, /** @type {boolean} */ training, /** @type {number} */ ready) {
    const limits = `at least ${state.min}, at most ${state.max ?? "any number of"} workers`;
    /** @type {[string, {value: string, points?: number[], title?: string}][]} */
    const items = [];
    if (state.job) items.push(["Job", { value: `${state.job}${state.outcome ? ` ${state.outcome}` : ""}` }]);
    if (state.phase !== "finished") {
      const name = training ? "Workers" : "Workers ready";
      items.push([name, { value: size(training ? state.world_size : ready, state.min, state.max), title: limits }]);
    }
    items.push(["Generation", { value: number(state.generation), title: "One more with every change of the world" }]);
    items.push([
      "Step",
      { value: state.total ? `${number(state.step)} of ${number(state.total)}` : number(state.step) },
    ]);
    if (training && state.steps_per_second !== null)
      items.push(["Steps per second", { value: number(state.steps_per_second) }]);
    if (eta(state)) items.push(["Time left", { value: eta(state) }]);
    for (const name of new Set([...Object.keys(state.report), ...Object.keys(state.curves)])) {
      const points = state.curves[name];
      items.push([name, { value: number(state.report[name] ?? points?.[points.length - 1] ?? ""), points }]);
    }
    return items;
  }
}

// ---- The board: hosts, their slots and who works in them -----------------------------------------------------------

/**
 * What all parts of the board know in a drawing.
 * @typedef {{state: State, now: number, roomy: boolean, gpus: boolean, over: boolean, cut: boolean, changes: Element[],
 *   fresh: boolean}} Context  `over`: no orders; `cut`: no questions either
 * @typedef {{send: Orders["send"], timers: Timers, openLog: (id: string) => void, id: string}} Rim
 */

class Chip {
  constructor(/** @type {HostRow} */ host) {
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
    this.node.addEventListener("click", () => host.board.toggle(host.name, this));
    this.host = host;
    this.face = "";
    this.state = "";
    this.id = "";
    /** @type {?Slot} */
    this.slot = null;
  }

  draw(/** @type {Slot} */ slot, /** @type {Context} */ context) {
    this.slot = slot;
    const { roomy, now } = context;
    const [rank, , behind, restarts, , cpu, memory, reason] = slot.row ?? [null, "", 0, 0, 0, null, null, ""];
    const state = stateOf(slot, now);
    const left = state === "backoff" ? duration(slot.until - now) : "";
    const open = this.host.board.open === this;
    let more = `${behind ? `−${behind}` : ""} ${restarts ? `↻${restarts}` : ""}`.trim();
    if (roomy) {
      const step = state === "running" ? `step ${number(context.state.step - behind)}` : "";
      more = [step, percent(cpu), megabytes(memory), left && `${left} left`].filter(Boolean).join(" · ");
    }
    const face = `${rank}|${state}|${behind}|${restarts}|${more}|${open}|${reason}|${slot.id}`;
    if (face === this.face) return;
    this.face = face;
    const name = rank !== null ? String(rank) : roomy ? `slot ${slot.slot}` : (SHORT[state] ?? state);
    mark(this.node, "data-rank", rank === null ? null : "");
    say(this.sign, SIGNS[state] ?? "?");
    say(this.name, name);
    say(
      this.word,
      roomy ? [state, behind && `${behind} behind`, restarts && `↻${restarts}`].filter(Boolean).join(" · ") : "",
    );
    say(this.more, more);
    const words = [
      rank === null ? `slot ${slot.slot}` : `rank ${rank}, slot ${slot.slot}`,
      state,
      left && `for ${left}`,
      behind && `${plural(behind, "commit")} behind`,
      restarts && plural(restarts, "restart"),
      reason,
    ]
      .filter(Boolean)
      .join(", ");
    mark(this.node, "aria-label", words);
    mark(this.node, "title", words);
    mark(this.node, "data-state", state);
    mark(this.node, "data-tone", toneOf(state));
    mark(this.node, "data-behind", behind ? "" : null);
    mark(this.node, "aria-expanded", String(open));
    mark(this.node, "aria-controls", open ? this.host.board.detail.node.id : null);
    if (this.state !== state || this.id !== slot.id) context.changes.push(this.node);
    this.state = state;
    this.id = slot.id;
  }
}

/** A figure with a thin bar below it. */
class Meter {
  constructor(/** @type {string} */ name, more = "") {
    this.text = element("span");
    this.bar = element("i", { class: "nbe-meter", "aria-hidden": "true" });
    this.small = element("small");
    const parts = [this.text, this.bar, this.small];
    this.node = element("td", { role: "cell", class: `nbe-use ${more}`.trim(), "data-label": name }, ...parts);
    this.share = -1;
  }

  draw(/** @type {string} */ text, /** @type {?number} */ share, small = "", title = "") {
    say(this.text, text || "–");
    say(this.small, small);
    mark(this.node, "title", title || null);
    const rounded = share === null ? 0 : Math.min(100, Math.round(share));
    if (rounded !== this.share) this.bar.style.setProperty("--nbe-share", `${rounded}%`);
    this.share = rounded;
  }
}

class HostRow {
  constructor(/** @type {Board} */ board, /** @type {string} */ name) {
    this.board = board;
    this.name = name;
    const { send, timers } = board.rim;
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
    this.chips = new Many(this.slots, () => new Chip(this));
    const order = { order: "remove_host", host: name };
    this.remove = button(
      "Remove",
      () => send({ ...order, now: false }, `remove ${name}`),
      "nbe-small",
      `Remove host ${name}`,
    );
    const now = () => send({ ...order, now: true }, `remove ${name} now`);
    this.now = twice(timers, "Now", "Sure?", now, "nbe-small nbe-danger", `Remove ${name} now`);
    this.remove.title = "Let its workers leave at the next commit";
    this.now.title = "End its workers at once";
    this.row = element(
      "tr",
      { role: "row", class: "nbe-hostrow" },
      element("th", { role: "rowheader", scope: "row" }, element("span", {}, name), this.address),
      this.state,
      this.cpu.node,
      this.memory.node,
      this.gpu.node,
      element("td", { role: "cell", class: "nbe-slots" }, this.slots),
      element("td", { role: "cell", class: "nbe-acts" }, element("div", {}, this.remove, this.now)),
    );
    this.node = element("tbody", { role: "rowgroup" }, this.row);
    this.before = "";
    /** @type {?Element} */
    this.home = null;
    /** @type {?number[][]} */
    this.gpus = null;
  }

  draw(/** @type {Host} */ host, /** @type {Context} */ context) {
    const { now, over } = context;
    say(this.address, host.address === this.name ? "" : host.address);
    say(this.sign, SIGNS[host.phase] ?? "○");
    say(this.phase, host.phase);
    mark(this.state, "data-tone", toneOf(host.phase));
    const left = host.until > now ? `again in ${duration(host.until - now)}` : "";
    say(this.reason, [host.reason === host.phase ? "" : host.reason, left].filter(Boolean).join(" · "));
    this.cpu.draw(percent(host.cpu), host.cpu);
    const full = host.memory && host.of ? (host.memory * 100) / host.of : null;
    this.memory.draw(megabytes(host.memory, host.of), full);
    if (context.gpus) this.drawGpus(host.gpus);
    this.chips.draw(
      slotsOf(this.name, host).map((slot) => [slot.key, slot]),
      context,
    );
    if (!this.slots.contains(this.home)) this.stop(this.slots.firstElementChild);
    disable(this.remove, over || host.phase === "draining");
    disable(this.now, over);
    if (this.before !== host.phase) context.changes.push(this.row);
    this.before = host.phase;
  }

  /** The tab key stops at this slot of the row, and at no other. */
  stop(/** @type {?Element} */ chip) {
    if (this.home) mark(this.home, "tabindex", "-1");
    if (chip) mark(chip, "tabindex", "0");
    this.home = chip;
  }

  drawGpus(/** @type {number[][]} */ gpus) {
    if (gpus === this.gpus) return;
    this.gpus = gpus;
    if (!gpus.length) return this.gpu.draw("", null);
    const sum = (/** @type {number} */ i) => gpus.reduce((all, gpu) => all + (gpu[i] ?? 0), 0);
    const use = sum(0) / gpus.length;
    const each = gpus.map(([share, used, total], i) => `GPU ${i}: ${share} %, ${megabytes(used, total)}`).join("\n");
    this.gpu.draw(percent(use), use, megabytes(sum(1), sum(2)), each);
  }
}

/** What one slot tells of itself when its chip is opened. */
class Detail {
  constructor(/** @type {Board} */ board) {
    const { send, timers, openLog, id } = board.rim;
    this.title = element("b");
    this.facts = element("dl", { class: "nbe-facts" });
    this.figures = new Many(this.facts, (name) => new Figure(name));
    this.reason = element("p");
    this.worker = "";
    this.log = button("Log", () => openLog(this.worker), "nbe-small");
    const restart = () => send({ order: "restart", worker: this.worker }, `restart ${this.worker}`);
    this.restart = twice(timers, "Restart", "Kill and restart it?", restart, "nbe-small");
    this.close = button("Close", () => board.shut(), "nbe-small");
    const head = element(
      "div",
      { class: "nbe-bar" },
      this.title,
      element("span", { class: "nbe-gap" }),
      this.log,
      this.restart,
      this.close,
    );
    this.cell = element("td", { role: "cell", colspan: "7" }, head, this.facts, this.reason);
    this.node = element("tr", { role: "row", class: "nbe-detail", id: `${id}detail` }, this.cell);
    this.node.addEventListener("keydown", (event) => event.key === "Escape" && board.shut());
  }

  draw(/** @type {Slot} */ slot, /** @type {Context} */ { state, now, over, cut }) {
    this.worker = slot.id;
    const word = stateOf(slot, now);
    say(this.title, slot.id || `Slot ${slot.slot}`);
    /** @type {[string, {value: string}][]} */
    const facts = [["State", { value: word === "backoff" ? `in back-off, ${duration(slot.until - now)} left` : word }]];
    if (slot.row) {
      const [rank, , behind, restarts, pid, cpu, memory] = slot.row;
      facts.push(["Rank", { value: rank === null ? "none" : String(rank) }], ["Process", { value: String(pid) }]);
      if (word === "running") facts.push(["Step", { value: number(state.step - behind) }]);
      if (behind) facts.push(["Behind", { value: plural(behind, "commit") }]);
      facts.push(["Restarts", { value: String(restarts) }], ["CPU", { value: percent(cpu) || "–" }]);
      facts.push(["Memory", { value: megabytes(memory) || "–" }]);
    }
    this.figures.draw(facts, null);
    say(this.reason, slot.row?.[7] ?? "");
    disable(this.log, cut || !slot.row);
    disable(this.restart, over || !slot.row);
  }
}

class Board {
  constructor(/** @type {Rim} */ rim) {
    this.rim = rim;
    /** @type {?Chip} */
    this.open = null;
    this.legend = element("span", { class: "nbe-legend" });
    this.counts = new Many(this.legend, (state) => this.makeCount(state));
    const hint = element("span", { class: "nbe-hidden" }, ". The arrow keys go from slot to slot.");
    const caption = element("caption", { class: "nbe-title" }, element("span", {}, "Hosts"), hint, this.legend);
    const head = ["Host", "State", "CPU", "Memory", "GPU", "Slots", "Orders"].map((name) =>
      element("th", { role: "columnheader", scope: "col", class: name === "GPU" ? "nbe-gpu" : "" }, name),
    );
    const thead = element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...head));
    this.table = element("table", { role: "table", class: "nbe-table" }, caption, thead);
    this.node = element("div", { class: "nbe-board" }, this.table);
    this.detail = new Detail(this);
    /** @type {Many<Host, Context>} */
    this.hosts = new Many(this.table, (name) => new HostRow(this, name));
    this.table.addEventListener("keydown", (event) => this.step(event));
    // One stop for the tab key in each row: the slot that had the focus last.
    this.table.addEventListener("focusin", ({ target }) => {
      const row = target instanceof Element && target.closest(".nbe-chip") && this.rowOf(target);
      if (row) row.stop(/** @type {Element} */ (target));
    });
    this.fresh = true;
    /** @type {?(() => void)} */
    this.redraw = null;
  }

  makeCount(/** @type {string} */ state) {
    const sign = element("span", { class: "nbe-sign", "aria-hidden": "true" }, SIGNS[state] ?? "?");
    const words = element("span");
    const draw = (/** @type {number} */ n) => say(words, `${number(n)} ${state}`);
    return { node: element("span", { "data-tone": toneOf(state) }, sign, words), draw };
  }

  /** How many slots there are in each state. */
  count(/** @type {State} */ state, /** @type {number} */ now) {
    /** @type {Record<string, number>} */
    const counts = {};
    for (const [name, host] of Object.entries(state.hosts)) {
      for (const slot of slotsOf(name, host)) {
        const word = stateOf(slot, now);
        counts[word] = (counts[word] ?? 0) + 1;
      }
    }
    return counts;
  }

  /** @param {State} state @param {Record<string, number>} counts @param {number} now @param {boolean} cut */
  draw(state, counts, now, cut) {
    const hosts = Object.entries(state.hosts);
    const roomy = Object.values(counts).reduce((sum, n) => sum + n, 0) <= ROOMY;
    const gpus = hosts.some(([, host]) => host.gpus.length > 0);
    const over = cut || state.phase === "finished" || state.phase === "stopping";
    /** @type {Context} */
    const context = { state, now, roomy, gpus, over, cut, changes: [], fresh: this.fresh };
    mark(this.table, "data-gpus", gpus ? "" : null);
    mark(this.table, "data-roomy", roomy ? "" : null);
    mark(this.node, "data-many", roomy ? null : "");
    const order = Object.keys(SIGNS).filter((word) => counts[word]);
    this.counts.draw(
      order.map((word) => [word, counts[word]]),
      null,
    );
    this.hosts.draw(hosts, context);
    if (!this.fresh && context.changes.length <= MOST_NEWS) context.changes.forEach(light);
    this.fresh = false;
    if (this.open && !this.open.node.isConnected) this.shut();
    if (this.open?.slot) this.detail.draw(this.open.slot, context);
  }

  rowOf(/** @type {Element} */ node) {
    const rows = /** @type {Iterable<HostRow>} */ (this.hosts.parts.values());
    return [...rows].find((row) => row.node.contains(node));
  }

  toggle(/** @type {string} */ name, /** @type {Chip} */ chip) {
    if (this.open === chip) return this.shut();
    this.open = chip;
    this.hosts.parts.get(name)?.node.append(this.detail.node);
    this.redraw?.();
  }

  shut() {
    const chip = this.open;
    const focused = this.detail.node.contains(document.activeElement);
    this.open = null;
    this.detail.node.remove();
    if (focused) chip?.node.focus();
    this.redraw?.();
  }

  /** The arrow keys: left and right among all slots, up and down from host to host. */
  step(/** @type {KeyboardEvent} */ event) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const move = moves[/** @type {keyof typeof moves} */ (event.key)];
    const chip = event.target instanceof Element ? event.target.closest(".nbe-chip") : null;
    if (!move || !chip) return;
    event.preventDefault();
    const groups = Array.from(this.table.querySelectorAll(".nbe-chips"), (group) => Array.from(group.children));
    const row = groups.findIndex((group) => group.includes(chip));
    const all = groups.flat();
    const same = groups[row + move[0]]?.[Math.min(groups[row].indexOf(chip), groups[row + move[0]].length - 1)];
    const next = move[1] ? all[all.indexOf(chip) + move[1]] : same;
    if (!(next instanceof HTMLElement)) return;
    next.focus();
  }
}

// ---- Steering ------------------------------------------------------------------------------------------------------

class Steering {
  constructor(/** @type {Orders} */ orders, /** @type {Timers} */ timers) {
    const plain = { type: "text", placeholder: "name:slots", spellcheck: "false", autocomplete: "off", required: "" };
    this.host = element("input", plain);
    const name = element("label", {}, element("span", { class: "nbe-hidden" }, "Host to add"), this.host);
    this.addHost = this.submit("Add host");
    this.adding = this.form([name, this.addHost], () => {
      const host = this.host.value.trim();
      if (host) orders.send({ order: "add_host", host }, `add ${host}`);
      this.host.value = "";
    });
    this.min = element("input", { type: "number", min: "1", required: "", size: "4" });
    this.max = element("input", { type: "number", min: "1", placeholder: "no limit", size: "4" });
    this.apply = this.submit("Apply");
    const fields = [element("label", {}, "min ", this.min), element("label", {}, "max ", this.max)];
    this.scaling = this.form([...fields, this.apply], () => {
      const [min, max] = [Number(this.min.value), this.max.value === "" ? null : Number(this.max.value)];
      orders.send({ order: "scale", min, max }, `scale to ${max === null ? `${min} or more` : `${min}–${max}`}`, () =>
        this.edit(false),
      );
    });
    this.scaling.addEventListener("input", () => this.edit(true));
    this.scaling.addEventListener("keydown", (event) => event.key === "Escape" && this.edit(false));
    const stopJob = () => orders.send({ order: "stop_job" }, "stop the job");
    this.stopJob = twice(timers, "Stop job", "Really stop it?", stopJob);
    const stop = () => orders.send({ order: "stop" }, "stop the cluster");
    this.stop = twice(timers, "Stop cluster", "Really stop it?", stop, "nbe-danger");
    const stops = element("div", { class: "nbe-bar" }, this.stopJob, this.stop);
    this.node = element(
      "div",
      { class: "nbe-controls", role: "group", "aria-label": "Steering" },
      this.adding,
      this.scaling,
      stops,
    );
    this.edited = false;
  }

  submit(/** @type {string} */ text) {
    return element("button", { type: "submit", class: "nbe-button" }, text);
  }

  form(/** @type {HTMLElement[]} */ parts, /** @type {() => void} */ act) {
    const form = element("form", { class: "nbe-bar" }, ...parts);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!parts[parts.length - 1].hasAttribute("aria-disabled")) act();
    });
    return form;
  }

  /** What is typed stays until the order is done; Escape brings the kernel's values back. */
  edit(/** @type {boolean} */ edited) {
    this.edited = edited;
    disable(this.apply, !edited);
  }

  draw(/** @type {State} */ state, /** @type {boolean} */ gone) {
    const over = gone || state.phase === "finished" || state.phase === "stopping";
    if (!this.edited) {
      const [min, max] = [String(state.min), state.max === null ? "" : String(state.max)];
      if (this.min.value !== min) this.min.value = min;
      if (this.max.value !== max) this.max.value = max;
    }
    for (const field of [this.host, this.min, this.max]) field.disabled = over;
    for (const node of [this.addHost, this.stop]) disable(node, over);
    disable(this.apply, over || !this.edited);
    disable(this.stopJob, over || !state.job || state.outcome !== "");
  }
}

// ---- Timeline ------------------------------------------------------------------------------------------------------

class Happening {
  constructor(/** @type {Timeline} */ timeline, /** @type {Entry} */ entry) {
    const mood = tone(entry.kind);
    const sign = element(
      "span",
      { class: "nbe-sign", "aria-hidden": "true" },
      { bad: "✕", good: "●", busy: "◔", quiet: "·" }[mood],
    );
    const time = element("time", { datetime: new Date(entry.time * 1000).toISOString() }, clock(entry.time));
    const took = Object.keys(entry.took ?? {}).length > 0;
    const all = entry.took?.all;
    const text = element("span", {}, entry.text, all === undefined ? "" : ` · ${milliseconds(all)} in all`);
    this.node = element("li", { "data-tone": mood, "data-kinds": kinds(entry), title: entry.kind }, time, sign);
    if (!took) {
      this.node.append(text);
      return;
    }
    const details = element("details", {}, element("summary", {}, text));
    const fill = () => details.childElementCount === 1 && details.append(...explain(timeline.entries, entry));
    details.addEventListener("toggle", fill);
    this.node.append(details);
  }

  draw() {} // what has happened does not change
}

/** A change in full: how long each phase took, and why it was made. */
function explain(/** @type {Entry[]} */ entries, /** @type {Entry} */ entry) {
  const rows = waterfall(entry.took).map(({ name, ms, from, share }) => {
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
  if (entry.took.all !== undefined) {
    const cells = [
      element("th", { scope: "row" }, "all"),
      element("td", {}, milliseconds(entry.took.all)),
      element("td"),
    ];
    rows.push(element("tr", { class: "nbe-all" }, ...cells));
  }
  const caption = element("caption", { class: "nbe-hidden" }, "How long each phase took");
  const parts = [element("table", { class: "nbe-waterfall" }, caption, element("tbody", {}, ...rows))];
  const reasons = why(entries, entry);
  const list = element("ul", { class: "nbe-why" }, ...reasons.map((reason) => element("li", {}, reason)));
  return reasons.length ? [element("div", { class: "nbe-why" }, element("b", {}, "Why"), list), ...parts] : parts;
}

class Timeline {
  /** @param {Wire} wire */
  constructor(wire) {
    this.wire = wire;
    /** @type {Map<number, Entry>} */
    this.known = new Map();
    /** @type {Entry[]} oldest first */
    this.entries = [];
    this.oldest = 0; // the number of the first that the kernel keeps; 0: not asked yet
    this.now = 0;
    this.opened = false;
    this.cut = false;
    this.line = drawing("path", { "vector-effect": "non-scaling-stroke" });
    this.svg = drawing(
      "svg",
      { class: "nbe-steps", viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img" },
      this.line,
    );
    this.most = element("span");
    this.from = element("time");
    this.to = element("time");
    this.rug = element("div", { class: "nbe-rug", "aria-hidden": "true" });
    this.marks = new Many(this.rug, (_, { entry }) => this.makeMark(entry));
    this.chart = element(
      "div",
      { class: "nbe-chart" },
      element("span", { class: "nbe-axis", "aria-hidden": "true" }, this.most, element("span", {}, "0")),
      element("div", { class: "nbe-plot" }, this.svg, this.rug),
      element("span", { class: "nbe-times", "aria-hidden": "true" }, this.from, this.to),
    );
    this.filter = element(
      "select",
      {},
      ...[
        ["all", "all"],
        ["change", "changes"],
        ["failure", "failures"],
      ].map(([value, text]) => element("option", { value }, text)),
    );
    this.filter.addEventListener("change", () => this.show());
    this.earlier = button("Earlier", () => this.ask(this.entries[0]?.n ?? null), "nbe-small");
    this.trace = button("Save trace", () => this.save(), "nbe-small");
    this.trace.title = "A file for Perfetto or chrome://tracing";
    this.note = element("span", { class: "nbe-note", role: "status" });
    this.log = element("ol", { class: "nbe-log", "aria-label": "Events, newest first", tabindex: "0" });
    this.list = new Many(this.log, (_, entry) => new Happening(this, entry));
    const label = element("label", {}, "Show ", this.filter);
    const bar = element(
      "div",
      { class: "nbe-bar" },
      label,
      this.earlier,
      this.note,
      element("span", { class: "nbe-gap" }),
      this.trace,
    );
    this.node = element("div", {}, this.chart, bar, this.log);
  }

  makeMark(/** @type {Entry} */ entry) {
    const word = kinds(entry).split(" ").pop() || "other";
    const node = element("span", {
      "data-kind": word,
      "data-tone": tone(entry.kind),
      title: `${clock(entry.time)} ${entry.text}`,
    });
    node.textContent = { change: "▲", failure: "✕", other: "" }[word] ?? "";
    node.addEventListener("click", () => this.reveal(entry.n));
    const draw = (/** @type {{x: number}} */ { x }) => mark(node, "style", `left:${x}%`);
    return { node, draw };
  }

  reveal(/** @type {number} */ n) {
    this.filter.value = "all";
    this.show();
    const item = this.list.parts.get(String(n))?.node;
    item?.scrollIntoView({ block: "nearest" });
    if (item) light(item);
  }

  open() {
    this.opened = true;
    if (this.oldest) this.mend();
    else this.ask(null);
    this.show();
  }

  shut() {
    this.opened = false;
  }

  ask(/** @type {?number} */ before) {
    this.wire.ask("history", { before }, (reply) => {
      say(this.note, reply.error ?? "");
      if (reply.error) return;
      this.oldest = reply.oldest ?? 1;
      if (this.add(reply.events) && this.opened) this.mend();
      this.show();
    });
  }

  /** More may have happened than the last few events tell, while nobody looked: ask for what is missing. */
  mend() {
    const missing = gap(this.entries);
    if (missing > this.oldest) this.ask(missing);
  }

  add(/** @type {Entry[]} */ entries) {
    const fresh = entries.filter((entry) => !this.known.has(entry.n));
    for (const entry of fresh) this.known.set(entry.n, entry);
    if (fresh.length) this.entries = [...this.known.values()].sort((a, b) => a.n - b.n);
    for (const { n } of this.entries.splice(0, Math.max(0, this.entries.length - MOST_EVENTS))) this.known.delete(n);
    return fresh.length > 0;
  }

  draw(/** @type {State} */ state, /** @type {number} */ now, /** @type {boolean} */ cut) {
    const fresh = this.add(state.events);
    disable(this.trace, cut);
    if (cut !== this.cut) {
      this.cut = cut;
      this.show();
    }
    if (!this.opened) return;
    if (fresh && this.oldest) this.mend();
    const end = this.entries[this.entries.length - 1]?.time ?? 0;
    const at = state.phase === "finished" ? end : now;
    if (!fresh && Math.abs(at - this.now) < Math.max(1, (this.now - (this.entries[0]?.time ?? at)) / 300)) return;
    this.now = at;
    this.show();
  }

  show() {
    const kind = this.filter.value;
    const listed = once(this.entries.filter((entry) => kind === "all" || kinds(entry).includes(kind))).reverse();
    this.list.draw(
      listed.map((entry) => [String(entry.n), entry]),
      null,
    );
    mark(
      this.log,
      "data-empty",
      listed.length ? null : kind === "all" ? "Nothing has happened yet." : `No ${kind}s among the events shown.`,
    );
    const first = this.entries[0]?.n ?? 0;
    disable(this.earlier, this.cut || !this.oldest || first <= this.oldest || this.entries.length >= MOST_EVENTS);
    this.drawChart();
  }

  drawChart() {
    const shape = chart(this.entries, this.now);
    mark(this.chart, "hidden", shape ? null : "");
    if (!shape) return;
    mark(this.line, "d", shape.path);
    const span = `from ${clock(shape.from)} to ${clock(shape.to)}`;
    const count = plural(this.entries.length, "event");
    const words = `Size of the world ${span}: ${shape.size} now, ${shape.most} at most, ${count}`;
    mark(this.svg, "aria-label", words);
    say(this.most, String(shape.most));
    say(this.from, clock(shape.from));
    say(this.to, clock(shape.to));
    this.marks.draw(
      shape.marks.map((at) => [String(at.entry.n), at]),
      null,
    );
  }

  save() {
    say(this.note, "asking for the trace …");
    this.wire.ask(
      "trace",
      {},
      (reply) => {
        say(this.note, reply.error ?? "");
        if (reply.error) return;
        const address = URL.createObjectURL(new Blob([JSON.stringify(reply.trace)], { type: "application/json" }));
        element("a", { href: address, download: "nbelastic-trace.json" }).click();
        this.wire.timers.later(() => URL.revokeObjectURL(address), 10_000);
      },
      30_000,
    );
  }
}

// ---- Logs ----------------------------------------------------------------------------------------------------------

/**
 * @typedef {[number, string, string, number[][]]} Sent  number, stream, text, and who printed it: runs of places among those
 *   who speak in an answer
 * @typedef {{stream: string, text: string, name: string, hidden: boolean}} Unfinished
 */

/** @returns {Writer[]} @param {Writer[]} speakers @param {number[][]} runs */
const among = (speakers, runs) => runs.flatMap(([first, last]) => speakers.slice(first, last + 1));

class Logs {
  /** @param {Wire} wire @param {Timers} timers @param {() => boolean} visible */
  constructor(wire, timers, visible) {
    this.wire = wire;
    this.timers = timers;
    this.visible = visible;
    this.worker = element("select");
    this.worker.addEventListener("change", () => this.restart());
    this.choices = new Many(this.worker, (value) => {
      const node = element("option", { value });
      return { node, draw: (/** @type {string} */ text) => say(node, text) };
    });
    this.search = element("input", {
      type: "search",
      placeholder: "Search",
      "aria-label": "Search the lines",
      spellcheck: "false",
    });
    this.search.addEventListener("input", () => this.sift());
    this.follow = button("Follow", () => this.setFollow(!this.following), "nbe-small nbe-toggle");
    this.note = element("span", { class: "nbe-note", role: "status" });
    this.box = element("div", { class: "nbe-lines", role: "region", "aria-label": "Log", tabindex: "0" });
    this.box.addEventListener("scroll", () => this.scrolled());
    const pending = element("div", { class: "nbe-pending" });
    this.box.append(pending);
    /** @type {Many<Unfinished, null>} lines that have no end yet, as of progress bars */
    this.pending = new Many(pending, () => this.makePending());
    this.end = pending;
    const gap = element("span", { class: "nbe-gap" });
    const bar = element(
      "div",
      { class: "nbe-bar" },
      element("label", {}, "Lines of ", this.worker),
      this.search,
      this.follow,
      gap,
      this.note,
    );
    this.node = element("div", {}, bar, this.box);
    /** @type {Writer[]} */
    this.writers = [];
    this.fold = new Fold();
    /** @type {Map<number, {node: HTMLElement, who: HTMLElement}>} */
    this.lines = new Map();
    this.since = 0;
    this.round = 0; // an answer to a question of an earlier round is not for what is shown now
    this.opened = false;
    this.polling = 0;
    /** @type {?string} */
    this.job = null;
    this.top = 0;
    this.following = true;
    this.setFollow(true);
    this.choose();
  }

  open() {
    this.opened = true;
    this.poll();
  }

  shut() {
    this.opened = false;
    this.timers.cancel(this.polling);
  }

  pick(/** @type {string} */ id) {
    this.choose(id);
    this.worker.value = id;
    this.restart();
    this.worker.focus();
  }

  /** Begin with nothing: another worker's lines, or another job's. */
  restart() {
    this.fold = new Fold();
    this.lines.clear();
    this.since = 0;
    this.round += 1;
    this.pending.draw([], null);
    this.box.replaceChildren(this.end);
    this.setFollow(true);
    if (this.opened) this.poll();
  }

  poll() {
    this.timers.cancel(this.polling);
    this.polling = this.timers.later(() => this.poll(), POLL);
    if (!this.opened || this.wire.cut || !this.visible()) return;
    const round = this.round;
    this.wire.ask("logs", { worker: this.worker.value || null, since: this.since }, (reply) => {
      if (round !== this.round) return this.poll(); // asked for others meanwhile
      if (!this.opened) return;
      if (reply.error) return say(this.note, reply.error);
      if (reply.job !== this.job && this.since) {
        this.job = reply.job;
        return this.restart();
      }
      this.job = reply.job;
      this.writers = reply.writers ?? [];
      this.choose();
      const speakers = reply.speakers ?? [];
      this.add(reply.lines.filter((/** @type {[number]} */ [n]) => n > this.since), speakers);
      this.since = reply.next;
      this.drawPending(reply.unfinished ?? [], speakers);
    });
  }

  choose(id = this.worker.value) {
    const known = this.writers.map(([worker]) => worker);
    const writers = id && !known.includes(id) ? [...this.writers, /** @type {Writer} */ ([id, null])] : this.writers;
    const sorted = [...writers].sort((a, b) => (a[1] ?? Infinity) - (b[1] ?? Infinity) || (a[0] < b[0] ? -1 : 1));
    const text = (/** @type {Writer} */ [worker, rank]) => (rank === null ? worker : `rank ${rank} · ${worker}`);
    /** @type {[string, string][]} */
    const choices = sorted.map((writer) => [writer[0], text(writer)]);
    this.choices.draw([["", "all ranks"], ...choices], null);
  }

  /** @param {Sent[]} lines @param {Writer[]} speakers */
  add(lines, speakers) {
    /** @type {Set<Line>} */
    const touched = new Set();
    for (const [, stream, text, runs] of lines) {
      const plain = clean(text);
      for (const [id, rank] of among(speakers, runs)) touched.add(this.fold.add(id, stream, plain, rank));
    }
    for (const { seq } of this.fold.trim()) {
      this.lines.get(seq)?.node.remove();
      this.lines.delete(seq);
    }
    const wanted = this.search.value.toLowerCase();
    const fresh = document.createDocumentFragment();
    for (const line of touched) {
      if (!this.fold.lines.length || line.seq < this.fold.lines[0].seq) continue;
      let shown = this.lines.get(line.seq);
      if (!shown) {
        shown = this.makeLine(line, wanted);
        fresh.append(shown.node);
        this.lines.set(line.seq, shown);
      }
      say(shown.who, this.label([...line.writers]));
    }
    this.end.before(fresh);
    this.tell();
    if (this.following) this.bottom();
  }

  /** Of those who had no rank when they printed, as a script's workers, the present one. */
  label(/** @type {Writer[]} */ writers) {
    const ranks = new Map(this.writers);
    return who(writers.map(([id, rank]) => [id, rank ?? ranks.get(id) ?? null]));
  }

  drawPending(/** @type {Sent[]} */ lines, /** @type {Writer[]} */ speakers) {
    const wanted = this.search.value.toLowerCase();
    /** @type {[string, Unfinished][]} */
    const items = lines.map(([, stream, sent, runs]) => {
      const writers = among(speakers, runs);
      const text = clean(sent);
      const hidden = wanted !== "" && !text.toLowerCase().includes(wanted);
      return [`${stream} ${writers[0]?.[0]}`, { stream, text, name: this.label(writers), hidden }];
    });
    this.pending.draw(items, null);
    if (this.following) this.bottom();
  }

  makePending() {
    const [name, tag, words] = ["nbe-who", "nbe-stream", ""].map((name) => element("span", name ? { class: name } : {}));
    const node = element("div", { class: "nbe-line" }, name, tag, words);
    const draw = (/** @type {Unfinished} */ line) => {
      mark(node, "data-stream", line.stream);
      say(name, line.name);
      say(tag, line.stream === "err" ? "err" : "");
      say(words, line.text);
      node.hidden = line.hidden;
    };
    return { node, draw };
  }

  makeLine(/** @type {Line} */ { stream, text }, /** @type {string} */ wanted) {
    const name = element("span", { class: "nbe-who" });
    const tag = element("span", { class: "nbe-stream" }, stream === "err" ? "err" : "");
    const node = element("div", { class: "nbe-line", "data-stream": stream }, name, tag, element("span", {}, text));
    node.hidden = wanted !== "" && !text.toLowerCase().includes(wanted);
    return { node, who: name };
  }

  sift() {
    const wanted = this.search.value.toLowerCase();
    for (const { seq, text } of this.fold.lines) {
      const node = this.lines.get(seq)?.node;
      if (node) node.hidden = wanted !== "" && !text.toLowerCase().includes(wanted);
    }
    this.tell();
    if (this.following) this.bottom();
  }

  tell() {
    const all = this.fold.lines.length;
    const wanted = this.search.value.toLowerCase();
    const found = wanted ? this.fold.lines.filter(({ text }) => text.toLowerCase().includes(wanted)).length : all;
    say(this.note, `${found === all ? "" : `${found} of `}${plural(all, "line")}${this.job ? ` of ${this.job}` : ""}`);
  }

  setFollow(/** @type {boolean} */ on) {
    this.following = on;
    mark(this.follow, "aria-pressed", String(on));
    if (on) this.bottom();
  }

  bottom() {
    this.box.scrollTop = this.box.scrollHeight;
    this.top = this.box.scrollTop;
  }

  scrolled() {
    const away = this.box.scrollHeight - this.box.clientHeight - this.box.scrollTop;
    if (this.following && this.box.scrollTop < this.top && away > 8) this.setFollow(false);
    this.top = this.box.scrollTop;
  }
}

// ---- Stacks --------------------------------------------------------------------------------------------------------

class Stacks {
  /** @param {Wire} wire */
  constructor(wire) {
    this.wire = wire;
    this.asking = this.cut = false;
    this.now = button("Stacks now", () => this.ask(), "nbe-small");
    this.note = element("span", { class: "nbe-note", role: "status" }, "Where is every rank at this moment?");
    this.list = element("div", { class: "nbe-stacks" });
    this.node = element("div", {}, element("div", { class: "nbe-bar" }, this.now, this.note), this.list);
  }

  open() {}

  shut() {}

  draw(/** @type {boolean} */ cut) {
    this.cut = cut;
    disable(this.now, this.cut || this.asking);
  }

  ask() {
    this.asking = true;
    disable(this.now, true);
    say(this.note, "asking all ranks …");
    this.wire.ask("stacks", {}, (reply) => {
      this.asking = false;
      disable(this.now, this.cut);
      if (reply.error) return say(this.note, reply.error);
      const silent = reply.silent.length ? ` No answer from ${who(reply.silent)}.` : "";
      say(this.note, `At ${clock(Date.now() / 1000)}.${silent}`);
      this.list.replaceChildren(
        ...reply.stacks.map((/** @type {any} */ group, /** @type {number} */ i) => {
          const head = element(
            "summary",
            {},
            element("b", {}, who(group.workers)),
            " ",
            element("code", {}, group.place),
          );
          if (group.note) head.append(" ", element("em", {}, group.note));
          const ids = element(
            "p",
            { class: "nbe-note" },
            group.workers.map((/** @type {Writer} */ [id]) => id).join(", "),
          );
          const node = element(
            "details",
            group.note ? { "data-behind": "" } : {},
            head,
            ids,
            element("pre", { tabindex: "0" }, group.text),
          );
          node.open = i === 0 || Boolean(group.note);
          return node;
        }),
      );
    });
  }
}

// ---- The panels below the board, one at a time ---------------------------------------------------------------------

/** @typedef {{node: HTMLElement, open(): void, shut(): void}} Panel */

class Tabs {
  /** @param {string} id @param {[string, Panel][]} panels */
  constructor(id, panels) {
    this.list = element("div", { class: "nbe-tabs", role: "tablist", "aria-label": "More" });
    this.node = element("div", {}, this.list);
    this.at = -1;
    this.tabs = panels.map(([name, panel], i) => {
      const names = { tab: `${id}tab${i}`, panel: `${id}panel${i}` };
      const tab = element("button", { type: "button", role: "tab", id: names.tab, "aria-controls": names.panel }, name);
      tab.addEventListener("click", () => this.select(i));
      const box = element(
        "div",
        { class: "nbe-panel", role: "tabpanel", id: names.panel, "aria-labelledby": names.tab, hidden: "" },
        panel.node,
      );
      this.list.append(tab);
      this.node.append(box);
      return { tab, box, panel };
    });
    this.list.addEventListener("keydown", (event) => {
      const last = this.tabs.length - 1;
      const places = {
        ArrowLeft: this.at ? this.at - 1 : last,
        ArrowRight: this.at < last ? this.at + 1 : 0,
        Home: 0,
        End: last,
      };
      const place = places[/** @type {keyof typeof places} */ (event.key)];
      if (place === undefined) return;
      event.preventDefault();
      this.select(place);
      this.tabs[place].tab.focus();
    });
  }

  select(/** @type {number} */ at) {
    if (at === this.at) return;
    this.tabs[this.at]?.panel.shut();
    this.at = at;
    this.tabs.forEach(({ tab, box }, i) => {
      mark(tab, "aria-selected", String(i === at));
      mark(tab, "tabindex", i === at ? "0" : "-1");
      box.hidden = i !== at;
    });
    this.tabs[at].panel.open();
  }
}

// ---- The view ------------------------------------------------------------------------------------------------------

/** One view of the model. It is made with all its timers and listeners, and `close` takes all of them away. */
class View {
  /** @param {Model} model @param {HTMLElement} el */
  constructor(model, el) {
    this.model = model;
    this.timers = new Timers();
    this.wire = new Wire(model, this.timers, () => this.heard());
    this.orders = new Orders(this.wire, this.timers);
    this.inSight = true;
    const visible = () => this.inSight && !document.hidden;
    const id = `nbe-${this.wire.mine}`;
    this.glance = new Glance();
    const send = this.orders.send.bind(this.orders);
    this.board = new Board({ send, timers: this.timers, openLog: (worker) => this.openLog(worker), id });
    this.board.redraw = () => this.soon();
    this.steering = new Steering(this.orders, this.timers);
    this.timeline = new Timeline(this.wire);
    this.logs = new Logs(this.wire, this.timers, visible);
    this.tabs = new Tabs(id, [
      ["Timeline", this.timeline],
      ["Logs", this.logs],
      ["Stacks", (this.stacks = new Stacks(this.wire))],
    ]);
    this.why = element("span", { role: "alert" }); // constant while it is shown: each change of it is spoken
    this.age = element("span");
    this.dead = element("p", { class: "nbe-dead", hidden: "" }, this.why, " ", this.age);
    const parts = [this.glance, this.board, this.steering, this.orders, this.tabs].map((part) => part.node);
    this.root = element(
      "section",
      { class: "nbe", "aria-label": "Elastic cluster", tabindex: "-1" },
      this.dead,
      ...parts,
    );
    el.append(this.root);
    this.frame = 0;
    this.skew = Infinity; // seconds that this clock is ahead of the kernel's
    this.lastWord = Date.now();
    this.asked = 0; // when the kernel was asked whether it is there; 0: it was not, or has answered
    this.missed = 0; // since when the change that is there has no key frame; 0: it has
    this.listen();
    this.draw();
    this.tabs.select(0);
    this.tick();
  }

  listen() {
    const { model, root } = this;
    const update = () => this.updated();
    const view = this;
    /** anywidget calls with its own view as `this`; others may call with anything. @this {any} */
    const live = function () {
      view.connection(this?.model?.comm_live ?? this?.comm_live);
    };
    const back = () => document.hidden || this.soon();
    const sight = new IntersectionObserver(
      (seen) => {
        this.inSight = seen[seen.length - 1].isIntersecting;
        this.soon();
      },
      { rootMargin: "200px" },
    );
    const dim = (/** @type {Event} */ event) =>
      event.target instanceof Element && event.target.classList.remove("nbe-news");
    // The notebook's shortcuts are not meant by what is typed or pressed here.
    const mine = (/** @type {KeyboardEvent} */ event) =>
      event.ctrlKey || event.metaKey || event.altKey || event.stopPropagation();
    model.on("change:state", update);
    model.on("change:change", update);
    model.on("comm_live_update", live);
    document.addEventListener("visibilitychange", back);
    root.addEventListener("animationend", dim);
    root.addEventListener("animationcancel", dim);
    root.addEventListener("keydown", mine);
    sight.observe(root);
    this.deafen = () => {
      model.off("change:state", update);
      model.off("change:change", update);
      model.off("comm_live_update", live);
      document.removeEventListener("visibilitychange", back);
      sight.disconnect();
    };
  }

  close() {
    this.deafen?.();
    this.wire.close();
    this.timers.close();
    cancelAnimationFrame(this.frame);
    this.root.remove();
  }

  state() {
    return shown(this.model.get("state"), this.model.get("change"));
  }

  updated() {
    this.heard();
    const { time } = this.state();
    if (time) this.skew = Math.min(this.skew, Date.now() / 1000 - time); // delays on the way only make it larger
    const change = this.model.get("change");
    const fits = change?.base === undefined || change.base === this.model.get("state")?.n;
    this.missed = fits ? 0 : this.missed || Date.now();
    this.soon();
  }

  /** Draw in the next frame, once, whatever comes until then. */
  soon() {
    if (this.frame || !this.inSight) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  draw() {
    const state = this.state();
    if (!state.phase) return;
    if (this.skew === Infinity) this.skew = Date.now() / 1000 - state.time;
    const now = Date.now() / 1000 - this.skew;
    const counts = this.board.count(state, now);
    mark(this.root, "data-phase", state.phase);
    this.glance.draw(state, counts, now);
    const cut = this.wire.cut;
    this.board.draw(state, counts, now, cut);
    this.steering.draw(state, cut);
    this.orders.draw(state.orders);
    this.timeline.draw(state, now, cut);
    this.stacks.draw(cut);
  }

  /** Once a second: what counts down, and whether the kernel is still there. */
  tick() {
    this.timers.later(() => this.tick(), 1000);
    if (!document.hidden) this.soon();
    if (this.missed && Date.now() - this.missed >= MISSED) this.wire.ask("frame", {}, () => {});
    const finished = this.state().phase === "finished";
    const quiet = Date.now() - this.lastWord;
    if (finished || this.wire.cut || quiet < QUIET) return;
    if (!this.asked || Date.now() - this.asked > 6 * DEAF) {
      this.asked = this.asked || Date.now();
      this.wire.ask("hello", {}, () => {}, 6 * DEAF);
    }
    if (Date.now() - this.asked >= DEAF)
      this.bury("No word from the kernel: it is busy, was restarted or is gone.", duration(quiet / 1000));
  }

  bury(/** @type {string} */ why, silent = "") {
    this.dead.hidden = false;
    say(this.why, why);
    const { time } = this.state();
    const age = time ? `What is shown is from ${clock(time)}.` : "";
    say(this.age, `${silent && `It has been silent for ${silent}. `}${age}`);
    this.root.classList.add("nbe-gone");
  }

  /** A word from the kernel: it lives. */
  heard() {
    this.lastWord = Date.now();
    this.asked = 0;
    this.wire.cut = false;
    if (this.dead.hidden) return;
    this.dead.hidden = true;
    say(this.why, "");
    this.root.classList.remove("nbe-gone");
    this.soon();
  }

  connection(/** @type {boolean|undefined} */ live) {
    if (live === false) {
      this.wire.cut = true;
      if (this.state().phase !== "finished")
        this.bury("The connection to the kernel is closed: it was restarted or is gone.");
      this.soon();
    } else {
      this.wire.cut = false;
      this.asked = Date.now();
      this.wire.ask("hello", {}, () => {}, DEAF);
    }
  }

  openLog(/** @type {string} */ worker) {
    this.tabs.select(1);
    this.logs.pick(worker);
    this.logs.node.scrollIntoView({ block: "nearest" });
  }
}

/** @param {{model: Model, el: HTMLElement}} context */
function render({ model, el }) {
  const view = new View(model, el);
  return () => view.close();
}

export default { render };
