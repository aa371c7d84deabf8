// The X-ray (`#xray`): reads the engine's frames while it is open, and shows now or an earlier time.

import { headers, send, servedModel, streamChat } from "./client.js";
import { h, iconButton, set } from "./dom.js";
import { drawPages, drawRequests, drawSteps, drawTree, palette, ROW } from "./xray-draw.js";
import { Model, sentenceOf } from "./xray-model.js";

const WINDOW_S = 10;
const AGAIN_MS = 2000;
const MAX_FRAMES = 10_000; // the last frames of a recording: a quarter of an hour
const COUNT = 8; // requests of sendDemo
const GAP_MS = 120;
const SYSTEM = "You are a helpful assistant. Answer the questions of the user as well as you can.";

const whole = (value) => Math.round(value).toLocaleString("en");

export class XRay {
  /** key: returns the API key. */
  constructor(root, key) {
    this.root = root;
    this.key = key;
    this.model = new Model();
    this.at = null; // the time that is shown; null: the newest
    this.selected = null;
    this.shown = [];
    this.point = null; // on the prefix tree: {x, y}, or {index} of the arrow keys
    this.frame = 0;
    this.build();
    new ResizeObserver(() => this.later()).observe(root);
  }

  open() {
    this.root.hidden = false;
    if (this.reading) return;
    if (this.model.keptS === Infinity) {
      this.model = new Model(); // a recording was shown
      this.pause(null);
    }
    this.reading = new AbortController();
    this.read(this.reading.signal);
  }

  close() {
    this.root.hidden = true;
    this.reading?.abort();
    this.reading = null;
  }

  /** Read frames until `signal` aborts. Connects again after a lost connection. */
  async read(signal) {
    while (!signal.aborted) {
      try {
        const one = this.server.value && `?replica=${encodeURIComponent(this.server.value)}`;
        const response = await send(`xray/events${one}`, { headers: headers(this.key()), signal });
        this.say("");
        const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
        for (let text = ""; ; ) {
          const { value, done } = await reader.read();
          if (done) break;
          const events = (text + value).split("\n\n");
          text = events.pop();
          for (const event of events) if (event.startsWith("data: ")) this.model.add(JSON.parse(event.slice(6)));
          this.later();
        }
      } catch (error) {
        if (signal.aborted) return;
        const wrong = error.code === "replica_needed" ? await this.offerServers(error) : error;
        if (!wrong) continue;
        this.say(wrong.status === 401 ? "The X-ray needs a valid API key: see the settings." : wrong.status ? wrong.message : "The server does not answer. The X-ray goes on when it is back.");
      }
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }

  /** Let the user choose among a router's servers. Returns null; `error` if there are none; or why they are not known. */
  async offerServers(error) {
    let names;
    try {
      const { replicas } = await (await send("replicas", { headers: headers(this.key()) })).json();
      names = replicas.filter((each) => each.up).map((each) => each.name);
    } catch (refused) {
      return refused;
    }
    this.server.replaceChildren(...names.map((name) => h("option", { text: name })));
    set(this.server, { hidden: !names.length });
    return names.length ? null : error;
  }

  /** Show another server. */
  change() {
    this.reading?.abort();
    this.model.clear();
    this.pause(null);
    this.reading = new AbortController();
    this.read(this.reading.signal);
  }

  /** Show the end of a recording (`--record FILE`), instead of the engine. */
  async openFile(file) {
    const lines = (await file.text()).split("\n").filter((line) => line.startsWith('{"frame":'));
    if (!lines.length) return this.say("This file is no recording: it has no frames.");
    this.close();
    this.root.hidden = false;
    this.model.clear();
    this.model.keptS = Infinity;
    for (const line of lines.slice(-MAX_FRAMES)) {
      try {
        this.model.add(JSON.parse(line).frame);
      } catch {
        // The last line of a file that is still being written.
      }
    }
    this.say("");
    this.pause(this.model.now);
  }

  say(text) {
    set(this.note, { hidden: !text });
    this.note.textContent = text;
  }

  later() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  draw() {
    const { model } = this;
    if (!model.frames.length || this.root.hidden) return;
    const to = this.at ?? model.now;
    const from = to - WINDOW_S;
    const frame = model.frameAt(to);
    const colours = palette();
    drawSteps(this.steps, model.stepsIn(from, to), from, to, model.now, colours);
    this.shown = drawRequests(this.bars, model.requestsIn(from, to), from, to, this.selected, colours);
    if (frame.tree) {
      drawPages(this.pages, frame, colours);
      this.showNode(frame, drawTree(this.tree, frame, colours));
    }
    this.showNumbers(frame, to);
    this.showSelected(to);
    const oldest = model.frames[0].now_s;
    set(this.slider, { min: Math.max(oldest, model.now - model.keptS), max: model.now });
    set(this.demoButton, { hidden: model.keptS === Infinity });
    this.slider.value = to;
    this.ago.textContent = this.at == null ? "live" : `${(model.now - to).toFixed(1)} s ago`;
  }

  showNumbers(frame, to) {
    const rates = this.model.rates(to);
    const percent = (part, of) => (of ? `${Math.round((100 * part) / of)} %` : "–");
    const values = {
      output: whole(rates.output),
      prompt: whole(rates.prompt),
      running: frame.num_running,
      waiting: frame.num_waiting,
      device: percent(rates.device, 1),
      kv: percent(frame.num_used_pages, frame.num_pages),
      hits: percent(frame.num_cached_tokens, frame.num_prompt_tokens),
      retractions: frame.num_retractions,
    };
    for (const [name, value] of Object.entries(values)) this.numbers[name].textContent = value;
    const { num_pages: pages, num_used_pages: used, num_cached_pages: cached } = frame;
    this.pagesNote.textContent =
      `${whole(used)} used and ${whole(cached)} cached of ${whole(pages)} pages of ${frame.page_size} tokens${frame.pages_per_cell > 1 ? `; a square is ${frame.pages_per_cell} pages` : ""}`;
    this.treeNote.textContent = frame.num_nodes
      ? `${whole(frame.num_nodes)} ${frame.num_nodes === 1 ? "prefix" : "prefixes"}; the number is its pages`
      : "nothing is cached yet";
  }

  /** Describe the node of the prefix tree that the pointer or the arrow keys have chosen. */
  showNode(frame, nodes) {
    const { point } = this;
    const hit = ({ left, right, top, bottom }) => point.x >= left && point.x < right && point.y >= top && point.y < bottom;
    const index = point?.index != null ? Math.min(point.index, nodes.length - 1) : point ? nodes.findIndex(hit) : -1;
    set(this.nodeText, { hidden: index < 0 });
    if (index < 0) return;
    const { pages, locks } = nodes[index];
    const use = locks > 1 ? `${locks} requests share it` : locks ? "one request holds it" : "no request holds it";
    const text = frame.texts?.[index];
    const said = text ? `: ${JSON.stringify(text)}` : "";
    const shown = `${pages} ${pages === 1 ? "page" : "pages"}, ${use}${said}`;
    if (this.nodeText.textContent !== shown) this.nodeText.textContent = shown;
  }

  showSelected(to) {
    const request = this.model.requests.get(this.selected);
    const open = this.model.requestsIn(to, to).filter((one) => one.ended == null || one.ended > to);
    this.sentence.textContent = request
      ? sentenceOf(request, to)
      : open.length
        ? "Choose a request to see where its time went."
        : "No request runs. Ask something in the chat, or send requests from here, and watch.";
  }

  /** Send requests for the X-ray to show. They end when it is closed. */
  async demo() {
    set(this.demoButton, { disabled: true });
    this.pause(null);
    try {
      await sendDemo(this.key(), this.reading?.signal);
    } catch (error) {
      if (error.name !== "AbortError") this.say(error.message);
    }
    set(this.demoButton, { disabled: false });
  }

  select(step) {
    if (!this.shown.length) return;
    const index = this.shown.findIndex(({ uid }) => uid === this.selected);
    const next = index < 0 ? 0 : Math.min(Math.max(index + step, 0), this.shown.length - 1);
    this.selected = this.shown[next].uid;
    this.later();
  }

  pause(at) {
    this.at = at;
    set(this.pauseButton, { "aria-pressed": String(at != null) });
    this.pauseButton.textContent = at == null ? "Pause" : "Go on";
    this.later();
  }

  build() {
    const canvas = (label, props = {}) => h("canvas", { role: "img", "aria-label": label, ...props });
    const key = (colour, text) => h("span", { class: `key ${colour}` }, h("i"), text);
    const panel = (title, note, keys, ...content) =>
      h("section", { class: "panel" }, h("header", {}, h("h3", { text: title }), note, h("span", { class: "keys" }, keys)), content);
    const NAMES = {
      output: "tokens/s", prompt: "prompt tokens/s", running: "running", waiting: "waiting",
      device: "device busy", kv: "KV pages used", hits: "prompts cached", retractions: "retractions",
    };
    this.numbers = Object.fromEntries(Object.keys(NAMES).map((name) => [name, h("dd", { text: "–" })]));
    this.note = h("p", { class: "note error", role: "alert", hidden: true });
    this.steps = canvas("Steps: what the device computed, and the host's work below it");
    this.bars = canvas("Requests as bars from arrival to end", {
      tabindex: "0", role: "application",
      "aria-label": "Requests as bars from arrival to end. The arrow keys choose one.",
      onclick: (event) => {
        this.selected = this.shown[Math.floor(event.offsetY / ROW)]?.uid ?? null;
        this.later();
      },
      onkeydown: (event) => {
        const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
        if (step) (event.preventDefault(), this.select(step));
      },
    });
    this.pages = canvas("KV pages by owner");
    const pointed = (event) => ((this.point = { x: event.offsetX, y: event.offsetY }), this.later());
    this.tree = canvas("The prefix tree", {
      tabindex: "0", role: "application",
      "aria-label": "The prefix tree. The arrow keys choose a node.",
      onclick: pointed, onpointermove: pointed,
      onpointerleave: () => ((this.point = null), this.later()),
      onkeydown: (event) => {
        const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (!step) return;
        event.preventDefault();
        this.point = { index: Math.max((this.point?.index ?? -1) + step, 0) };
        this.later();
      },
    });
    this.nodeText = h("p", { class: "node-text", role: "status", hidden: true });
    this.pagesNote = h("span", { class: "quiet" });
    this.treeNote = h("span", { class: "quiet" });
    this.sentence = h("p", { class: "sentence", role: "status" });
    this.slider = h("input", {
      type: "range", step: "0.05", min: "0", max: "0", "aria-label": "Time, up to a minute back",
      oninput: () => this.pause(Number(this.slider.value)),
    });
    this.ago = h("span", { class: "quiet ago", text: "live" });
    this.pauseButton = h("button", {
      type: "button", text: "Pause", "aria-pressed": "false",
      onclick: () => this.pause(this.at == null ? this.model.now : null),
    });
    this.demoButton = h("button", { type: "button", text: `Send ${COUNT} requests`, onclick: () => this.demo() });
    this.server = h("select", { hidden: true, "aria-label": "Server", onchange: () => this.change() });
    const file = h("input", {
      type: "file", hidden: true, "aria-label": "A recording",
      onchange: () => file.files[0] && this.openFile(file.files[0]),
    });
    this.root.replaceChildren(
      this.note,
      h("dl", { class: "numbers" }, Object.entries(NAMES).map(([name, text]) => h("div", {}, this.numbers[name], h("dt", { text })))),
      h("div", { class: "time" }, this.server, this.pauseButton, this.slider, this.ago,
        h("button", { type: "button", text: "Open a recording", onclick: () => file.click() }), file),
      panel("Steps", h("span", { class: "quiet", text: `the last ${WINDOW_S} s; a taller step computes more tokens` }),
        [key("decode", "decode"), key("prefill", "prompt"), key("queue", "host")], this.steps),
      panel("Requests", this.demoButton, [key("queue", "waits"), key("prefill", "prompt"), key("decode", "decode")],
        this.sentence, h("div", { class: "bars" }, this.bars)),
      h("div", { class: "pair" },
        panel("KV pages", this.pagesNote, [key("uids", "a request's own"), key("text", "shared"), key("quiet-key", "cached"), key("free", "free")], this.pages),
        panel("Prefix tree", this.treeNote, [key("text", "shared"), key("decode", "in use"), key("quiet-key", "kept")], this.tree, this.nodeText)),
    );
  }
}

/** Send requests to watch: they begin alike, come one after the other and have different lengths.
 *  Waits for all answers, which are dropped. Throws ApiError if one fails. */
async function sendDemo(key, signal) {
  const { id: model } = await servedModel(key);
  const ask = async (index) => {
    await new Promise((resolve) => setTimeout(resolve, GAP_MS * index));
    const messages = [
      { role: "system", content: SYSTEM },
      { role: "user", content: `Count from ${9 * index + 1} to 100.` },
    ];
    const answer = streamChat({ model, messages, max_tokens: 400 }, { key, signal });
    while (!(await answer.next()).done);
  };
  await Promise.all(Array.from({ length: COUNT }, (_, index) => ask(index)));
}
