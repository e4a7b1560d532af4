/** The panels below the board, of which one is shown at a time. */
import { element, setAttribute } from "./dom.js";

/** @typedef {{node: HTMLElement, open(): void, close(): void}} Panel */

export class Tabs {
  /** @param {string} id @param {[string, Panel][]} panels */
  constructor(id, panels) {
    this.list = element("div", { class: "nbe-tabs", role: "tablist", "aria-label": "More" });
    this.node = element("div", {}, this.list);
    this.selected = -1;
    this.tabs = panels.map(([name, panel], i) => {
      const ids = { tab: `${id}tab${i}`, panel: `${id}panel${i}` };
      const tab = element("button", { type: "button", role: "tab", id: ids.tab, "aria-controls": ids.panel }, name);
      tab.addEventListener("click", () => this.select(i));
      const attributes = { role: "tabpanel", id: ids.panel, "aria-labelledby": ids.tab, hidden: "" };
      const box = element("div", { class: "nbe-panel", ...attributes }, panel.node);
      this.list.append(tab);
      this.node.append(box);
      return { tab, box, panel };
    });
    this.list.addEventListener("keydown", (event) => this.move(event));
  }

  move(/** @type {KeyboardEvent} */ event) {
    const last = this.tabs.length - 1;
    const targets = {
      ArrowLeft: this.selected ? this.selected - 1 : last,
      ArrowRight: this.selected < last ? this.selected + 1 : 0,
      Home: 0,
      End: last,
    };
    const target = targets[/** @type {keyof typeof targets} */ (event.key)];
    if (target === undefined) return;
    event.preventDefault();
    this.select(target);
    this.tabs[target].tab.focus();
  }

  select(/** @type {number} */ index) {
    if (index === this.selected) return;
    this.tabs[this.selected]?.panel.close();
    this.selected = index;
    this.tabs.forEach(({ tab, box }, i) => {
      setAttribute(tab, "aria-selected", String(i === index));
      setAttribute(tab, "tabindex", i === index ? "0" : "-1");
      box.hidden = i !== index;
    });
    this.tabs[index].panel.open();
  }
}
