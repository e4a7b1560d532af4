/** The slots of a host and the workers in them. */
/** @import { Gpu, Host, WorkerCopies, WorkerRow } from "./contract.js" */

/**
 * `id` is empty if the slot has no worker; `backoffUntil` is in seconds since 1970, 0 if the slot is not in back-off.
 * @typedef {{key: string, id: string, slot: number, worker: ?Worker, backoffUntil: number}} Slot
 * @typedef {ReturnType<typeof workerOf>} Worker
 */

/** @type {WeakMap<Host, Slot[]>} an update that does not change a host leaves the same object, with the same slots */
const SLOTS = new WeakMap();

/** @param {WorkerRow} row @param {WorkerCopies | undefined} copies @param {Gpu[]} gpus of its host */
function workerOf([rank, state, behind, restarts, pid, cpu, memory, reason, gpu], copies, gpus) {
  const own = gpu === null || !gpus[gpu] ? null : { number: gpu, figures: gpus[gpu] };
  return { rank, state, behind, restarts, pid, cpu, memory, reason, gpu: own, copies: copies ?? null };
}

/**
 * The slots of a host in order, each with its newest worker. An older worker that is still alive is listed after it.
 * @param {string} name @param {Host} host @returns {Slot[]}
 */
export function slotsOf(name, host) {
  const known = SLOTS.get(host);
  if (known) return known;
  /** @type {Map<number, {incarnation: number, id: string, worker: Worker}[]>} */
  const bySlot = new Map();
  for (const [place, row] of Object.entries(host.workers)) {
    const [slot, incarnation] = place.split("#").map(Number);
    const entry = { incarnation, id: `${name}/${place}`, worker: workerOf(row, host.copies?.[place], host.gpus) };
    bySlot.get(slot)?.push(entry) ?? bySlot.set(slot, [entry]);
  }
  const numbers = new Set([...Array(host.slots).keys(), ...bySlot.keys()]);
  const slots = [...numbers]
    .sort((a, b) => a - b)
    .flatMap((slot) => {
      const [newest, ...older] = (bySlot.get(slot) ?? []).sort((a, b) => b.incarnation - a.incarnation);
      const backoffUntil = host.slots_backoff_until[slot] ?? 0;
      const first = { key: String(slot), id: newest?.id ?? "", slot, worker: newest?.worker ?? null, backoffUntil };
      const alive = older.filter(({ worker }) => /^(starting|ready|running)$/.test(worker.state));
      return [first, ...alive.map(({ id, worker }) => ({ key: id, id, slot, worker, backoffUntil: 0 }))];
    });
  SLOTS.set(host, slots);
  return slots;
}

/** The state of a slot: the state of its worker, or `backoff` or `empty`. */
export function stateOf(/** @type {Slot} */ slot, /** @type {number} */ now) {
  if (slot.worker) return slot.worker.state;
  return slot.backoffUntil > now ? "backoff" : "empty";
}
