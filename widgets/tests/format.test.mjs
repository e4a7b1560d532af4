// Numbers, times and names. Drawing is tested in a browser.
import assert from "node:assert/strict";
import { test } from "node:test";

import {
  duration,
  losses,
  megabytes,
  milliseconds,
  momentOf,
  newestCheckpoint,
  nextCheckpoint,
  number,
  ranges,
  rankNames,
  reported,
  sinceFailure,
  sizeWithBounds,
  timeLeft,
  unit,
} from "../src/format.js";

// A non-breaking space: a number does not leave its unit.
const NB = "\u00a0";

test("sizes, times and numbers are short and exact enough", () => {
  assert.deepEqual([sizeWithBounds(4, 2, 8), sizeWithBounds(4, 4, 4), sizeWithBounds(3, 2, null)], ["4 (2–8)", "4 (always 4)", "3 (at least 2)"]);
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

test("reported values keep the five digits that the kernel sends", () => {
  assert.deepEqual([2.3456, 1234.5, 0.000012346, 12, 1e21, "nan"].map(reported), [
    "2.3456",
    "1,234.5",
    "0.000012346",
    "12",
    number(1e21),
    "nan",
  ]);
});

test("a number with many digits has an exponent, as of a loss that diverges", () => {
  assert.deepEqual([3.4028e38, -1e17, 12_345e20].map(reported), ["3.4028e+38", "-1e+17", "1.2345e+24"]);
  assert.deepEqual([3.4028e38, 999_999_999_999_999].map(number), ["3.4e+38", "999,999,999,999,999"]);
});

test("a moment of another day has its day", () => {
  const noon = new Date(2026, 10, 26, 12).getTime() / 1000;
  assert.deepEqual(
    [noon - 3600, noon - 86_400].map((time) => momentOf(time, noon)),
    ["11:00:00", "Nov 25, 12:00:00"],
  );
});

test("what failures have cost is said as far as it is known", () => {
  const trained = `trained 98.7${NB}% of the time`;
  assert.equal(losses(null), "");
  assert.equal(losses({ failures: 0, lost: 0, trained: 98.7 }), trained);
  assert.equal(losses({ failures: 1, lost: 1, trained: 98.7 }), `1 step lost in 1 failure · ${trained}`);
  assert.equal(losses({ failures: 3, lost: null, trained: null }), "");
});

test("a checkpoint has its step, age and size, and the next one a time", () => {
  const newest = { commit: 1200, made_at: 88, size: 35.2, every: 100 };
  assert.equal(newestCheckpoint(newest, 100), `1,200 · 12 s old · 35${NB}MB`);
  assert.equal(newestCheckpoint({ ...newest, size: 0.0123 }, 100), `1,200 · 12 s old · 12${NB}kB`);
  assert.equal(newestCheckpoint({ ...newest, commit: null }, 100), "none yet");
  assert.deepEqual(nextCheckpoint(newest, { step: 1234, steps_per_second: 2 }), { at: 1300, text: "in 33 s" });
  assert.deepEqual(nextCheckpoint(newest, { step: 1300, steps_per_second: null }), { at: 1400, text: "at 1,400" });
});

test("a program that reports a step of its own has commits", () => {
  assert.equal(unit({ report: { loss: 1 } }), "step");
  assert.equal(unit({ report: { loss: 1, step: 35 } }), "commit");
  assert.equal(losses({ failures: 1, lost: 2, trained: null }, "commit"), "2 commits lost in 1 failure");
});

test("the time left and the time since a failure are shown only if they are known", () => {
  const job = { job: "j", outcome: "", step: 400, total: 1000, steps_per_second: 10 };
  assert.equal(timeLeft(job), "about 60 s");
  for (const change of [
    { total: null },
    { steps_per_second: null },
    { steps_per_second: 0 },
    { outcome: "failed" },
    { step: 1000 },
  ]) {
    assert.equal(timeLeft({ ...job, ...change }), "");
  }
  assert.deepEqual([sinceFailure(null, 9), sinceFailure(100, 300)], ["no failure yet", "3 min since the last failure"]);
});

test("consecutive ranks are joined; a worker without a rank is named by its id", () => {
  assert.equal(ranges([3, 0, 1, 2, 6, 8, 9]), "0–3, 6, 8, 9");
  assert.equal(rankNames([["a/0#1", 0]]), "rank 0");
  assert.equal(
    rankNames([
      ["a/0#1", 0],
      ["a/1#1", 1],
      ["a/2#1", 2],
      ["b/0#2", null],
    ]),
    "ranks 0–2, b/0#2",
  );
});
