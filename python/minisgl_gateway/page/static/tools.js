// Shows the model's calls of tools, and a form in which the user writes their results.

import { h, iconButton } from "./dom.js";

export function callView({ function: { name, arguments: given } }) {
  return h("div", { class: "call" }, h("span", { class: "call-name", text: name }), h("code", { text: given }));
}

/** A form with a field for the result of each call. done: called with [{id, name, content}]. */
export function resultsForm(calls, done, before = []) {
  const fields = calls.map(({ function: { name } }, index) => {
    const field = h("textarea", { rows: "2", spellcheck: "false", class: "mono" });
    field.value = before[index]?.content ?? "";
    return [name, field];
  });
  const send = () =>
    done(fields.map(([name, field], index) => ({ id: calls[index].id, name, content: field.value })));
  return h(
    "form",
    {
      class: "results",
      onsubmit: (event) => (event.preventDefault(), send()),
      onkeydown: (event) => {
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) (event.preventDefault(), send());
      },
    },
    fields.map(([name, field]) => h("label", { class: "tall" }, h("span", { text: `Result of ${name}` }), field)),
    h("button", { type: "submit", class: "primary", text: "Send the results" }),
  );
}

/** The message with results. actions: {editResults}, called with the node. */
export function resultsView(node, actions) {
  const nav = h("span", { class: "nav" });
  const element = h(
    "article",
    { class: "message tool-results", "aria-label": "Results of tools", id: `m-${node.id}` },
    (node.results ?? []).map(({ name, content }) =>
      h("div", { class: "call" }, h("span", { class: "call-name", text: name }), h("code", { text: content })),
    ),
    h("div", { class: "actions" }, nav, iconButton("edit", "Edit the results", () => actions.editResults(node))),
  );
  return { element, nav, update() {} };
}
