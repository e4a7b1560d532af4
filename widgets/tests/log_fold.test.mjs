// Lines of several workers. Drawing is tested in a browser.
import assert from "node:assert/strict";
import { test } from "node:test";

import { rankNames } from "../src/format.js";
import { LogFold, terminalText } from "../src/log_fold.js";

test("a line is shown as a terminal would leave it", () => {
  assert.equal(terminalText("\u001b[31mred\u001b[0m and plain"), "red and plain");
  assert.equal(terminalText("10 %\r50 %\r100 %\r"), "100 %");
});

test("equal lines of different ranks close together are one; each rank's order is kept", () => {
  const fold = new LogFold();
  for (const text of ["x", "y", "x"]) fold.add("a", "out", text);
  for (const text of ["x", "y", "x", "z"]) fold.add("b", "out", text);
  fold.add("b", "err", "z");
  assert.deepEqual(
    fold.lines.map(({ text, writers }) => `${text}:${[...writers.keys()].join("")}`),
    ["x:ab", "y:ab", "x:ab", "z:b", "z:b"],
  );
  fold.add("a", "out", "y"); // the first y of a came long before: this is another line
  assert.equal([...fold.lines.at(-1).writers.keys()].join(""), "a");
});

test("a line keeps the ranks of its writers; the same worker with another rank prints another line", () => {
  const fold = new LogFold();
  fold.add("a", "out", "begin", 2);
  fold.add("a", "out", "begin", 1);
  fold.add("b", "out", "begin", 0);
  assert.deepEqual(
    fold.lines.map(({ writers }) => rankNames([...writers])),
    ["ranks 0, 2", "rank 1"],
  );
});

test("equal lines far apart stay apart, and only the newest lines are kept", () => {
  const fold = new LogFold(500);
  fold.add("a", "out", "far");
  for (let i = 0; i < 600; i += 1) fold.add("a", "out", `line ${i}`);
  assert.equal(fold.add("b", "out", "far").writers.size, 1);
  assert.equal(fold.trim().length, 102);
  assert.deepEqual([fold.lines.length, fold.lines[0].text], [500, "line 101"]);
  assert.equal([...fold.add("c", "out", "line 599").writers.keys()].join(""), "ac");
});

test("a long line counts as several, so that pictures as text do not fill the browser's memory", () => {
  const fold = new LogFold(10);
  for (let i = 0; i < 9; i += 1) fold.add("a", "out", `${i}`.padEnd(4000));
  fold.trim();
  assert.deepEqual(fold.lines.map(({ text }) => text.trim()), ["7", "8"]);
  fold.add("a", "out", "x".repeat(64_000));
  fold.trim();
  assert.equal(fold.lines.length, 1);
  assert.deepEqual(new LogFold().trim(), []);
});
