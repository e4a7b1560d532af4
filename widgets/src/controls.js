/** The controls of the cluster: add a host, scale, pause, stop. */
/** @import { KeyFrame } from "./contract.js" */
/** @import { RequestList } from "./request_list.js" */
/** @import { Timers } from "./timers.js" */
import { confirmedButton, element, setDisabled, setText } from "./dom.js";

export class Controls {
  constructor(/** @type {RequestList} */ requests, /** @type {Timers} */ timers) {
    this.requests = requests;
    const plain = { type: "text", placeholder: "name:slots", spellcheck: "false", autocomplete: "off", required: "" };
    this.host = element("input", plain);
    this.addHost = this.makeSubmit("Add host");
    this.min = element("input", { type: "number", min: "1", required: "", size: "4" });
    this.max = element("input", { type: "number", min: "1", placeholder: "no limit", size: "4" });
    this.apply = this.makeSubmit("Apply");
    this.pause = element("button", { type: "button", class: "nbe-button" }, "Pause");
    this.pause.addEventListener("click", () => {
      if (!this.pause.hasAttribute("aria-disabled")) this.sendPause();
    });
    const stopJob = () => requests.send({ order: "stop_job" }, "stop the job");
    this.stopJob = confirmedButton(timers, "Stop job", "Really stop it?", stopJob);
    const stop = () => requests.send({ order: "stop" }, "stop the cluster");
    this.stop = confirmedButton(timers, "Stop cluster", "Really stop it?", stop, "nbe-danger");
    this.node = element(
      "div",
      { class: "nbe-controls", role: "group", "aria-label": "Controls" },
      this.makeHostForm(),
      this.makeScaleForm(),
      element("div", { class: "nbe-bar" }, this.pause, this.stopJob, this.stop),
    );
    this.edited = this.paused = false;
    /** @type {?string} */
    this.job = null;
  }

  sendPause() {
    if (this.paused) this.requests.send({ order: "resume" }, "resume");
    else this.requests.send({ order: "pause" }, "pause");
  }

  makeHostForm() {
    const label = element("label", {}, element("span", { class: "nbe-hidden" }, "Host to add"), this.host);
    return this.makeForm([label, this.addHost], () => {
      const host = this.host.value.trim();
      if (host) this.requests.send({ order: "add_host", host }, `add ${host}`);
      this.host.value = "";
    });
  }

  makeScaleForm() {
    const fields = [element("label", {}, "min ", this.min), element("label", {}, "max ", this.max)];
    const form = this.makeForm([...fields, this.apply], () => {
      const [min, max] = [Number(this.min.value), this.max.value === "" ? null : Number(this.max.value)];
      const text = `scale to ${max === null ? `${min} or more` : `${min}–${max}`}`;
      this.requests.send({ order: "scale", min, max }, text, () => this.setEdited(false));
    });
    form.addEventListener("input", () => this.setEdited(true));
    form.addEventListener("keydown", (event) => event.key === "Escape" && this.setEdited(false));
    return form;
  }

  makeSubmit(/** @type {string} */ text) {
    return element("button", { type: "submit", class: "nbe-button" }, text);
  }

  makeForm(/** @type {HTMLElement[]} */ parts, /** @type {() => void} */ act) {
    const form = element("form", { class: "nbe-bar" }, ...parts);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!parts[parts.length - 1].hasAttribute("aria-disabled")) act();
    });
    return form;
  }

  /** Edited bounds stay until the request is done; Escape restores the cluster's bounds. */
  setEdited(/** @type {boolean} */ edited) {
    this.edited = edited;
    setDisabled(this.apply, !edited);
  }

  draw(/** @type {KeyFrame} */ state, /** @type {boolean} */ closed) {
    const locked = closed || state.phase === "finished" || state.phase === "stopping";
    if (!this.edited) {
      const [min, max] = [String(state.min), state.max === null ? "" : String(state.max)];
      if (this.min.value !== min) this.min.value = min;
      if (this.max.value !== max) this.max.value = max;
    }
    if (state.job !== this.job) this.stopJob.disarm();
    this.job = state.job;
    for (const field of [this.host, this.min, this.max]) field.disabled = locked;
    for (const node of [this.addHost, this.stop]) setDisabled(node, locked);
    setDisabled(this.apply, locked || !this.edited);
    this.paused = state.phase === "paused";
    setText(this.pause, this.paused ? "Resume" : "Pause");
    setDisabled(this.pause, locked || state.generation === 0 || !state.job || state.outcome !== "");
    setDisabled(this.stopJob, locked || !state.job || state.outcome !== "");
  }
}
