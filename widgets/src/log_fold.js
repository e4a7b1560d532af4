/** Folds equal lines of several workers into one. nbelastic/notebook/log_folding.py has the same rule. */

const MAX_LINES = 10_000;
const LONG = 1000; // characters of a line that counts as one of them, as in nbelastic/protocol/output_buffer.py
const CLOSE = 200; // equal lines of different workers are folded within so many lines
const ESCAPE = "\u001b";
const CONTROL_SEQUENCE = new RegExp(`${ESCAPE}\\[[0-9;?]*[ -/]*[@-~]`, "g");

/** A line as a terminal shows it: without colours, and only the last state of a progress bar. */
export function terminalText(/** @type {string} */ text) {
  if (!text.includes(ESCAPE) && !text.includes("\r")) return text;
  const plain = text.replace(CONTROL_SEQUENCE, "").replace(/\r+$/, "");
  return plain.slice(plain.lastIndexOf("\r") + 1);
}

/**
 * `writers`: the rank that each worker had when it printed the line. `time`: of the first of them, in seconds since 1970.
 * @typedef {{seq: number, stream: string, text: string, writers: Map<string, ?number>, time: number}} Line
 */

/** The newest lines of several workers. Equal lines that are close together are one; each worker's order is kept. */
export class LogFold {
  constructor(maxLines = MAX_LINES) {
    this.maxLines = maxLines;
    /** @type {Line[]} */
    this.lines = [];
    this.seq = 0;
    /** @type {Map<string, number>} for each worker its last line */
    this.last = new Map();
  }

  /**
   * Return the new line, or the line to which this one was added.
   * @param {string} writer @param {string} stream @param {string} text @param {?number} rank @param {number} time
   */
  add(writer, stream, text, rank = null, time = 0) {
    const first = Math.max((this.last.get(writer) ?? -1) + 1, this.seq - CLOSE);
    for (let i = Math.max(0, first - (this.seq - this.lines.length)); i < this.lines.length; i += 1) {
      const line = this.lines[i];
      if (line.text === text && line.stream === stream && !line.writers.has(writer)) {
        line.writers.set(writer, rank);
        this.last.set(writer, line.seq);
        return line;
      }
    }
    const line = { seq: this.seq++, stream, text, writers: new Map([[writer, rank]]), time };
    this.lines.push(line);
    this.last.set(writer, line.seq);
    return line;
  }

  /** Remove the oldest lines beyond `maxLines`, but not the newest one, and return them. A long line counts as several. */
  trim() {
    let first = this.lines.length;
    for (let room = this.maxLines; first > 0; first -= 1) {
      room -= 1 + Math.floor(this.lines[first - 1].text.length / LONG);
      if (room < 0) break;
    }
    return this.lines.splice(0, Math.min(first, this.lines.length - 1));
  }
}
