// The settings: the browser keeps them, and each request has them. An empty field leaves the server's default.

import { $, h } from "./dom.js";

const NUMBERS = [
  ["temperature", "Temperature", 0, 2, 0.1],
  ["top_p", "Top-p", 0.01, 1, 0.05],
  ["top_k", "Top-k", 0, 1000000, 1],
  ["min_p", "Min-p", 0, 1, 0.05],
  ["max_tokens", "Max tokens", 1, 1000000, 1],
  ["seed", "Seed", 0, Number.MAX_SAFE_INTEGER, 1],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.1],
  ["repetition_penalty", "Repetition penalty", 0.1, 2, 0.05],
];

const UNSET = { max_tokens: "no limit", seed: "random", presence_penalty: 0, frequency_penalty: 0 };

/** The most tokens of a base model's text, unless the settings say another number: it seldom ends by itself. */
export const COMPLETED_TOKENS = 200;

export const isBase = (model) => model.has_chat_template === false;
export const readsPictures = (model) => !isBase(model) && Boolean(model.capabilities?.includes("vision"));

/** Show what counts where a field is empty, and only the settings that the model has. model: of /v1/models. */
export function showModel(model) {
  const shown = { ...UNSET, ...model.sampling_defaults };
  if (isBase(model)) shown.max_tokens = COMPLETED_TOKENS;
  for (const group of ["sampling", "second"])
    for (const [name] of NUMBERS) $(`${group}-${name}`).placeholder = shown[name] ?? "default";
  $("thinking-group").hidden = isBase(model) || model.has_thinking_switch === false;
}

/** changed: called after each change, with the name of the setting. Returns a function that fills the fields
 *  again. */
export function connectSettings(settings, changed) {
  const fillSampling = ["sampling", "second"].map((group) =>
    samplingFields($(group), group, settings, () => changed(group)),
  );
  const bind = (id, name, read, write) => {
    $(id).addEventListener("change", () => ((settings[name] = read($(id))), show(), changed(name)));
    return () => write($(id), settings[name]);
  };
  const text = [(field) => field.value, (field, value) => (field.value = value)];
  const box = [(field) => field.checked, (field, value) => (field.checked = value)];
  const count = [(field) => Number(field.value), (field, value) => (field.value = String(value))];
  const fills = [
    bind("set-key", "key", ...text),
    bind("set-theme", "theme", ...text),
    bind("set-thinking", "thinking", ...text),
    bind("set-form", "form", ...text),
    bind("set-schema", "schema", ...text),
    bind("set-tools", "toolList", ...text),
    bind("set-choice", "toolChoice", ...text),
    bind("set-n", "n", ...count),
    bind("set-tokens", "tokens", ...box),
    bind("set-compare", "compare", ...box),
  ];
  function show() {
    for (const fill of fills) fill();
    $("second-group").hidden = !settings.compare;
    $("schema-group").hidden = settings.form !== "schema";
    $("choice-group").hidden = !settings.toolList.trim();
    if (settings.theme) document.documentElement.dataset.theme = settings.theme;
    else delete document.documentElement.dataset.theme;
  }
  function showAll() {
    for (const fill of fillSampling) fill();
    show();
  }
  showAll();
  return showAll;
}

/** Return the request's field for the form of the answer. Throws an Error if the schema is no JSON. */
export function responseFormat({ form, schema }) {
  if (!form) return {};
  if (form === "json") return { response_format: { type: "json_object" } };
  let parsed;
  try {
    parsed = JSON.parse(schema);
  } catch (error) {
    throw new Error(`The JSON schema in the settings is no JSON: ${error.message}`);
  }
  return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: parsed, strict: true } } };
}

/** Return the request's fields for the tools. Throws an Error if they are no JSON list of functions. */
export function toolFields({ toolList, toolChoice }) {
  if (!toolList.trim()) return {};
  let list;
  try {
    list = JSON.parse(toolList);
  } catch (error) {
    throw new Error(`The tools in the settings are no JSON: ${error.message}`);
  }
  if (!Array.isArray(list) || !list.length) throw new Error("The tools in the settings must be a JSON list of functions.");
  const tools = list.map((one) => (one?.type === "function" ? one : { type: "function", function: one }));
  return toolChoice ? { tools, tool_choice: toolChoice } : { tools };
}

/** Return the settings that differ from the defaults, in a few words each. */
export function activeOf(settings, { system }) {
  const { sampling, n, compare, thinking, form, toolList } = settings;
  const values = Object.entries(sampling);
  return [
    system.trim() && "system prompt",
    ...(values.length < 3
      ? values.map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`)
      : [`${values.length} sampling settings`]),
    n > 1 && `${n} answers`,
    compare && "two settings",
    thinking && !$("thinking-group").hidden && `thinking ${thinking}`,
    form && (form === "json" ? "JSON" : "JSON schema"),
    toolList.trim() && "tools",
  ].filter(Boolean);
}

/** Make the fields. Returns a function that fills them again. */
function samplingFields(frame, group, settings, keep) {
  const fields = {};
  for (const [name, label, min, max, step] of NUMBERS) {
    const field = h("input", {
      type: "number", min, max, step, placeholder: "default", inputmode: "decimal",
      id: `${group}-${name}`,
      onchange: () => {
        // The steps are those of the arrows; the server refuses wrong values.
        if (field.value === "") delete settings[group][name];
        else settings[group][name] = Number(field.value);
        keep();
      },
    });
    fields[name] = field;
    frame.append(h("label", {}, h("span", { text: label }), field));
  }
  const stop = h("input", {
    type: "text", placeholder: "none", id: `${group}-stop`,
    onchange: () => {
      if (stop.value === "") delete settings[group].stop;
      else settings[group].stop = stop.value;
      keep();
    },
  });
  fields.stop = stop;
  frame.append(h("label", {}, h("span", { text: "Stop text" }), stop));
  return () => {
    for (const [name, field] of Object.entries(fields)) field.value = settings[group][name] ?? "";
  };
}
