// The page at /docs: shows the server's schema, and sends requests from forms.

import { headers as headersOf } from "./client.js";
import { $, announce, h, set } from "./dom.js";
import { loadSettings } from "./store.js";

const HELLO = [{ role: "user", content: "What is a radix cache?" }];
const EXAMPLES = {
  "/v1/chat/completions": { messages: HELLO },
  "/v1/completions": { prompt: "What is a radix cache?", max_tokens: 40 },
  "/v1/messages": { model: "MODEL", max_tokens: 100, messages: HELLO },
  "/v1/responses": { input: "What is a radix cache?" },
  "/generate": { text: "What is a radix cache?" },
};

const { key, theme } = loadSettings();
const headers = headersOf(key);
if (theme) document.documentElement.dataset.theme = theme;

const nameOf = (ref) => ref.split("/").at(-1);

/** Return a JSON schema's type in words. */
function typeOf(schema) {
  if (schema.$ref) return nameOf(schema.$ref);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  const options = schema.anyOf ?? schema.oneOf;
  if (options) return options.filter(({ type }) => type !== "null").map(typeOf).join(" or ");
  if (schema.type === "array") return `list of ${schema.items ? typeOf(schema.items) : "anything"}`;
  const [low, high] = [schema.minimum, schema.maximum];
  const range = low != null && high != null ? `, ${low} to ${high}` : low != null ? `, at least ${low}` : "";
  return `${schema.type ?? "anything"}${range}`;
}

/** Return the names of the records that a schema refers to. */
function refsOf(schema) {
  return JSON.stringify(schema).match(/#\/components\/schemas\/\w+/g)?.map(nameOf) ?? [];
}

function fieldsOf(name, schemas, seen = new Set()) {
  const schema = schemas[name];
  if (!schema?.properties || seen.has(name)) return [];
  seen.add(name);
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties).map(([field, value]) =>
    h("tr", {},
      h("td", {}, h("code", { text: field }), required.has(field) && h("span", { class: "tag", text: "required" })),
      h("td", { text: typeOf(value) }),
      h("td", { text: value.description ?? "" })),
  );
  const table = h("div", { class: "table", tabindex: "0", role: "region", "aria-label": `Fields of ${name}` },
    h("table", {}, h("thead", {}, h("tr", {}, ["Field", "Type", ""].map((text) => h("th", { text })))), h("tbody", {}, rows)));
  const inner = [...new Set(Object.values(schema.properties).flatMap(refsOf))].flatMap((ref) => fieldsOf(ref, schemas, seen));
  return [h("h3", { text: name }), table, ...inner];
}

function tryForm(method, path) {
  const hasBody = method === "post";
  const body = h("textarea", { rows: "6", spellcheck: "false", class: "mono", "aria-label": `Body of ${path}` });
  body.value = hasBody ? JSON.stringify(EXAMPLES[path] ?? {}, null, 2) : "";
  const target = h("input", { type: "text", class: "mono", "aria-label": "Path", spellcheck: "false" });
  target.value = path;
  const answer = h("pre", { class: "answered", tabindex: "0", role: "region", "aria-label": "The answer", hidden: true });
  const send = async (event) => {
    event.preventDefault();
    set(answer, { hidden: false });
    answer.textContent = "…";
    try {
      const options = hasBody
        ? { method: "POST", body: body.value, headers: { ...headers, "Content-Type": "application/json" } }
        : { method: method.toUpperCase(), headers };
      const response = await fetch(target.value.replace(/^\//, ""), options);
      const text = await response.text();
      let shown = text;
      try {
        shown = JSON.stringify(JSON.parse(text), null, 2);
      } catch {
        // Not JSON: a stream's events, or metrics.
      }
      answer.textContent = `${response.status}\n${shown.slice(0, 100_000)}`;
    } catch (error) {
      answer.textContent = `The server cannot be reached: ${error.message}`;
    }
    announce("The answer is there");
  };
  return h("form", { class: "try", onsubmit: send }, target, hasBody && body,
    h("button", { type: "submit", class: "primary", text: "Send" }), answer);
}

function operationView(path, method, operation, schemas) {
  const ref = operation.requestBody?.content?.["application/json"]?.schema?.$ref;
  return h("details", { class: "panel operation", id: `${method}-${path}` },
    h("summary", {}, h("span", { class: `method ${method}`, text: method.toUpperCase() }), h("code", { text: path }),
      h("span", { class: "quiet", text: (operation.description ?? operation.summary ?? "").split("\n")[0] })),
    operation.description?.includes("\n") && h("p", { class: "description", text: operation.description }),
    path === "/xray/events" ? h("p", { class: "quiet", text: "A stream without end: the X-ray reads it." }) : tryForm(method, path),
    ref ? fieldsOf(nameOf(ref), schemas) : null);
}

try {
  const response = await fetch("openapi.json", { headers });
  if (response.status === 401) throw new Error("This server needs an API key: enter it in the chat's settings.");
  if (!response.ok) throw new Error(`The server answered ${response.status}.`);
  const { paths, components } = await response.json();
  $("operations").replaceChildren(
    ...Object.entries(paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, operation]) => operationView(path, method, operation, components.schemas)),
    ),
  );
} catch (error) {
  $("operations").replaceChildren(h("p", { class: "note error", text: error.message }));
}
