/** All timers of a view, so that closing the view ends them. */
export class Timers {
  constructor() {
    /** @type {Set<number>} */
    this.running = new Set();
  }

  later(/** @type {() => void} */ act, /** @type {number} */ ms) {
    const timer = window.setTimeout(() => {
      this.running.delete(timer);
      act();
    }, ms);
    this.running.add(timer);
    return timer;
  }

  cancel(/** @type {number} */ timer) {
    clearTimeout(timer);
    this.running.delete(timer);
  }

  close() {
    for (const timer of this.running) clearTimeout(timer);
    this.running.clear();
  }
}
