// When an event in the list of the timeline shows its day. The rest is tested in a browser.
import assert from "node:assert/strict";
import { test } from "node:test";

import { EventItem } from "../src/event_item.js";

test("after midnight an event has its day, also where the time zone is not of whole hours", () => {
  process.env.TZ = "Asia/Kolkata";
  globalThis.document = { createElement: () => ({ textContent: "", setAttribute() {}, append() {} }) };
  const time = new Date(2026, 10, 26, 23, 50).getTime() / 1000;
  const item = new EventItem({ n: 1, time, kind: "host-up", text: "", took: {} }, () => []);
  const shown = [time + 60, time + 601].map((now) => {
    item.draw(item.event, now);
    return item.time.textContent;
  });
  assert.deepEqual(shown, ["23:50:00", "Nov 26, 23:50:00"]);
});
