// Written by widgets/write_contract.py from dashboard_frames.py and dashboard_contract.py. Edit those files.

/**
 * One worker. `behind`: commits that others have made and it has not. `cpu`: percent of one core. `memory`: MB.
 *
 * `gpu`: which of its host's `gpus` is its own, counted from 0.
 */
export type WorkerRow = [rank: number | null, state: string, behind: number, restarts: number, pid: number, cpu: number | null, memory: number | null, reason: string, gpu: number | null];

/** One GPU. `busy`: percent of the time. `memory`: GB in use, of `memory_total`. `temperature`: °C. None: not known. */
export type Gpu = [busy: number | null, memory: number | null, memory_total: number | null, temperature: number | null];

/**
 * Copies of a sharded model on a worker. `memory`: MB. `copied_to`: slots, as `gpu1/0`, whose workers have its copy.
 *
 * `keeps`: slots whose workers' copies it has. `shared`: the other workers of its host can read its copies.
 */
export type WorkerCopies = [memory: number, copied_to: string[], keeps: string[], shared: boolean];

/**
 * One host. `cpu`: percent of all cores. `memory`: MB in use of `memory_total`.
 *
 * `backoff_until`: seconds since 1970 at which its back-off ends, 0 if it is not in back-off. `slots_backoff_until`: the
 * same for each slot in back-off. `workers`: by `slot#incarnation`, and so are `copies`, which only hosts with a sharded
 * model have. `ends_at`: seconds since 1970 at which the host ends, if that was announced.
 */
export interface Host {
  address: string;
  slots: number;
  phase: string;
  reason: string;
  backoff_until: number;
  cpu: number | null;
  memory: number | null;
  memory_total: number | null;
  gpus: Gpu[];
  slots_backoff_until: Record<string, number>;
  workers: Record<string, WorkerRow>;
  copies: Record<string, WorkerCopies>;
  ends_at: number;
}

/**
 * An event. `n`: its number. `time`: seconds since 1970. `size`: members of the world after it.
 *
 * `took`: milliseconds of each phase of a change, in order; `all` is the whole change.
 */
export interface Event {
  n: number;
  time: number;
  kind: string;
  text: string;
  host: string;
  worker: string;
  generation: number;
  took: Record<string, number>;
  size: number;
}

/** A request of a user. `by`: the magic or view it came from. `word`: under way, done or refused. `why`: more about it. */
export interface RequestStatus {
  id: string;
  by: string;
  text: string;
  word: string;
  why: string;
}

/**
 * Copies of a sharded model. `commit`: the newest whole one; None: none yet. `made_at`: when, in seconds since 1970.
 *
 * `seconds`: that copying it took. `memory`: MB of all copies, which are on `workers` workers.
 */
export interface Copies {
  commit: number | null;
  made_at: number;
  seconds: number;
  memory: number;
  workers: number;
}

/**
 * The job's checkpoints, one every `every` commits. `commit`: of the newest one; None: there is none yet.
 *
 * `made_at`: when it was complete, in seconds since 1970. `size`: MB.
 */
export interface Checkpoints {
  commit: number | null;
  made_at: number;
  size: number;
  every: number;
}

/**
 * What losses have cost the job. `lost`: commits that had to be made again; None: not known.
 *
 * `trained`: percent of its time in which it trained; None: not known.
 */
export interface Summary {
  failures: number;
  lost: number | null;
  trained: number | null;
}

/**
 * The driver. `since`: seconds since 1970. `restarts`: how many drivers the cluster had before.
 *
 * `lease`: seconds for which the cluster lives without a client; None: it ends with its kernel.
 */
export interface Driver {
  pid: number;
  since: number;
  restarts: number;
  lease: number | null;
  versions: Record<string, string>;
}

/** All that a view shows, except the time. `failed_at`: seconds since 1970. */
export interface ClusterView {
  name: string;
  phase: string;
  reason: string;
  generation: number;
  world_size: number;
  min: number;
  max: number | null;
  job: string | null;
  outcome: string;
  step: number;
  total: number | null;
  steps_per_second: number | null;
  report: Record<string, number | string>;
  failed_at: number | null;
  copies: Copies | null;
  checkpoints: Checkpoints | null;
  summary: Summary | null;
  driver: Driver | null;
  hosts: Record<string, Host>;
  events: Event[];
  orders: RequestStatus[];
}

/** The trait `state`. `n`: the number of the key frame. `time`: seconds since 1970. */
export interface KeyFrame {
  name: string;
  phase: string;
  reason: string;
  generation: number;
  world_size: number;
  min: number;
  max: number | null;
  job: string | null;
  outcome: string;
  step: number;
  total: number | null;
  steps_per_second: number | null;
  report: Record<string, number | string>;
  failed_at: number | null;
  copies: Copies | null;
  checkpoints: Checkpoints | null;
  summary: Summary | null;
  driver: Driver | null;
  hosts: Record<string, Host>;
  events: Event[];
  orders: RequestStatus[];
  n: number;
  time: number;
}

/** The trait `change`: empty, or a JSON merge patch (RFC 7386) for the key frame with the number `base`. */
export interface Change {
  base?: number;
  patch?: Record<string, unknown>;
}

/** A request of the user. The driver handles it; `KeyFrame.orders` lists its outcome. */
export interface Request {
  id?: string;
}

/** `host`: its name and slots, as `gpu3:2`. */
export interface AddHost extends Request {
  order: "add_host";
  host: string;
}

/** `now`: do not wait for the next commit. */
export interface RemoveHost extends Request {
  order: "remove_host";
  host: string;
  now: boolean;
}

/** `worker`: its id. */
export interface RestartWorker extends Request {
  order: "restart";
  worker: string;
}

/** Bounds of the world's size. `max`: None for no limit. */
export interface Scale extends Request {
  order: "scale";
  min: number | null;
  max: number | null;
}

/** Stop the training at its next commit, until `ResumeJob`. */
export interface PauseJob extends Request {
  order: "pause";
}

/** Let the training go on. */
export interface ResumeJob extends Request {
  order: "resume";
}

/** Stop the job that runs. */
export interface StopJob extends Request {
  order: "stop_job";
}

/** Stop the cluster. */
export interface StopCluster extends Request {
  order: "stop";
}

/** A question of one view. The answer has the query's `id` as `reply`. */
export interface Query {
  id?: string;
}

/** Whether the kernel answers. */
export interface HelloQuery extends Query {
  ask: "hello";
}

/** A new key frame, because this view has missed the last one. */
export interface FrameQuery extends Query {
  ask: "frame";
}

/** Events before the event with the number `before` or, without it, the newest. */
export interface HistoryQuery extends Query {
  ask: "history";
  before?: number | null;
}

/** Lines after the line with the number `since`, of one worker or of all. */
export interface LogsQuery extends Query {
  ask: "logs";
  since: number;
  worker?: string | null;
}

/** The reports that this view lacks, which has `count` rows of `version`. */
export interface ReportsQuery extends Query {
  ask: "reports";
  version?: string;
  count?: number;
}

/** Where each rank is now. */
export interface StacksQuery extends Query {
  ask: "stacks";
}

/** How long each rank's steps took without waiting for others. */
export interface StepTimesQuery extends Query {
  ask: "step_times";
}

/** The cluster's events as a trace for Perfetto. */
export interface TraceQuery extends Query {
  ask: "trace";
}

/** A worker and the rank it had when it printed. */
export type Writer = [worker: string, rank: number | null];

/** A line of output. `writers`: runs `[first, last]` of places in the answer's `speakers`. `time`: seconds since 1970. */
export type OutputLine = [number: number, stream: string, text: string, writers: number[][], time: number];

/** Workers with the same stack. `place`: the innermost frame of the user's code. */
export interface StackGroup {
  workers: Writer[];
  place: string;
  text: string;
  note: string;
}

/** An answer without content. */
export type Empty = Record<string, never>;

/** `oldest`: the number of the first event that the kernel still has. */
export interface HistoryAnswer {
  events: Event[];
  oldest: number;
}

/**
 * `next`: the number to use as `since` in the next query. `more`: there are more lines now. `writers`: all that have printed.
 *
 * `unfinished`: lines without a newline yet, as of progress bars.
 */
export interface LogsAnswer {
  job: string | null;
  speakers: Writer[];
  lines: OutputLine[];
  unfinished: OutputLine[];
  next: number;
  more: boolean;
  writers: Writer[];
}

/**
 * Rows of the history from place `start` on. Each is step, time, generation, size of the world, and the values of `names`.
 *
 * A short row lacks the last names. If `version` is not the view's, all rows are new.
 */
export interface ReportsAnswer {
  version: string;
  start: number;
  names: string[];
  rows: ((number | null)[])[];
}

/** `silent`: workers that have not answered. */
export interface StacksAnswer {
  stacks: StackGroup[];
  silent: Writer[];
}

/** The times of a rank: milliseconds in each column, or null. */
export type StepTimesRow = [worker: string, times: (number | null)[]];

/** `span`: seconds of one column, of which the last ends at `end`. `rows`: of each rank. `texts`: of the slow ones, by rank. */
export interface StepTimesAnswer {
  span: number;
  end: number;
  rows: StepTimesRow[];
  texts: Record<string, string>;
}

/** `trace`: the content of a trace file. */
export interface TraceAnswer {
  trace: Record<string, unknown>;
}

/** The answer to each query, by its `ask`. */
export interface Answers {
  hello: Empty;
  frame: Empty;
  history: HistoryAnswer;
  logs: LogsAnswer;
  reports: ReportsAnswer;
  stacks: StacksAnswer;
  step_times: StepTimesAnswer;
  trace: TraceAnswer;
}

/** The answer to a query or request that has failed. */
export interface Refusal {
  error: string;
}

export type AnyRequest = AddHost | RemoveHost | RestartWorker | Scale | PauseJob | ResumeJob | StopJob | StopCluster;

export type AnyQuery = HelloQuery | FrameQuery | HistoryQuery | LogsQuery | ReportsQuery | StacksQuery | StepTimesQuery | TraceQuery;

export type AnyAnswer = Empty | HistoryAnswer | LogsAnswer | ReportsAnswer | StacksAnswer | StepTimesAnswer | TraceAnswer | Refusal;
