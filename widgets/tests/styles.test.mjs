// The style sheets: what is written in them has an effect.
import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { test } from "node:test";

const SOURCES = new URL("../src/", import.meta.url);
const sheets = readdirSync(SOURCES).filter((name) => name.endsWith(".css"));
const read = (name) => readFileSync(new URL(name, SOURCES), "utf8").replaceAll(/\/\*.*?\*\//gs, "");

test("each variable is used", () => {
  const all = sheets.map(read).join("\n");
  const defined = new Set([...all.matchAll(/^\s*(--nbe-[a-z-]+):/gm)].map(([, name]) => name));
  assert.ok(defined.size > 10);
  assert.deepEqual([...defined].filter((name) => !new RegExp(`var\\(${name}[,)]`).test(all)), []);
});

test("no style sheet has the same selector twice", () => {
  for (const name of sheets) {
    const selectors = [...read(name).matchAll(/(?<=^|\})\n*([^\s@}][^{}]*?) \{/g)].map(([, selector]) => selector);
    assert.deepEqual(selectors.filter((selector, i) => selectors.indexOf(selector) !== i), [], name);
  }
});
