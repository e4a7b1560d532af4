import assert from "node:assert/strict";
import { test } from "node:test";
import { mediansOf } from "../src/step_times.js";

test("the median of a column leaves out what is missing", () => {
  const rows = [
    ["a", [1, null, 4]],
    ["b", [9, null, 2]],
    ["c", [2, null, null]],
  ];
  assert.deepEqual(mediansOf(rows), [2, null, 3]);
  assert.deepEqual(mediansOf([]), []);
});
