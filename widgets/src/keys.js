/** Keys that move a cursor. */

/** How far a key moves a cursor to the left and right: whole numbers are steps, fractions are parts of the range. @type {Record<string, number>} */
export const ACROSS = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
/** @type {Record<string, number>} */
export const PAGES = { PageUp: -0.1, PageDown: 0.1 };

/**
 * Where a key moves a cursor that is at `at`, between `first` and `last`; null if it does not move it.
 * @param {Record<string, number>} moves @param {string} key @param {number} at @param {number} first @param {number} last
 */
export function movedBy(moves, key, at, first, last) {
  const move = moves[key];
  if (move === undefined) return null;
  const steps = Math.abs(move) < 1 ? Math.sign(move) * Math.max(1, Math.round(Math.abs(move) * (last - first))) : move;
  return Math.max(first, Math.min(last, at + steps));
}

/** Whether this is a shortcut of the browser or the notebook. */
export const isShortcut = (/** @type {KeyboardEvent} */ event) => event.ctrlKey || event.metaKey || event.altKey;
