// Texts, charts and phases derived from events. Drawing is tested in a browser.
import assert from "node:assert/strict";
import { test } from "node:test";

import {
  announcement,
  categories,
  firstAfterGap,
  hostLanes,
  reasonsFor,
  sizeChart,
  waterfall,
  withoutRepeats,
} from "../src/events.js";
import { tone } from "../src/tones.js";

function event(n, kind, text, more = {}) {
  return { n, time: n, kind, text, host: "", worker: "", generation: 1, size: 2, took: {}, ...more };
}

test("screen readers get phases, sizes and losses, not each number", () => {
  const before = { phase: "running", reason: "", world_size: 3, step: 1, events: [event(1, "worker-lost", "old")] };
  assert.equal(announcement(before, { ...before, step: 2 }), "");
  const events = [...before.events, event(2, "worker-lost", "gpu2/0#1 died"), event(3, "worker-ready", "ready")];
  assert.equal(announcement(before, { ...before, world_size: 2, events }), "2 workers in the world. gpu2/0#1 died");
  assert.equal(announcement(before, { ...before, phase: "waiting", reason: "1 of min 2" }), "waiting: 1 of min 2");
});

test("screen readers get the losses of a cluster that is started again: its events are numbered anew", () => {
  const before = { phase: "running", reason: "", world_size: 3, events: [event(90, "worker-lost", "old")] };
  const after = { ...before, events: [event(1, "host-up", "gpu2 is up"), event(2, "worker-lost", "gpu2/0#1 died")] };
  assert.equal(announcement(before, after), "gpu2/0#1 died");
});

test("the size of the world is a step line up to now, with each event on it", () => {
  const shape = sizeChart(
    [
      event(0, "world-formed", "", { size: 2 }),
      event(50, "worker-lost", "", { size: 1 }),
      event(60, "x", "", { size: 1 }),
    ],
    100,
  );
  assert.equal(shape.path, "M0 0H50V50H100");
  assert.deepEqual(
    shape.marks.map(({ x }) => x),
    [0, 50, 60],
  );
  assert.deepEqual([shape.size, shape.largest], [1, 2]);
  assert.equal(sizeChart([], 100), null);
});

test("events are changes, failures, both or neither; a gap between them is found", () => {
  const found = ["world-broken", "training", "worker-lost", "host-up"].map((kind) => categories(event(1, kind, "")));
  assert.deepEqual(found, ["change failure", "change", "failure", ""]);
  assert.equal(categories(event(1, "host-up", "", { took: { all: 3 } })), "change");
  assert.equal(firstAfterGap([event(1), event(2), event(7), event(8)]), 7);
  assert.equal(firstAfterGap([event(5), event(6)]), 0);
  assert.deepEqual(["worker-lost", "world-formed", "host-added", "job-stopped"].map(tone), [
    "bad",
    "good",
    "busy",
    "quiet",
  ]);
});

test("the phases of a change follow one another as they are sent; the preparation is not a part of the whole", () => {
  const bars = waterfall({ prepare: 900, abort: 50, warm: 10, "first step": 40, all: 100 });
  assert.deepEqual(
    bars.map(({ name, ms, from, share }) => [name, ms, from, share]),
    [
      ["prepare", 900, 0, 0],
      ["abort", 50, 0, 50],
      ["warm", 10, 50, 10],
      ["first step", 40, 60, 40],
    ],
  );
  assert.equal(waterfall({ form: 150, all: 100 })[0].share, 100);
});

test("a worker that is behind and a refused request are not failures; a loss is one, and is listed once", () => {
  const kind = (word) => categories(event(1, word, ""));
  assert.deepEqual(["worker-behind", "order-refused", "worker-ready"].map(kind), ["", "", ""]);
  assert.deepEqual(["worker-lost", "not-finite", "replica-differs"].map(kind), ["failure", "failure", "failure"]);
  const text = "b/0#1 died (SIGKILL)";
  const events = [event(1, "worker-lost", text), event(2, "world-broken", text), event(3, "worker-lost", "c/0#1 died")];
  assert.deepEqual(
    withoutRepeats(events).map(({ n }) => n),
    [1, 3],
  );
  const again = [event(1, "worker-ready", "it is ready"), event(2, "worker-ready", "it is ready")];
  assert.equal(withoutRepeats(again).length, 2);
  const before = { phase: "running", reason: "", world_size: 3, events: [] };
  assert.equal(announcement(before, { ...before, events }), `${text}. c/0#1 died`);
});

test("the reasons for a change are the events since the change before it", () => {
  const done = { took: { all: 10 } };
  const events = [
    event(1, "worker-lost", "long ago"),
    event(2, "training", "", done),
    event(3, "worker-ready", "no reason"),
    event(4, "worker-lost", "b/0#1 died"),
    event(5, "world-broken", "connection reset"),
    event(6, "training", "", done),
  ];
  assert.deepEqual(reasonsFor(events[5], events), ["b/0#1 died", "connection reset"]);
});

test("each host has a lane: when it was up, and the losses on it", () => {
  const events = [
    event(0, "host-added", "", { host: "a" }),
    event(10, "host-up", "", { host: "a" }),
    event(20, "worker-ready", "", { host: "b" }),
    event(30, "worker-lost", "", { host: "a" }),
    event(40, "host-lost", "", { host: "b" }),
    event(50, "host-up", "", { host: "b" }),
    event(60, "host-up", "", { host: "b" }),
  ];
  assert.deepEqual(
    hostLanes(events, 100).map(({ host, spans, losses }) => [host, spans, losses.map(({ time }) => time)]),
    [
      ["a", [[10, 100]], [30]],
      ["b", [[0, 40], [50, 100]], [40]],
    ],
  );
});

test("a host is not up before it has come up, nor after the others could not reach it", () => {
  const events = [
    event(1, "host-lost", "ssh: connection refused", { host: "a" }),
    event(2, "host-up", "", { host: "b" }),
    event(3, "host-unreachable", "b and c do not reach one another", { host: "b" }),
  ];
  assert.deepEqual(hostLanes(events, 100).map(({ spans }) => spans), [[], [[2, 3]]]);
});

test("of many hosts those with losses come first", () => {
  const events = Array.from({ length: 20 }, (_, n) => event(n, "host-up", "", { host: `h${n}` }));
  const lanes = hostLanes([...events, event(30, "worker-lost", "", { host: "h17" })], 100);
  assert.deepEqual([lanes.length, lanes[0].host], [20, "h17"]);
});

test("the chart may show only the last time", () => {
  const events = [
    event(0, "host-up", "", { size: 0, host: "a" }),
    event(10, "world-formed", "", { size: 4 }),
    event(95, "worker-lost", "", { size: 3, host: "a" }),
  ];
  const chart = sizeChart(events, 100, 10);
  assert.deepEqual([chart.from, chart.to, chart.path], [90, 100, "M0 0H50V25H100"]);
  assert.deepEqual(chart.marks.map(({ x }) => x), [50]);
  assert.deepEqual(chart.lanes, [{ host: "a", isUp: true, spans: [[0, 100]], losses: [50] }]);
});
