// What rank 0 reported. Drawing is tested in a browser.
import assert from "node:assert/strict";
import { test } from "node:test";

import { asCsv, ratesOf, ReportTable, valuesOf, worldChanges } from "../src/report_table.js";

const row = (step, generation = 1, size = 4, ...values) => [step, 1000 + step / 4, generation, size, ...values];

test("an answer adds rows, or replaces all rows if its version is another one", () => {
  const table = new ReportTable();
  assert.equal(table.apply({ version: "a", start: 0, names: ["loss"], rows: [row(1, 1, 4, 2), row(2, 1, 4, 1)] }), true);
  assert.equal(table.apply({ version: "a", start: 2, names: ["loss"], rows: [] }), false);
  table.apply({ version: "a", start: 2, names: ["loss", "lr"], rows: [row(3, 1, 4, 0.5, 0.1)] });
  assert.deepEqual(valuesOf(table.rows, 1), [null, null, 0.1]);
  table.apply({ version: "b", start: 0, names: ["loss"], rows: [row(3, 1, 4, 1)] });
  assert.deepEqual(table.rows, [row(3, 1, 4, 1)]);
});

test("the newest report is shown before the kernel sends its row", () => {
  const table = new ReportTable();
  const state = { step: 9, time: 1009, generation: 2, world_size: 3, report: { loss: 0.5, phase: "text" } };
  assert.deepEqual(table.shownRows(state), []);
  table.apply({ version: "a", start: 0, names: ["loss", "phase"], rows: [row(8, 1, 4, 1)] });
  assert.deepEqual(table.shownRows(state)[1], [9, 1009, 2, 3, 0.5, null]);
  assert.equal(table.shownRows({ ...state, step: 8 }).length, 1);
  assert.equal(table.shownRows({ ...state, report: { loss: "nan" } }).length, 1);
});

test("the last report of a job that has ended is as old as its end", () => {
  const table = new ReportTable();
  table.apply({ version: "a", start: 0, names: ["loss"], rows: [row(8, 1, 4, 1)] });
  const events = [{ kind: "job-failed", time: 1003 }, { kind: "world-broken", time: 1004 }];
  const state = { step: 9, time: 2009, generation: 2, world_size: 0, report: { loss: 0.5 }, outcome: "failed", events };
  assert.deepEqual(table.shownRows(state)[1], [9, 1003, 2, 0, 0.5]);
  assert.equal(table.shownRows({ ...state, events: [] }).length, 1);
});

test("a new generation is a change of the world", () => {
  const rows = [row(1), row(2), row(3, 2, 3), row(4, 3, 4), row(5, 3, 4)];
  const found = worldChanges(rows).map(({ step, before, size }) => [step, before, size]);
  assert.deepEqual(found, [
    [3, 4, 3],
    [4, 3, 4],
  ]);
});

test("the rate is a mean over five seconds, and drops when nothing happens for a while", () => {
  const rows = Array.from({ length: 40 }, (_, i) => row(i)); // four steps per second
  assert.equal(ratesOf(rows)[0], null);
  assert.equal(ratesOf(rows)[39], 4);
  const late = [40, 1019.75, 2, 3];
  assert.equal(ratesOf([...rows, late])[40], 0.1);
});

test("a program may report a step of its own beside the commits", () => {
  assert.equal(asCsv(["step"], [row(8, 1, 4, 7)]), "commit,time,generation,size,step\n8,1002,1,4,7\n");
});

test("a spreadsheet gets all columns, with quotes where they are needed", () => {
  const csv = asCsv(["loss", 'a "b", c'], [row(1, 1, 4, 0.5), row(2, 1, 4, null, 2)]);
  assert.equal(csv, 'step,time,generation,size,loss,"a ""b"", c"\n1,1000.25,1,4,0.5,\n2,1000.5,1,4,,2\n');
});
