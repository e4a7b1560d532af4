import assert from "node:assert/strict";
import { test } from "node:test";
import { medianOfOthers, slowness, sortedColumns } from "../src/step_times.js";

test("columns leave out what is missing", () => {
  const rows = [
    ["a", [1, null, 4]],
    ["b", [9, null, 2]],
    ["c", [2, null, null]],
  ];
  assert.deepEqual(sortedColumns(rows), [[1, 2, 9], [], [2, 4]]);
  assert.deepEqual(sortedColumns([]), []);
});

test("a rank is compared with the others", () => {
  const median = (values) => {
    const sorted = [...values].sort((a, b) => a - b);
    return (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2;
  };
  for (const column of [[1, 2], [1, 2, 9], [3, 3, 3, 8], [1, 2, 2, 4, 70]])
    for (const [i, time] of column.entries())
      assert.equal(medianOfOthers(column, time), median(column.toSpliced(i, 1)));
  assert.equal(medianOfOthers([4], 4), null);
});

test("only what is much longer is slow", () => {
  assert.equal(slowness(11, 10), 0);
  assert.equal(slowness(3, 1), 0); // some samples more
  assert.equal(slowness(20, 10), 0.5);
  assert.equal(slowness(90, 10), 1);
  assert.equal(slowness(500, 0), 1);
  assert.equal(slowness(500, null), 0);
});
