/** The colour and the sign of a phase, a state, or a kind of event. */

/** Kinds of events that are a loss or an error. A worker that is behind and a refused request are not failures. */
export const FAILURE = /lost|failed|broken|killed|error|unreachable|host-refused|not-finite|differ/;

/** good, bad, busy or quiet: the four colours. A sign and a word always accompany the colour. */
export function tone(/** @type {string} */ word) {
  if (FAILURE.test(word) || word === "refused") return "bad";
  if (/running|formed|training|up$|succeeded|ready|recovered/.test(word)) return "good";
  if (/start|form|drain|plan|stopping|waiting|remove|added|changed|scaled|backoff|behind|refused/.test(word)) return "busy";
  return "quiet";
}

/** @type {Record<string, string>} in the order in which the legend lists the states */
export const SIGNS = {
  starting: "◔",
  ready: "○",
  running: "●",
  succeeded: "✓",
  failed: "!",
  lost: "✕",
  stopped: "■",
  backoff: "◷",
  empty: "–",
  up: "●",
  draining: "↓",
};
/** @type {Record<string, string>} */
const STATE_TONES = { backoff: "busy", ready: "ready", empty: "quiet" };

export const stateTone = (/** @type {string} */ state) => STATE_TONES[state] ?? tone(state);
