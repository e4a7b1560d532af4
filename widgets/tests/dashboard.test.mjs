// The pure half of the dashboard: what is shown, and in which words. Drawing is tested in a real browser.
import assert from "node:assert/strict";
import { test } from "node:test";

import {
  Fold,
  announcement,
  chart,
  clean,
  duration,
  eta,
  gap,
  kinds,
  megabytes,
  merge,
  milliseconds,
  number,
  once,
  ranges,
  shown,
  sinceFailure,
  size,
  slotsOf,
  sparkline,
  stateOf,
  tone,
  waterfall,
  who,
  why,
} from "../dashboard.js";

const NB = "\u00a0"; // a number does not leave its unit

function event(n, kind, text, more = {}) {
  return { n, time: n, kind, text, host: "", worker: "", generation: 1, size: 2, took: {}, ...more };
}

function host(workers, more = {}) {
  return { slots: 2, phase: "up", until: 0, gpus: [], workers, slots_until: {}, ...more };
}

test("a merge patch adds, replaces and deletes, and leaves the rest as the same objects", () => {
  const before = { a: { x: 1, y: [1, 2] }, b: { z: 3 }, c: 4 };
  const after = merge(before, { a: { y: [3], w: { deep: null, kept: 1 } }, c: null });
  assert.deepEqual(after, { a: { x: 1, y: [3], w: { kept: 1 } }, b: { z: 3 } });
  assert.equal(after.b, before.b);
  assert.deepEqual(before, { a: { x: 1, y: [1, 2] }, b: { z: 3 }, c: 4 });
});

test("a change counts only with the key frame it was made for; what is missing is null", () => {
  const frame = { n: 3, phase: "running", step: 1, max: 4 };
  assert.equal(shown(frame, { base: 3, patch: { step: 9 } }).step, 9);
  assert.equal(shown(frame, { base: 2, patch: { step: 9 } }).step, 1);
  assert.equal(shown(frame, { base: 3, patch: { max: null } }).max, null);
  assert.equal(shown(frame, {}).failed_at, null);
  assert.deepEqual(shown(undefined, undefined).hosts, {});
});

test("sizes, times and numbers are short and exact enough", () => {
  assert.deepEqual([size(4, 2, 8), size(4, 4, 4), size(3, 2, null)], ["4 / 2–8", "4 / 4", "3 / 2+"]);
  assert.deepEqual([8, 119, 180, 7200, 7500, 100_000].map(duration), [
    "8 s",
    "119 s",
    "3 min",
    "2 h",
    "2 h 5 min",
    "1 d 3 h",
  ]);
  assert.deepEqual([megabytes(320), megabytes(3250), megabytes(null)], [`320${NB}MB`, `3.3${NB}GB`, ""]);
  assert.equal(megabytes(512, 128_000), `0.5 / 128${NB}GB`);
  assert.deepEqual([4.54, 85.4, 1234, 12_340].map(milliseconds), ["4.5 ms", "85 ms", "1,234 ms", "12.3 s"]);
  assert.deepEqual([1234567, 0.23171, 0.000123, "nan"].map(number), ["1,234,567", "0.232", "0.000123", "nan"]);
});

test("what is left is told only while it is known", () => {
  const job = { job: "j", outcome: "", step: 400, total: 1000, steps_per_second: 10 };
  assert.equal(eta(job), "about 60 s");
  for (const unknown of [
    { total: null },
    { steps_per_second: null },
    { steps_per_second: 0 },
    { outcome: "failed" },
    { step: 1000 },
  ]) {
    assert.equal(eta({ ...job, ...unknown }), "");
  }
  assert.deepEqual([sinceFailure(null, 9), sinceFailure(100, 300)], ["no failure yet", "3 min since the last failure"]);
});

test("ranks that follow one another are joined; who has none goes by name", () => {
  assert.equal(ranges([3, 0, 1, 2, 6, 8, 9]), "0–3, 6, 8, 9");
  assert.equal(who([["a/0#1", 0]]), "rank 0");
  assert.equal(
    who([
      ["a/0#1", 0],
      ["a/1#1", 1],
      ["a/2#1", 2],
      ["b/0#2", null],
    ]),
    "ranks 0–2, b/0#2",
  );
});

test("each slot has its newest worker; an older one that lives stands beside it; an empty one may be in back-off", () => {
  const row = (state) => [null, state, 0, 0, 1, null, null, ""];
  const slots = slotsOf(
    "a",
    host({ "0#1": row("running"), "0#3": row("starting"), "0#2": row("lost") }, { slots_until: { 1: 50 } }),
  );
  assert.deepEqual(
    slots.map((slot) => slot.id),
    ["a/0#3", "a/0#1", ""],
  );
  assert.deepEqual(
    slots.map((slot) => stateOf(slot, 10)),
    ["starting", "running", "backoff"],
  );
  assert.equal(stateOf(slots[2], 60), "empty");
  assert.deepEqual(
    slotsOf("a", host({ "5#1": row("running") })).map((slot) => slot.slot),
    [0, 1, 5],
  );
});

test("a screen reader hears of phases, sizes and losses, not of every number", () => {
  const before = { phase: "running", reason: "", world_size: 3, step: 1, events: [event(1, "worker-lost", "old")] };
  assert.equal(announcement(before, { ...before, step: 2 }), "");
  const events = [...before.events, event(2, "worker-lost", "gpu2/0#1 died"), event(3, "worker-ready", "ready")];
  assert.equal(announcement(before, { ...before, world_size: 2, events }), "2 workers in the world. gpu2/0#1 died");
  assert.equal(announcement(before, { ...before, phase: "waiting", reason: "1 of min 2" }), "waiting: 1 of min 2");
});

test("a curve is drawn from low to high, with gaps where a value is no number", () => {
  assert.equal(sparkline([1, 3, 2], 100, 20), "M0 20L50 0L100 10");
  assert.equal(sparkline([1, NaN, 2, 3], 99, 20), "M0 20M66 10L99 0");
  assert.equal(sparkline([5, 5], 10, 20), "M0 10L10 10");
  assert.equal(sparkline([5]), "");
});

test("the size of the world is a step line up to now, with every event on it", () => {
  const shape = chart(
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
  assert.deepEqual([shape.size, shape.most], [1, 2]);
  assert.equal(chart([], 100), null);
});

test("events are changes, failures, both or neither; a hole between them is found", () => {
  const told = ["world-broken", "training", "worker-lost", "host-up"].map((kind) => kinds(event(1, kind, "")));
  assert.deepEqual(told, ["change failure", "change", "failure", ""]);
  assert.equal(kinds(event(1, "host-up", "", { took: { all: 3 } })), "change");
  assert.equal(gap([event(1), event(2), event(7), event(8)]), 7);
  assert.equal(gap([event(5), event(6)]), 0);
  assert.deepEqual(["worker-lost", "world-formed", "host-added", "job-stopped"].map(tone), [
    "bad",
    "good",
    "busy",
    "quiet",
  ]);
});

test("the phases of a change follow one another as they are sent; what was done beside is no part of the whole", () => {
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

test("a worker that is behind and a refused order are no failures; a death is one, and is told once", () => {
  const kind = (word) => kinds(event(1, word, ""));
  assert.deepEqual(["worker-behind", "order-refused", "worker-ready"].map(kind), ["", "", ""]);
  assert.deepEqual(["worker-lost", "host-unreachable", "not-finite"].map(kind), ["failure", "failure", "failure"]);
  const died = "b/0#1 died (SIGKILL)";
  const events = [event(1, "worker-lost", died), event(2, "world-broken", died), event(3, "worker-lost", "c/0#1 died")];
  assert.deepEqual(
    once(events).map(({ n }) => n),
    [1, 3],
  );
  const again = [event(1, "worker-ready", "it is ready"), event(2, "worker-ready", "it is ready")];
  assert.equal(once(again).length, 2);
  const before = { phase: "running", reason: "", world_size: 3, events: [] };
  assert.equal(announcement(before, { ...before, events }), `${died}. c/0#1 died`);
});

test("a change was made because of what happened since the one before it", () => {
  const done = { took: { all: 10 } };
  const entries = [
    event(1, "worker-lost", "long ago"),
    event(2, "training", "", done),
    event(3, "worker-ready", "no reason"),
    event(4, "worker-lost", "b/0#1 died"),
    event(5, "world-broken", "connection reset"),
    event(6, "training", "", done),
  ];
  assert.deepEqual(why(entries, entries[5]), ["b/0#1 died", "connection reset"]);
});

test("a line is shown as a terminal would leave it", () => {
  assert.equal(clean("\u001b[31mred\u001b[0m and plain"), "red and plain");
  assert.equal(clean("10 %\r50 %\r100 %\r"), "100 %");
});

test("equal lines of different ranks close together are one; each rank's order is kept", () => {
  const fold = new Fold();
  for (const text of ["x", "y", "x"]) fold.add("a", "out", text);
  for (const text of ["x", "y", "x", "z"]) fold.add("b", "out", text);
  fold.add("b", "err", "z");
  assert.deepEqual(
    fold.lines.map(({ text, writers }) => `${text}:${[...writers.keys()].join("")}`),
    ["x:ab", "y:ab", "x:ab", "z:b", "z:b"],
  );
  fold.add("a", "out", "y"); // a's own y came long before: this is another
  assert.equal([...fold.lines.at(-1).writers.keys()].join(""), "a");
});

test("a line keeps the ranks of those who printed it; the same worker with another rank prints another line", () => {
  const fold = new Fold();
  fold.add("a", "out", "begin", 2);
  fold.add("a", "out", "begin", 1);
  fold.add("b", "out", "begin", 0);
  assert.deepEqual(
    fold.lines.map(({ writers }) => who([...writers])),
    ["ranks 0, 2", "rank 1"],
  );
});

test("equal lines far apart stay apart, and only the last lines are kept", () => {
  const fold = new Fold(500);
  fold.add("a", "out", "far");
  for (let i = 0; i < 600; i += 1) fold.add("a", "out", `line ${i}`);
  assert.equal(fold.add("b", "out", "far").writers.size, 1);
  assert.equal(fold.trim().length, 102);
  assert.deepEqual([fold.lines.length, fold.lines[0].text], [500, "line 101"]);
  assert.equal([...fold.add("c", "out", "line 599").writers.keys()].join(""), "ac");
});
