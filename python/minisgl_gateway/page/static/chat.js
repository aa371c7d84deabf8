// The conversation: asks the server, keeps the tree of messages, shows the chosen branch.

import { answerView } from "./answer.js";
import { ApiError, streamChat, streamText } from "./client.js";
import { announce, h, iconButton, set, toast } from "./dom.js";
import { editForm, given, questionView } from "./question.js";
import { COMPLETED_TOKENS, isBase, responseFormat, toolFields } from "./settings.js";
import * as store from "./store.js";
import { resultsForm, resultsView } from "./tools.js";
import * as tree from "./tree.js";

const SAVE_EVERY_MS = 3000;

/** settings: read at each request. on: the listeners changed(), lost(error) and refused(error). */
export class Chat {
  constructor(messages, settings, on) {
    this.messages = messages;
    this.settings = settings;
    this.on = on;
    this.conversation = tree.newConversation();
    this.model = {}; // the served model, of /v1/models
    this.views = new Map(); // message id -> its element in the shown conversation
    this.runs = new Map(); // conversation id -> {conversation, controllers, kept}: answers being written
    this.dirty = new Set();
    this.frame = 0;
  }

  get isRunning() {
    return this.runs.has(this.conversation.id);
  }

  /** The tokens of the shown branch, as far as its last answer; 0 if they are not known. */
  get usedTokens() {
    const last = tree.path(this.conversation).findLast((node) => node.promptTokens);
    return last ? last.promptTokens + (last.usage?.completion_tokens ?? 0) : 0;
  }

  get isEmpty() {
    return this.conversation.nodes.length === 0;
  }

  open(conversation) {
    this.conversation = this.runs.get(conversation.id)?.conversation ?? conversation;
    this.views.clear();
    this.messages.replaceChildren();
    this.show();
  }

  /** Stop the answers that are being written in a conversation. Returns a promise of their being kept. */
  stop(id = this.conversation.id) {
    const run = this.runs.get(id);
    for (const controller of run?.controllers ?? []) controller.abort();
    return run?.kept;
  }

  // --- requests ----------------------------------------------------------------------------------

  async send(text, pictures) {
    const last = tree.path(this.conversation).at(-1);
    const node = tree.add(this.conversation, last?.id ?? null, { role: "user", content: text, ...given(pictures) });
    await this.answer(node);
  }

  /** Answer `question`, a message of the user. Each setting and each of its answers is a sibling. */
  async answer(question) {
    const { n, compare, sampling, second } = this.settings;
    const group = n > 1 || compare ? crypto.randomUUID() : undefined;
    const runs = (compare ? [sampling, second] : [sampling]).map((values, index) => {
      const label = compare ? `Setting ${index + 1}` : "";
      const nodes = Array.from({ length: n }, () =>
        tree.add(this.conversation, question.id, { role: "assistant", running: true, group, label }),
      );
      return { values, nodes };
    });
    tree.choose(this.conversation, runs[0].nodes[0]);
    this.show();
    this.messages.lastElementChild?.scrollIntoView({ block: "end" });
    await this.run(runs, question);
  }

  canResume({ finish, content, toolCalls, promptTokens, usage }) {
    const used = (promptTokens ?? 0) + (usage?.completion_tokens ?? 0);
    const isCut = finish === "length" || finish === "stopped";
    const hasRoom = !this.model.context_length || used < this.model.context_length;
    return isCut && hasRoom && !toolCalls?.length && Boolean(tree.splitThinking(content).text.trim());
  }

  /** Let the model go on with `node`, an answer that was stopped or cut off. */
  async resume(node) {
    if (this.isRunning) return;
    const { conversation } = this;
    const before = { finish: node.finish, usage: node.usage, timings: node.timings };
    Object.assign(node, { running: true, finish: undefined, usage: undefined, timings: undefined });
    this.touch(node);
    const values = node.label === "Setting 2" ? this.settings.second : this.settings.sampling;
    await this.run([{ values, nodes: [node] }], node);
    if (!node.error) return;
    toast(node.error); // the text stays, and one can continue it again
    Object.assign(node, before, { error: undefined });
    this.touch(node);
    await this.save(conversation);
  }

  /** Run all requests for messages behind `last`. */
  async run(runs, last) {
    announce("The model is answering");
    const conversation = this.conversation;
    const controllers = runs.map(() => new AbortController());
    let wasKept;
    const kept = new Promise((resolve) => (wasKept = resolve));
    this.runs.set(conversation.id, { conversation, controllers, kept });
    this.on.changed();
    const saver = setInterval(() => this.save(conversation), SAVE_EVERY_MS);
    try {
      await Promise.all(
        runs.map(({ values, nodes }, index) =>
          this.stream(conversation, last, values, nodes, controllers[index].signal),
        ),
      );
    } finally {
      clearInterval(saver);
      this.runs.delete(conversation.id);
      conversation.updated = Date.now();
      this.flush();
      await this.save(conversation).finally(wasKept); // a removal that waits for it goes on, whatever happens
      const failed = runs.some(({ nodes }) => nodes.some((node) => node.error));
      announce(failed ? "The answer failed" : "The answer is complete");
      this.on.changed();
    }
  }

  /** Return the request's fields for an answer behind `last`, which the model goes on with if it is an answer. */
  fields(conversation, last) {
    const { tokens, thinking } = this.settings;
    if (isBase(this.model)) {
      const prompt = tree.textTo(conversation, last);
      return { prompt, max_tokens: COMPLETED_TOKENS, ...(tokens && { logprobs: 5 }), ...responseFormat(this.settings) };
    }
    const hasSwitch = thinking && this.model.has_thinking_switch !== false;
    return {
      messages: tree.messagesTo(conversation, last),
      ...(last.role === "assistant" && { continue_final_message: true }),
      ...(tokens && { logprobs: true, top_logprobs: 5 }),
      ...(hasSwitch && { chat_template_kwargs: { enable_thinking: thinking === "on" } }),
      ...responseFormat(this.settings),
      ...toolFields(this.settings),
    };
  }

  async stream(conversation, last, values, nodes, signal) {
    const { key } = this.settings;
    try {
      const request = { ...this.fields(conversation, last), ...values };
      if (nodes.length > 1) request.n = nodes.length;
      const chunks = (request.messages ? streamChat : streamText)(request, { key, signal });
      for await (const chunk of chunks) {
        for (const choice of chunk.choices) take(nodes[choice.index], choice, chunk.timings);
        if (chunk.usage && nodes.length === 1) nodes[0].usage = usageOf(chunk.usage);
        if (chunk.usage) for (const node of nodes) node.promptTokens = chunk.usage.prompt_tokens;
        for (const { index } of chunk.choices) this.touch(nodes[index]);
      }
    } catch (error) {
      const isStop = error.name === "AbortError";
      for (const node of nodes.filter((one) => !one.finish)) {
        if (isStop) node.finish = "stopped";
        else node.error = error.message;
      }
      if (error.status === 401 || error.status === 403) this.on.refused(error);
      else if (error instanceof ApiError && (!error.status || error.status >= 500)) this.on.lost(error);
    } finally {
      for (const node of nodes) {
        delete node.running;
        if (node.tokens && !node.usage) node.usage = { completion_tokens: node.tokens.length };
        this.touch(node);
      }
    }
  }

  // --- buttons -----------------------------------------------------------------------------------

  regenerate(node) {
    if (this.isRunning) return;
    this.answer(this.node(node.parent));
  }

  keep(node) {
    tree.choose(this.conversation, node);
    delete node.group;
    this.show();
    this.save(this.conversation);
  }

  /** Let the user edit a message in its place. A changed question is answered again. */
  edit(node) {
    if (this.isRunning) return;
    const { element } = this.views.get(node.id);
    const { role, parent } = node;
    const form = editForm(node, (changed) => {
      form.replaceWith(element);
      if (!changed) return;
      const more = role === "user" ? {} : { finish: "stop" };
      const added = tree.add(this.conversation, parent, { role, ...changed, ...more });
      if (role === "user") return this.answer(added);
      this.show();
      this.save(this.conversation);
    });
    element.replaceWith(form);
    form.querySelector("textarea").focus();
  }

  /** Send the results that the user wrote for the calls of `node`, and let the model go on. */
  giveResults(node, results) {
    if (this.isRunning) return;
    const content = results.map((one) => one.content).join("\n\n");
    this.answer(tree.add(this.conversation, node.id, { role: "tool", content, results }));
  }

  /** Let the user change the results of `node`. */
  editResults(node) {
    if (this.isRunning) return;
    const { element } = this.view(node);
    const asked = this.node(node.parent);
    const form = resultsForm(asked.toolCalls, (results) => {
      form.replaceWith(element);
      this.giveResults(asked, results);
    }, node.results); // prettier-ignore
    element.replaceWith(form);
    form.querySelector("textarea").focus();
  }

  step(node, by) {
    const options = this.siblings(node);
    tree.choose(this.conversation, options.at((options.indexOf(node) + by) % options.length));
    this.show();
    this.save(this.conversation);
  }

  // --- drawing -----------------------------------------------------------------------------------

  show() {
    const path = tree.path(this.conversation);
    const elements = path.map((node, index) => {
      const together = this.siblings(node).filter((one) => node.group && one.group === node.group);
      if (index < path.length - 1 || together.length < 2) return this.view(node).element;
      const columns = together.map((one) => this.view(one).element);
      return h("section", { class: "answers", "aria-label": `${columns.length} answers` }, columns);
    });
    for (const node of path) this.showNav(node);
    for (const [index, element] of elements.entries())
      if (this.messages.children[index] !== element)
        this.messages.insertBefore(element, this.messages.children[index] ?? null);
    while (this.messages.children.length > elements.length) this.messages.lastChild.remove();
    this.on.changed();
  }

  view(node) {
    let view = this.views.get(node.id);
    if (!view) {
      const actions = {
        regenerate: (one) => this.regenerate(one),
        canResume: (one) => this.canResume(one),
        resume: (one) => this.resume(one),
        edit: (one) => this.edit(one),
        keep: (one) => this.keep(one),
        give: (one, results) => this.giveResults(one, results),
        editResults: (one) => this.editResults(one),
      };
      const make = { assistant: answerView, tool: resultsView, user: questionView }[node.role];
      view = make(node, actions);
      this.views.set(node.id, view);
    }
    return view;
  }

  showNav(node) {
    const options = this.siblings(node);
    const at = options.indexOf(node) + 1;
    const { nav } = this.view(node);
    set(nav, { hidden: options.length < 2 });
    nav.replaceChildren(
      iconButton("left", "The version before", () => this.step(node, -1)),
      h("span", { text: `${at}/${options.length}`, "aria-label": `version ${at} of ${options.length}` }),
      iconButton("right", "The next version", () => this.step(node, 1)),
    );
  }

  /** Draw `node` again in the next frame. */
  touch(node) {
    this.dirty.add(node);
    this.frame ||= requestAnimationFrame(() => this.flush());
  }

  flush() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    for (const node of this.dirty) this.views.get(node.id)?.update();
    this.dirty.clear();
    this.on.grown?.();
  }

  siblings(node) {
    return tree.children(this.conversation, node.parent);
  }

  node(id) {
    return this.conversation.nodes.find((node) => node.id === id);
  }

  async save(conversation) {
    try {
      const copied = { ...conversation, nodes: conversation.nodes.map(({ running, ...node }) => node) };
      await store.save(copied, tree.titleOf(conversation));
    } catch (error) {
      announce(`The browser did not keep this conversation: ${error?.message}`);
    }
  }
}

function usageOf({ prompt_tokens, completion_tokens, prompt_tokens_details }) {
  return { prompt_tokens, completion_tokens, cached: prompt_tokens_details?.cached_tokens ?? 0 };
}

/** Add a chunk's choice to its message. */
function take(node, { delta, finish_reason: finish, logprobs }, timings) {
  if (delta.content) node.content += delta.content;
  if (delta.reasoning_content) node.thinking = (node.thinking ?? "") + delta.reasoning_content;
  for (const { token, logprob, top_logprobs: top } of logprobs?.content ?? [])
    (node.tokens ??= []).push([token, logprob, top.map((one) => [one.token, one.logprob])]);
  for (const { index, id, function: part } of delta.tool_calls ?? []) {
    const call = ((node.toolCalls ??= [])[index] ??= {
      id,
      type: "function",
      function: { name: "", arguments: "" },
    });
    call.function.name += part?.name ?? "";
    call.function.arguments += part?.arguments ?? "";
  }
  if (finish) node.finish = finish;
  if (timings && finish) node.timings = timings;
}
