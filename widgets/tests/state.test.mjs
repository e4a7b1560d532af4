// The state of the cluster and its slots. Drawing is tested in a browser.
import assert from "node:assert/strict";
import { test } from "node:test";

import { slotsOf, stateOf } from "../src/slots.js";
import { clockOffset, currentState, merge } from "../src/state.js";

function host(workers, more = {}) {
  return { slots: 2, phase: "up", backoff_until: 0, gpus: [], workers, slots_backoff_until: {}, ...more };
}

test("a merge patch adds, replaces and deletes, and leaves the rest as the same objects", () => {
  const before = { a: { x: 1, y: [1, 2] }, b: { z: 3 }, c: 4 };
  const after = merge(before, { a: { y: [3], w: { deep: null, kept: 1 } }, c: null });
  assert.deepEqual(after, { a: { x: 1, y: [3], w: { kept: 1 } }, b: { z: 3 } });
  assert.equal(after.b, before.b);
  assert.deepEqual(before, { a: { x: 1, y: [1, 2] }, b: { z: 3 }, c: 4 });
});

test("a host or a report may have a name that objects have", () => {
  const after = merge({ a: 1 }, JSON.parse('{"__proto__": {"phase": "up"}, "toString": {"cpu": 3}}'));
  assert.deepEqual(Object.entries(after), [["a", 1], ["__proto__", { phase: "up" }], ["toString", { cpu: 3 }]]);
});

test("a change applies only to the key frame with its number; a missing field is null", () => {
  const frame = { n: 3, phase: "running", step: 1, max: 4 };
  assert.equal(currentState(frame, { base: 3, patch: { step: 9 } }).step, 9);
  assert.equal(currentState(frame, { base: 2, patch: { step: 9 } }).step, 1);
  assert.equal(currentState(frame, { base: 3, patch: { max: null } }).max, null);
  assert.equal(currentState(frame, {}).failed_at, null);
  assert.deepEqual(currentState(undefined, undefined).hosts, {});
});

test("each slot has its newest worker; an older one that is alive follows it; an empty slot may be in back-off", () => {
  const row = (state) => [null, state, 0, 0, 1, null, null, ""];
  const slots = slotsOf(
    "a",
    host({ "0#1": row("running"), "0#3": row("starting"), "0#2": row("lost") }, { slots_backoff_until: { 1: 50 } }),
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

test("the kernel's clock is known despite delayed messages, and again after a clock was set", () => {
  assert.equal([5.3, 5.1, 12, 5.2].reduce(clockOffset, Infinity), 5.1);
  assert.equal(clockOffset(5.1, 3605), 3605);
  assert.equal(clockOffset(3605, -7), -7);
});
