// The widget's promises, each as a short story: `node --test` in widgets/, nothing to install.
import assert from "node:assert/strict";
import { mock, test } from "node:test";

import { Element } from "./dom.mjs";
import dashboard, { answer, bytes, number, size, tone } from "../dashboard.js";

const worker = (id, rank, more = {}) => ({
  id, host: id.split("/")[0], slot: 0, rank, local_rank: rank, pid: 7, state: "running", step: 5, restarts: 0, reason: "",
  cpu: 97, memory: 3e8, ...more,
});
const host = (name, more = {}) => ({
  name, slots: 2, phase: "up", reason: "", cooling_until: 0, cpu: null, memory: null, ...more,
});
const event = (n, kind, text, more = {}) => ({ n, time: 1.7e9, kind, text, host: "", worker: "", epoch: 1, took: {}, ...more });
const state = (more = {}) => ({
  name: "c", phase: "running", reason: "world of 2", epoch: 3, world_size: 2, min: 2, max: 4, hosts: [host("a")],
  workers: [worker("a/0#1", 0), worker("a/1#1", 1)], job: "job-1", outcome: "", step: 5, report: {},
  steps_per_second: null, events: [], ...more,
});

class Model {
  constructor(first) {
    this.state = first;
    this.listeners = [];
    this.sent = [];
  }
  get() {
    return this.state;
  }
  on(_, f) {
    this.listeners.push(f);
  }
  off(_, f) {
    this.listeners = this.listeners.filter((g) => g !== f);
  }
  send(order) {
    this.sent.push(order);
  }
  tell(more) {
    this.state = { ...this.state, ...more };
    for (const f of this.listeners) f();
  }
}

function show(first = state()) {
  mock.timers.reset();
  mock.timers.enable({ apis: ["setTimeout"] });
  const model = new Model(first);
  const el = new Element("div");
  const close = dashboard.render({ model, el });
  const button = (text) => el.all((n) => n.tagName === "BUTTON" && n.textContent === text)[0];
  const orders = () => el.querySelector(".nbe-orders").children.map((li) => li.textContent);
  const add = (text) => {
    el.all((n) => n.tagName === "INPUT")[0].value = text;
    el.querySelector(".nbe-form").fire("submit");
  };
  const rows = () => el.all((n) => n.tagName === "TBODY").flatMap((b) => b.children.map((row) => row.textContent));
  return { model, el, close, button, orders, add, rows };
}

test("it says phase, reason, world, epoch, job and report at a glance", () => {
  const { el } = show(state({ steps_per_second: 55.123, report: { loss: 0.23171, lr: "nan" } }));
  assert.equal(el.querySelector(".nbe-state").textContent, "running world of 2");
  const facts = el.querySelector(".nbe-facts").children.map((pair) => pair.children.map((n) => n.textContent).join("="));
  assert.deepEqual(facts, ["Job=job-1", "World=2 / 2–4", "Epoch=3", "Step=5", "Steps/s=55.1", "loss=0.232", "lr=nan"]);
  assert.equal(el.querySelector(".nbe-pips").children.length, 4);
});

test("between jobs it says how many are ready", () => {
  const workers = [worker("a/0#1", null, { state: "ready" }), worker("a/1#1", null, { state: "ready" })];
  const { el, model } = show(state({ phase: "waiting", reason: "no job", world_size: 0, job: null, workers }));
  assert.equal(el.querySelector(".nbe-state").textContent, "ready no job");
  assert.equal(el.querySelector(".nbe-facts").children[0].textContent, "Ready2 / 2–4");
  model.tell({ workers: workers.slice(1), reason: "1 of min 2" });
  assert.equal(el.querySelector(".nbe-state").textContent, "waiting 1 of min 2");
});

test("each host has its workers, by rank, and those that stay are not touched", () => {
  const { el, model, rows } = show(state({ workers: [worker("a/1#1", 1), worker("a/0#1", 0)] }));
  assert.deepEqual(rows().map((text) => text.slice(0, 6)), ["a2 slo", "0a/0#1", "1a/1#1"]);
  const [first] = el.all((n) => n.tagName === "TBODY");
  const step = first.children[1].children[3];
  const writes = first.children[1].children[1].writes;
  model.tell({ hosts: [host("a"), host("b")], workers: [worker("a/0#1", 0, { step: 6 }), worker("b/0#1", 1)] });
  assert.equal(el.all((n) => n.tagName === "TBODY")[0], first);
  assert.equal(step.textContent, "6");
  assert.equal(first.children[1].children[1].writes, writes);
  assert.deepEqual(rows().map((text) => text.slice(0, 6)), ["a2 slo", "0a/0#1", "b2 slo", "1b/0#1"]);
  model.tell({ hosts: [host("b")] });
  assert.equal(el.all((n) => n.tagName === "TBODY").length, 1);
});

test("what comes from outside stays text", () => {
  const markup = "<img src=x onerror=alert(1)>";
  const { el } = show(state({ reason: markup, hosts: [host(markup)], events: [event(1, "host-up", markup)] }));
  assert.equal(el.querySelector(".nbe-reason").textContent, markup);
  assert.equal(el.all((n) => n.tagName === "IMG").length, 0);
});

test("an order is shown at once, then done, then gone", () => {
  const { model, add, orders } = show();
  add(" b:2 ");
  assert.deepEqual(model.sent, [{ order: "add_host", host: "b:2" }]);
  assert.deepEqual(orders(), ["add b:2: sent"]);
  model.tell({ events: [event(1, "host-added", "b with 2 slots", { host: "b" })] });
  assert.deepEqual(orders(), ["add b:2: done"]);
  mock.timers.tick(6000);
  assert.deepEqual(orders(), []);
});

test("a refusal says why, and belongs to one order only", () => {
  const { model, add, orders } = show(state({ events: [event(1, "order-refused", "old news")] }));
  add("x:0");
  add("b:1");
  const refused = event(2, "order-refused", "'x:0': at least 1 slot");
  model.tell({ events: [refused] });
  assert.deepEqual(orders(), ["add x:0: refused, 'x:0': at least 1 slot", "add b:1: sent"]);
  model.tell({ events: [refused, event(3, "host-added", "b", { host: "b" })] });
  assert.deepEqual(orders()[1], "add b:1: done");
});

test("an order without an answer says so", () => {
  const { add, orders } = show();
  add("b:2");
  mock.timers.tick(3500);
  assert.deepEqual(orders(), ["add b:2: sent, no answer yet; is the kernel busy or gone?"]);
});

test("a kernel that cannot be reached refuses", () => {
  const { model, button, orders } = show();
  model.send = () => {
    throw new Error("comm is closed");
  };
  button("Stop job").fire("click");
  assert.match(orders()[0], /^stop the job: refused, .*comm is closed/);
});

test("an empty host is no order", () => {
  const { model, add } = show();
  add("  ");
  assert.deepEqual(model.sent, []);
});

test("hosts are removed one by one", () => {
  const { model, button, orders } = show();
  button("Remove").fire("click");
  assert.deepEqual(model.sent, [{ order: "remove_host", host: "a", now: false }]);
  model.tell({ hosts: [host("a", { phase: "draining" })], events: [event(1, "host-removed", "a is to leave", { host: "a" })] });
  assert.deepEqual(orders(), ["remove a: done"]);
  assert.ok(button("Remove").hasAttribute("disabled"));
});

test("stopping the cluster is asked twice, and only for a moment", () => {
  const { model, button } = show();
  button("Stop cluster").fire("click");
  assert.deepEqual(model.sent, []);
  mock.timers.tick(4500);
  button("Stop cluster").fire("click");
  assert.deepEqual(model.sent, []);
  button("Really stop it?").fire("click");
  assert.deepEqual(model.sent, [{ order: "stop" }]);
  assert.ok(button("Stop cluster"));
});

test("a finished cluster takes no orders; a finished job cannot be stopped", () => {
  const { model, el, button } = show(state({ outcome: "succeeded" }));
  assert.ok(button("Stop job").hasAttribute("disabled"));
  model.tell({ phase: "finished", hosts: [], workers: [] });
  assert.ok(el.all((n) => n.tagName === "BUTTON").every((n) => n.hasAttribute("disabled")));
});

test("the last events come newest first, eight of them", () => {
  const events = Array.from({ length: 20 }, (_, i) => event(i + 1, "worker-ready", `number ${i + 1}`));
  const { el, model } = show(state({ events }));
  const texts = () => el.querySelector(".nbe-log").children.map((li) => li.children[1].textContent);
  assert.equal(texts().length, 8);
  assert.equal(texts()[0], "number 20");
  model.tell({ events: [...events, event(21, "world-formed", "number 21", { took: { form: 14.25, all: 30.4 } })] });
  assert.equal(texts()[0], "number 21 · 30 ms in all");
  assert.equal(el.querySelector(".nbe-log").children[0].getAttribute("title"), "world-formed · form 14.3 ms · all 30.4 ms");
});

test("a closed view leaves nothing behind", () => {
  const { el, model, close, add } = show();
  add("b:2");
  close();
  assert.equal(model.listeners.length, 0);
  assert.equal(el.children.length, 0);
  mock.timers.tick(60000);
});

test("before the first state there is an empty view, and no error", () => {
  const { el } = show({});
  assert.equal(el.children.length, 1);
});

test("numbers, sizes and colours", () => {
  assert.equal(size(state({ max: null })), "2 / 2+");
  assert.equal(size(state({ max: 2 })), "2 / 2");
  assert.equal(bytes(3.2e8), "320 MB");
  assert.equal(bytes(3.25e9), "3.3 GB");
  assert.equal(number(0.000123), "0.000123");
  assert.deepEqual(["worker-lost", "world-formed", "cooling", "stopped"].map(tone), ["bad", "good", "busy", "quiet"]);
  assert.equal(answer({ order: "add_host", host: "u@b:2" }, 0, state({ events: [event(1, "host-added", "", { host: "b" })] })).word, "done");
});
