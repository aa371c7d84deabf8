// One answer: thinking, text, tokens, times, and its buttons.

import { copy, h, icon, iconButton, set } from "./dom.js";
import { render } from "./markdown.js";
import { callView, resultsForm } from "./tools.js";
import { tokenView } from "./tokens.js";
import { splitThinking } from "./tree.js";

const seconds = (value) =>
  value < 0.0995 ? `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms` : `${value.toFixed(value < 9.95 ? 2 : 1)} s`;

const FINISHED = {
  length: "The answer was cut off: it reached the limit of tokens.",
  stopped: "You stopped this answer.",
  abort: "The server ended this answer.",
};

/** Show an answer. actions: {regenerate, canResume, resume, edit, keep, give}, each called with the node; `give` also gets the
 *  results. */
export function answerView(node, actions) {
  const thinking = h("details", { class: "thinking", hidden: true }, h("summary"), h("div"));
  const text = h("div", { class: "markdown" });
  const calls = h("div", { class: "calls" });
  const note = h("p", { class: "note", hidden: true });
  const stats = h("p", { class: "stats", hidden: true });
  const copyButton = iconButton("copy", "Copy this answer", () =>
    copy(splitThinking(node.content).text, copyButton),
  );
  const tokensButton = iconButton("tokens", "Show the tokens", showTokens, { "aria-pressed": "false" });
  const nav = h("span", { class: "nav" });
  const bar = h(
    "div",
    { class: "actions" },
    nav,
    copyButton,
    iconButton("retry", "Answer again", () => actions.regenerate(node)),
    iconButton("edit", "Edit this answer", () => actions.edit(node)),
    tokensButton,
    h("button", { type: "button", class: "keep", text: "Continue", onclick: () => actions.keep(node) }),
  );
  const element = h(
    "article",
    { class: "message answer", "aria-label": "Answer", id: `m-${node.id}` },
    node.label && h("p", { class: "label", text: node.label }),
    thinking,
    text,
    calls,
    note,
    h("footer", {}, bar, stats),
  );
  let tokens = null;

  function showTokens() {
    if (tokens) {
      tokens.replaceWith(text);
      tokens = null;
    } else {
      tokens = tokenView(node.tokens ?? []);
      text.replaceWith(tokens);
    }
    set(tokensButton, {
      "aria-pressed": String(Boolean(tokens)),
      class: tokens ? "icon-button on" : "icon-button",
    });
  }

  function update() {
    const isLast = !node.running;
    const split = splitThinking(node.content);
    const thought = node.thinking || split.thinking;
    set(element, { "aria-busy": String(!isLast), class: `message answer${isLast ? "" : " running"}` });
    set(thinking, { hidden: !thought });
    if (thought) {
      const isThinking = !isLast && !split.text;
      thinking.firstChild.textContent = isThinking ? "Thinking…" : "Thoughts";
      thinking.lastChild.textContent = thought;
    }
    render(text, split.text, isLast);
    set(text, { hidden: isLast && !split.text });
    showCalls();
    if (isLast) finish();
    else set(bar, { hidden: true });
  }

  function showCalls() {
    const made = node.toolCalls ?? [];
    calls.replaceChildren(...made.map(callView));
    if (!node.running && made.length) calls.append(resultsForm(made, (results) => actions.give(node, results)));
  }

  function finish() {
    set(bar, { hidden: false });
    set(tokensButton, { hidden: !node.tokens?.length });
    const isEmpty = !node.content && !node.thinking && !node.toolCalls?.length;
    const said = node.error || FINISHED[node.finish] || (isEmpty && "The model said nothing.");
    set(note, { hidden: !said, class: node.error ? "note error" : "note" });
    note.replaceChildren(said || "");
    if (node.error)
      note.append(h("button", { type: "button", onclick: () => actions.regenerate(node) }, icon("retry"), "Try again"));
    else if (actions.canResume(node))
      note.append(h("button", { type: "button", onclick: () => actions.resume(node) }, icon("right"), "Continue"));
    showStats();
  }

  function showStats() {
    const { timings, usage } = node;
    set(stats, { hidden: !timings });
    if (!timings) return;
    const parts = [
      ["queue", timings.queued_s],
      ["prefill", timings.prefill_s],
      ["decode", timings.decode_s],
    ];
    const total = parts.reduce((sum, [, value]) => sum + value, 0) || 1;
    const phases = h("span", { class: "phases", "aria-hidden": "true" });
    for (const [name, value] of parts) {
      const share = h("i", { class: name });
      share.style.flexGrow = String(value / total);
      phases.append(share);
    }
    const says = parts.map(([name, value]) => `${name} ${seconds(value)}`);
    if (usage) {
      const { completion_tokens: output, prompt_tokens: prompt, cached } = usage;
      const speed = timings.decode_s > 0 && output > 1 ? (output - 1) / timings.decode_s : 0;
      says.push(`${output} ${output === 1 ? "token" : "tokens"}`);
      if (speed) says.push(`${speed.toFixed(speed < 9.95 ? 1 : 0)} tokens/s`);
      if (prompt) says.push(`prompt: ${cached} of ${prompt} cached`);
    }
    if (timings.energy_j) says.push(`${timings.energy_j.toPrecision(2)} J`);
    if (timings.num_retractions) says.push(`retracted ${timings.num_retractions === 1 ? "once" : `${timings.num_retractions} times`}`);
    stats.replaceChildren(phases, ...says.map((text) => h("span", { text })));
  }

  update();
  return { element, update, nav };
}
