// @ts-check
/**
 * The live view of a cluster. It draws the one `state` that the driver sends and sends back what people ask for; it
 * decides nothing. Plain DOM, no build, no network. Text from outside goes through textContent only.
 *
 * @typedef {{name: string, slots: number, phase: string, reason: string, cooling_until: number, cpu: ?number,
 *   memory: ?number}} Host
 * @typedef {{id: string, host: string, slot: number, rank: ?number, local_rank: ?number, pid: number, state: string,
 *   step: number, restarts: number, reason: string, cpu: ?number, memory: ?number}} Worker
 * @typedef {{n: number, time: number, kind: string, text: string, host: string, worker: string, epoch: number,
 *   took: Record<string, number>}} Entry  `time` in seconds since 1970, `took` in milliseconds
 * @typedef {{name: string, phase: string, reason: string, epoch: number, world_size: number, min: number, max: ?number,
 *   hosts: Host[], workers: Worker[], job: ?string, outcome: string, step: number, steps_per_second: ?number,
 *   report: Record<string, number|string>, events: Entry[]}} State
 * @typedef {{order: string, host?: string, now?: boolean}} Order
 * @typedef {{get(name: string): any, on(name: string, f: () => void): void, off(name: string, f: () => void): void,
 *   send(content: unknown): void}} Model
 */

const COLUMNS = ["Rank", "Worker", "State", "Step", "Restarts", "CPU", "Memory"];
const SHOWN_EVENTS = 8;
const MOST_PIPS = 64;
const PATIENCE = 3000; // ms until an order without an answer says so
const SURE = 4000; // ms in which the second click on "stop cluster" counts
const NEWS = 5000; // ms that an answered order stays in sight; a refused one stays three times as long

/** @param {string} tag @param {Record<string, string>} [attributes] @param {...(Node|string)} children */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Change a node's text only if it differs: selections and screen readers are left in peace. */
function say(/** @type {HTMLElement} */ node, /** @type {string} */ text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Change an attribute only if it differs. */
function mark(/** @type {HTMLElement} */ node, /** @type {string} */ name, /** @type {string} */ value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

/**
 * Keep one child of `parent` per item, in the items' order; those that stay are not touched, so focus stays too.
 * Children without a `data-key` are none of the items': they stay in front.
 * @template T
 * @param {HTMLElement} parent @param {T[]} items @param {(item: T) => string} key
 * @param {(item: T) => HTMLElement} make @param {(node: HTMLElement, item: T) => void} fill
 */
export function keep(parent, items, key, make, fill) {
  const children = Array.from(parent.children);
  const old = new Map(children.filter((n) => n.hasAttribute("data-key")).map((n) => [n.getAttribute("data-key"), n]));
  let last = children.filter((n) => !n.hasAttribute("data-key")).pop();
  for (const item of items) {
    const name = key(item);
    const node = /** @type {HTMLElement} */ (old.get(name)) ?? make(item);
    old.delete(name);
    mark(node, "data-key", name);
    fill(node, item);
    const next = last ? last.nextElementSibling : parent.firstElementChild;
    if (next !== node) parent.insertBefore(node, next);
    last = node;
  }
  for (const node of old.values()) node.remove();
}

export const plural = (/** @type {number} */ n, /** @type {string} */ word) => `${n} ${word}${n === 1 ? "" : "s"}`;

/** `2 / 2–4`, `4 / 4` or `3 / 2+`. @param {State} state */
export function size(state) {
  const { world_size: now, min, max } = state;
  return `${now} / ${max === null ? `${min}+` : min === max ? min : `${min}–${max}`}`;
}

export function bytes(/** @type {?number} */ n) {
  if (n === null || n === undefined) return "";
  return n < 1e9 ? `${Math.round(n / 1e6)} MB` : `${(n / 1e9).toFixed(1)} GB`;
}

const percent = (/** @type {?number} */ n) => (n === null || n === undefined ? "" : `${Math.round(n)} %`);

export function number(/** @type {number|string} */ n) {
  if (typeof n === "string") return n;
  return Number.isInteger(n) ? n.toLocaleString() : n.toPrecision(3);
}

/** good, bad, busy or quiet: the four colours. */
export function tone(/** @type {string} */ word) {
  if (/lost|failed|broken|refused|killed|raised/.test(word)) return "bad";
  if (/running|formed|up$|succeeded|ready/.test(word)) return "good";
  if (/start|form|cool|drain|plan|stopping|waiting|remove/.test(word)) return "busy";
  return "quiet";
}

/** What became of an order, read from the state: null while nothing tells. */
export function answer(
  /** @type {Order} */ order,
  /** @type {number} */ since,
  /** @type {State} */ state,
) {
  const host = (order.host ?? "").replace(/^.*@/, "").replace(/:\d+$/, "").replace(/^\[|\]$/g, "");
  for (const entry of state.events.filter((e) => e.n > since)) {
    const about = !entry.host || entry.host === host;
    if (entry.kind === "order-refused" && about) return { word: "refused", text: entry.text, n: entry.n };
    if (order.order === "add_host" && /^host-(added|changed)$/.test(entry.kind) && about) return { word: "done" };
    if (order.order === "remove_host" && /^host-(removed|gone)$/.test(entry.kind) && about) return { word: "done" };
    if (order.order === "stop_job" && /^job-(stopped|failed|succeeded)$/.test(entry.kind)) return { word: "done" };
  }
  if (order.order === "stop" && state.phase === "finished") return { word: "done" };
  if (order.order === "remove_host" && !state.hosts.some((h) => h.name === host)) return { word: "done" };
  return null;
}

/** One view of the model. `render` makes it, `close` takes it away with all its timers and listeners. */
class View {
  /** @param {Model} model @param {HTMLElement} el */
  constructor(model, el) {
    this.model = model;
    /** @type {{id: number, order: Order, text: string, since: number, word: string, why: string}[]} */
    this.orders = [];
    /** @type {?ReturnType<typeof setTimeout>} */
    this.sure = null; // set while a second click would stop the cluster
    this.sent = 0;
    this.refused = 0; // the last refusal that an order has taken for its own
    /** @type {Set<ReturnType<typeof setTimeout>>} */
    this.timers = new Set();
    this.update = () => this.draw(model.get("state"));
    this.root = this.build();
    el.append(this.root);
    model.on("change:state", this.update);
    this.update();
  }

  close() {
    this.model.off("change:state", this.update);
    for (const timer of this.timers) clearTimeout(timer);
    this.timers.clear();
    this.root.remove();
  }

  later(/** @type {() => void} */ f, /** @type {number} */ ms) {
    const timer = setTimeout(() => (this.timers.delete(timer), f()), ms);
    this.timers.add(timer);
    return timer;
  }

  build() {
    this.phase = element("strong", { class: "nbe-phase" });
    this.reason = element("span", { class: "nbe-reason" });
    this.pips = element("div", { class: "nbe-pips", "aria-hidden": "true" });
    this.facts = element("dl", { class: "nbe-facts" });
    this.table = this.buildTable();
    this.list = element("ul", { class: "nbe-orders", role: "status", "aria-live": "polite", "aria-label": "Orders" });
    this.log = element("ol", { class: "nbe-log", "aria-label": "Last events, newest first" });
    return element(
      "section",
      { class: "nbe", "aria-label": "Elastic cluster" },
      element(
        "header",
        { class: "nbe-head" },
        element("p", { class: "nbe-state", role: "status", "aria-live": "polite" }, this.phase, " ", this.reason),
        this.pips,
      ),
      this.facts,
      element("div", { class: "nbe-scroll" }, this.table),
      this.buildControls(),
      this.list,
      element("h4", { class: "nbe-title" }, "Events"),
      this.log,
    );
  }

  buildTable() {
    const head = COLUMNS.map((name) => element("th", { scope: "col", class: `nbe-${name.toLowerCase()}` }, name));
    return element(
      "table",
      { class: "nbe-table" },
      element("caption", { class: "nbe-title" }, "Hosts and workers"),
      element("thead", {}, element("tr", {}, ...head)),
    );
  }

  buildControls() {
    const field = /** @type {HTMLInputElement} */ (
      element("input", { type: "text", placeholder: "name:slots", size: "16", spellcheck: "false", required: "" })
    );
    field.setAttribute("autocomplete", "off");
    this.add = element("button", { type: "submit", class: "nbe-button" }, "Add host");
    const form = element(
      "form",
      { class: "nbe-form" },
      element("label", { class: "nbe-label" }, element("span", { class: "nbe-hidden" }, "Host to add"), field),
      this.add,
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const host = field.value.trim();
      if (host) this.send({ order: "add_host", host }, `add ${host}`);
      field.value = "";
    });
    form.addEventListener("keydown", (event) => event.stopPropagation()); // the notebook's shortcuts are not meant
    this.stopJob = element("button", { type: "button", class: "nbe-button" }, "Stop job");
    this.stopJob.addEventListener("click", () => this.send({ order: "stop_job" }, "stop the job"));
    this.stop = element("button", { type: "button", class: "nbe-button nbe-danger" }, "Stop cluster");
    this.stop.addEventListener("click", () => this.askTwice());
    const gap = element("span", { class: "nbe-gap" });
    return element("div", { class: "nbe-controls" }, form, gap, this.stopJob, this.stop);
  }

  askTwice() {
    if (this.sure) {
      clearTimeout(this.sure);
      this.calm();
      this.send({ order: "stop" }, "stop the cluster");
      return;
    }
    this.sure = this.later(() => this.calm(), SURE);
    this.stop.classList.add("nbe-sure");
    say(this.stop, "Really stop it?");
  }

  calm() {
    this.sure = null;
    this.stop.classList.remove("nbe-sure");
    say(this.stop, "Stop cluster");
  }

  send(/** @type {Order} */ order, /** @type {string} */ text) {
    const events = this.model.get("state").events;
    const since = Math.max(this.refused, events.length ? events[events.length - 1].n : 0);
    const pending = { id: ++this.sent, order, text, since, word: "sent", why: "" };
    this.orders.push(pending);
    try {
      this.model.send(order);
    } catch (error) {
      this.settle(pending, "refused", `the kernel does not listen: ${error}`);
    }
    this.later(() => {
      if (pending.word === "sent") pending.why = "no answer yet; is the kernel busy or gone?";
      this.drawOrders();
    }, PATIENCE);
    this.drawOrders();
  }

  settle(/** @type {View["orders"][0]} */ pending, /** @type {string} */ word, /** @type {string} */ why) {
    pending.word = word;
    pending.why = why;
    const drop = () => {
      this.orders = this.orders.filter((order) => order !== pending);
      this.drawOrders();
    };
    this.later(drop, word === "refused" ? 3 * NEWS : NEWS);
  }

  draw(/** @type {State} */ state) {
    if (!state || !state.phase) return;
    for (const pending of this.orders.filter((order) => order.word === "sent")) {
      const news = answer(pending.order, Math.max(pending.since, this.refused), state);
      if (news) this.settle(pending, news.word, news.text ?? "");
      if (news?.n) this.refused = news.n;
    }
    this.drawHead(state);
    this.drawHosts(state);
    this.drawOrders();
    this.drawLog(state);
    const over = state.phase === "finished" || state.phase === "stopping";
    for (const button of [this.add, this.stop]) button.toggleAttribute("disabled", over);
    this.stopJob.toggleAttribute("disabled", over || !state.job || state.outcome !== "");
  }

  drawHead(/** @type {State} */ state) {
    const training = Boolean(state.job) && !state.outcome;
    const ready = state.workers.filter((worker) => worker.state === "ready").length;
    const idle = state.phase === "waiting" && !training && ready >= state.min;
    mark(this.root, "data-phase", state.phase);
    say(this.phase, idle ? "ready" : state.phase);
    mark(this.phase, "data-tone", idle ? "good" : tone(state.phase));
    say(this.reason, state.reason);
    const workers = state.workers.slice().sort(byRank).slice(0, MOST_PIPS);
    const room = Math.min(state.max ?? 0, MOST_PIPS);
    const pips = workers.map((w) => ({ tone: w.rank === null ? `${tone(w.state)} out` : tone(w.state), title: w.id }));
    while (pips.length < room) pips.push({ tone: "empty", title: "" });
    const named = pips.map((pip, i) => ({ ...pip, key: String(i) }));
    keep(this.pips, named, (pip) => pip.key, () => element("i"), (node, pip) => {
      mark(node, "class", `nbe-pip nbe-${pip.tone.replace(" ", " nbe-")}`);
      mark(node, "title", pip.title);
    });
    const facts = [training ? ["World", size(state)] : ["Ready", size({ ...state, world_size: ready })]];
    facts.push(["Epoch", String(state.epoch)], ["Step", number(state.step)]);
    if (training && state.steps_per_second !== null) facts.push(["Steps/s", number(state.steps_per_second)]);
    if (state.job) facts.unshift(["Job", `${state.job}${state.outcome ? ` ${state.outcome}` : ""}`]);
    facts.push(...Object.entries(state.report).map(([name, value]) => [name, number(value)]));
    const pair = () => element("div", {}, element("dt"), element("dd"));
    keep(this.facts, facts, ([name]) => name, pair, (node, [name, value]) => {
      say(/** @type {HTMLElement} */ (node.children[0]), name);
      say(/** @type {HTMLElement} */ (node.children[1]), value);
    });
  }

  drawHosts(/** @type {State} */ state) {
    const groups = state.hosts.map((host) => ({
      host,
      workers: state.workers.filter((w) => w.host === host.name).sort(byRank),
    }));
    const table = /** @type {HTMLElement} */ (this.table);
    keep(table, groups, ({ host }) => host.name, ({ host }) => this.makeHost(host), (node, { host, workers }) =>
      fillHost(node, host, workers, state.phase),
    );
  }

  makeHost(/** @type {Host} */ host) {
    const remove = element("button", { type: "button", class: "nbe-button nbe-small" }, "Remove");
    remove.setAttribute("aria-label", `Remove host ${host.name}`);
    const order = { order: "remove_host", host: host.name, now: false };
    remove.addEventListener("click", () => this.send(order, `remove ${host.name}`));
    const name = element("th", { scope: "rowgroup", colspan: String(COLUMNS.length) });
    const words = element("span", { class: "nbe-host" }, element("b"), element("span"), element("span"), remove);
    name.append(words);
    return element("tbody", {}, element("tr", { class: "nbe-hostrow" }, name));
  }

  drawOrders() {
    keep(this.list, this.orders, (order) => String(order.id), () => element("li"), (node, order) => {
      mark(node, "data-word", order.word);
      say(node, `${order.text}: ${order.word}${order.why ? `, ${order.why}` : ""}`);
    });
  }

  drawLog(/** @type {State} */ state) {
    const entries = state.events.slice(-SHOWN_EVENTS).reverse();
    const make = () => element("li", {}, element("time"), element("span"));
    keep(this.log, entries, (entry) => String(entry.n), make, (node, entry) => {
      const when = new Date(entry.time * 1000);
      const took = Object.entries(entry.took).map(([name, ms]) => `${name} ${number(ms)} ms`);
      mark(node, "data-tone", tone(entry.kind));
      mark(node, "title", [entry.kind, ...took].join(" · "));
      mark(/** @type {HTMLElement} */ (node.children[0]), "datetime", when.toISOString());
      say(/** @type {HTMLElement} */ (node.children[0]), when.toTimeString().slice(0, 8));
      const all = entry.took.all ? ` · ${number(Math.round(entry.took.all))} ms in all` : "";
      say(/** @type {HTMLElement} */ (node.children[1]), entry.text + all);
    });
  }
}

/** Members first, by rank. @param {Worker} a @param {Worker} b */
function byRank(a, b) {
  return (a.rank ?? Infinity) - (b.rank ?? Infinity) || (a.id < b.id ? -1 : 1);
}

/** @param {HTMLElement} body @param {Host} host @param {Worker[]} workers @param {string} phase */
function fillHost(body, host, workers, phase) {
  const [name, state, use, remove] = /** @type {HTMLElement[]} */ (
    Array.from(body.querySelector(".nbe-host")?.children ?? [])
  );
  const cooling = host.cooling_until > 0 ? `${Math.ceil(host.cooling_until)} s to go` : "";
  say(name, host.name);
  const why = host.reason === host.phase ? "" : host.reason;
  say(state, [plural(host.slots, "slot"), host.phase, why, cooling].filter(Boolean).join(" · "));
  mark(state, "data-tone", tone(host.phase));
  say(use, [percent(host.cpu), bytes(host.memory)].filter(Boolean).join(" · "));
  remove.toggleAttribute("disabled", phase === "finished" || phase === "stopping" || host.phase === "draining");
  keep(body, workers, (worker) => worker.id, makeWorker, fillWorker);
}

function makeWorker() {
  const cells = COLUMNS.map((name) => element("td", { class: `nbe-${name.toLowerCase()}` }));
  cells[1].append(element("span", { class: "nbe-of" }), element("span")); // host/ and slot#incarnation
  return element("tr", {}, ...cells);
}

/** @param {HTMLElement} row @param {Worker} worker */
function fillWorker(row, worker) {
  const { id, state, step, restarts, cpu, memory } = worker;
  const [rank, name, ...others] = /** @type {HTMLElement[]} */ (Array.from(row.children));
  const [host, own] = /** @type {HTMLElement[]} */ (Array.from(name.children));
  say(rank, worker.rank === null ? "–" : String(worker.rank));
  say(host, `${worker.host}/`);
  say(own, id.slice(worker.host.length + 1));
  const texts = [state, number(step), String(restarts), percent(cpu), bytes(memory)];
  texts.forEach((text, i) => say(others[i], text));
  mark(others[0], "data-tone", tone(state));
  mark(row, "title", [`process ${worker.pid}`, worker.reason].filter(Boolean).join(" · "));
}

/** @param {{model: Model, el: HTMLElement}} context */
function render({ model, el }) {
  const view = new View(model, el);
  return () => view.close();
}

export default { render };
