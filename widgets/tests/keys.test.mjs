// Where keys move a cursor.
import assert from "node:assert/strict";
import { test } from "node:test";

import { ACROSS, movedBy, PAGES } from "../src/keys.js";

test("a key moves by one step, by a tenth, or to an end, and never beyond it", () => {
  const moved = (key, at) => movedBy({ ...ACROSS, ...PAGES }, key, at, 10, 110);
  assert.deepEqual(["ArrowLeft", "ArrowRight", "PageUp", "PageDown", "Home", "End"].map((key) => moved(key, 50)), [49, 51, 40, 60, 10, 110]);
  assert.deepEqual([moved("ArrowLeft", 10), moved("PageDown", 105), moved("x", 50)], [10, 110, null]);
  assert.equal(movedBy(PAGES, "PageDown", 0, 0, 3), 1);
});
