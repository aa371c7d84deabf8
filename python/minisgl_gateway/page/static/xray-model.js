// The X-ray's data: a minute of frames, of steps, and of the phases of each request.

const KEPT_S = 60;
const MAX_STEPS = 40_000;
const STALL_S = 0.25; // a running request without a row for longer counts as stalled

const CACHE = ["page_map", "pages_per_cell", "tree", "texts", "num_nodes"];
const STEP = ["step", "start", "settle", "receive", "plan", "launch", "wait", "commit", "send", "decodes", "prompt", "output", "rows"];
const REQUEST = ["uid", "state", "priority", "prompt", "cached", "computed", "output", "maxLen", "chunks", "retractions", "pages", "acceptedAge", "launchedAge", "firstAge"];

const named = (names, values) => Object.fromEntries(names.map((name, index) => [name, values[index]]));

export class Model {
  constructor() {
    this.keptS = KEPT_S;
    this.frames = []; // the newest last
    this.steps = [];
    this.requests = new Map(); // uid -> {...REQUEST, accepted, launched, first, ended, spans}
  }

  get now() {
    return this.frames.at(-1)?.now_s ?? 0;
  }

  /** Take a frame of the server, as parsed JSON. */
  add(frame) {
    if (frame.now_s < this.now) this.clear(); // another engine, or the recording begins again
    const before = this.frames.at(-1);
    // Pages and the tree are not in each frame.
    if (!frame.tree && before) for (const name of CACHE) frame[name] = before[name];
    this.frames.push(frame);
    for (const values of frame.steps) this.addStep(named(STEP, values));
    const seen = new Set();
    for (const values of frame.requests) {
      const now = named(REQUEST, values);
      const request = this.request(now.uid);
      const at = (age) => (age < 0 ? null : frame.now_s - age);
      Object.assign(request, now);
      request.accepted = at(now.acceptedAge);
      request.launched ??= at(now.launchedAge);
      request.first ??= at(now.firstAge);
      seen.add(now.uid);
    }
    for (const request of this.requests.values())
      if (!seen.has(request.uid) && request.ended == null && frame.num_requests <= frame.requests.length)
        request.ended = Math.max(request.last ?? 0, request.last ? 0 : (this.frames.at(-2)?.now_s ?? frame.now_s));
    this.forget(frame.now_s - this.keptS);
  }

  clear() {
    this.frames.length = this.steps.length = 0;
    this.requests.clear();
  }

  addStep(step) {
    const launched = step.start + (step.receive + step.plan + step.launch) * 1e-6;
    step.end = step.settle + step.wait * 1e-6;
    // The device takes one step after the other: this one begins when the one before it has ended.
    step.begin = Math.min(Math.max(launched, this.steps.at(-1)?.end ?? 0), step.end);
    step.rows ??= this.steps.at(-1)?.rows ?? [];
    this.steps.push(step);
    for (let index = 0; index < step.rows.length; index += 2) {
      const request = this.request(step.rows[index]);
      const kind = index / 2 < step.decodes ? "decode" : "prefill";
      const span = request.spans.at(-1);
      if (span?.kind === kind && step.begin - span.end < STALL_S) span.end = step.end;
      else request.spans.push({ kind, begin: step.begin, end: step.end });
      if (kind === "decode") request.written = (request.written ?? 1) + 1; // the prompt made the first
      request.launched ??= step.begin;
      request.last = step.end;
    }
  }

  request(uid) {
    let request = this.requests.get(uid);
    if (!request) {
      request = { uid, spans: [], accepted: null, launched: null, first: null, ended: null };
      this.requests.set(uid, request);
    }
    return request;
  }

  forget(before) {
    const old = (list, time) => {
      let count = Math.max(list.length - MAX_STEPS, 0);
      while (count < list.length - 1 && time(list[count]) < before) count++;
      if (count) list.splice(0, count);
    };
    old(this.frames, (frame) => frame.now_s);
    old(this.steps, (step) => step.end);
    for (const [uid, request] of this.requests)
      if ((request.ended ?? request.last ?? Infinity) < before) this.requests.delete(uid);
  }

  /** Return the frame that was the newest at `time`. */
  frameAt(time) {
    return this.frames.findLast((frame) => frame.now_s <= time + 1e-6) ?? this.frames[0];
  }

  /** Return the steps that end after `from` and begin before `to`. */
  stepsIn(from, to) {
    let low = 0;
    for (let high = this.steps.length; low < high; ) {
      const middle = (low + high) >> 1;
      if (this.steps[middle].end < from) low = middle + 1;
      else high = middle;
    }
    const found = [];
    for (; low < this.steps.length && this.steps[low].begin <= to; low++) found.push(this.steps[low]);
    return found;
  }

  /** Return the requests that were open between two times, the oldest first. */
  requestsIn(from, to) {
    return [...this.requests.values()]
      .map((request) => ({ request, begin: request.accepted ?? request.launched ?? 0 }))
      .filter(({ request, begin }) => begin <= to && (request.ended ?? Infinity) >= from)
      .sort((a, b) => a.begin - b.begin || a.request.uid - b.request.uid)
      .map(({ request }) => request);
  }

  /** Return the rates of the seconds before `time`. */
  rates(time, seconds = 2) {
    const steps = this.stepsIn(time - seconds, time).filter((step) => step.end <= time);
    const sum = (name) => steps.reduce((total, step) => total + step[name], 0);
    const span = Math.min(seconds, Math.max(time - (steps[0]?.begin ?? time), 0.1));
    const busy = steps.reduce((total, step) => total + step.end - step.begin, 0);
    return {
      output: sum("output") / span,
      prompt: sum("prompt") / span,
      steps: steps.length / span,
      device: Math.min(busy / span, 1),
    };
  }
}

const time = (s) => (s < 0.9995 ? `${Math.round(s * 1000)} ms` : `${s.toFixed(s < 10 ? 1 : 0)} s`);
const times = (count) => (count === 1 ? "once" : `${count} times`);
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

/** Return a sentence about the times of a request. */
export function sentenceOf(request, now) {
  const { accepted, launched, first, ended, spans } = request;
  const until = ended ?? now;
  const begin = accepted ?? launched ?? until;
  if (launched == null) return `Request ${request.uid} has waited for ${time(until - begin)}.`;
  const parts = [];
  if (accepted != null) parts.push(`waited ${time(Math.max(launched - accepted, 0))}`);
  const prefilled = first ?? spans.find(({ kind }) => kind === "decode")?.begin ?? null;
  const cached = request.cached ? ` (${request.cached} of ${request.prompt} tokens came from the cache)` : "";
  const chunks = request.chunks > 1 ? ` in ${request.chunks} chunks` : "";
  parts.push(`took ${time((prefilled ?? until) - launched)} for its prompt${chunks}${cached}`);
  const output = Math.max(request.output ?? 0, request.written ?? 0); // a short request is in no frame
  if (prefilled != null && output) {
    const seconds = Math.max(until - prefilled, 1e-3);
    parts.push(`wrote ${plural(output, "token")} in ${time(seconds)}, ${(output / seconds).toFixed(0)} in a second`);
  }
  let stood = 0;
  for (let index = 1; index < spans.length; index++)
    stood += Math.max(spans[index].begin - spans[index - 1].end - 0.05, 0);
  if (stood > 0.1) parts.push(`stood still for ${time(stood)}`);
  if (request.retractions) parts.push(`was retracted ${times(request.retractions)}`);
  const last = parts.pop();
  return `Request ${request.uid} ${parts.join(", ")}${parts.length ? " and " : ""}${last}${ended == null ? " so far" : ""}.`;
}
