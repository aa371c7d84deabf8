// A conversation is a tree of messages. Editing or regenerating adds a sibling, so nothing is lost.
//
//   {id, title, updated, system, nodes: [node, ...], chosen: {parent id or "": child id}}
//   node: {id, parent, role, content, thinking, ...}; answers made at once have the same `group`.
//   A node of the role "user" may have pictures: [{name, url}, ...].
//   A node of the role "tool" has the results of all calls above it: [{id, name, content}, ...].

import { isPicture } from "./pictures.js";

const ROLES = ["user", "assistant", "tool"];

export function newConversation(system = "") {
  return { id: crypto.randomUUID(), title: "", updated: Date.now(), system, nodes: [], chosen: {} };
}

/** Add a message below `parent` (an id, or null for the first) and choose it. Returns it. */
export function add(conversation, parent, fields) {
  const node = { id: crypto.randomUUID(), parent, content: "", time: Date.now(), ...fields };
  conversation.nodes.push(node);
  choose(conversation, node);
  return node;
}

export function choose(conversation, node) {
  conversation.chosen[node.parent ?? ""] = node.id;
}

export function children(conversation, id) {
  return conversation.nodes.filter((node) => node.parent === id);
}

/** Return the chosen messages from the first to the last. */
export function path(conversation) {
  const below = Map.groupBy
    ? Map.groupBy(conversation.nodes, (node) => node.parent)
    : conversation.nodes.reduce((map, node) => {
        map.set(node.parent, [...(map.get(node.parent) ?? []), node]);
        return map;
      }, new Map());
  const found = [];
  for (let id = null; below.has(id); ) {
    const options = below.get(id);
    const node = options.find((one) => one.id === conversation.chosen[id ?? ""]) ?? options.at(-1);
    found.push(node);
    id = node.id;
  }
  return found;
}

/** Return the messages down to `node`, as fields of a request. */
export function messagesTo(conversation, node) {
  const byId = new Map(conversation.nodes.map((one) => [one.id, one]));
  const messages = [];
  for (let one = node; one; one = byId.get(one.parent)) {
    if (one.role === "tool") {
      messages.unshift(
        ...one.results.map(({ id, content }) => ({ role: "tool", tool_call_id: id, content })),
      );
      continue;
    }
    const content = one.role === "assistant" ? splitThinking(one.content).text : contentOf(one);
    const message = { role: one.role, content };
    if (one.toolCalls?.length) message.tool_calls = one.toolCalls;
    messages.unshift(message);
  }
  if (conversation.system.trim()) messages.unshift({ role: "system", content: conversation.system });
  return messages;
}

function contentOf({ content, pictures }) {
  if (!pictures?.length) return content;
  const parts = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return content.trim() ? [...parts, { type: "text", text: content }] : parts;
}

/** Return the texts down to `node` as one, which a base model goes on with. Throws an Error if there are pictures. */
export function textTo(conversation, node) {
  const messages = messagesTo({ ...conversation, system: "" }, node);
  if (messages.some(({ content }) => typeof content !== "string"))
    throw new Error("This model reads text only, and the conversation has pictures.");
  return messages.map(({ content }) => content).join("");
}

/** Split a model's text into its thinking and its answer. */
export function splitThinking(content) {
  const end = content.indexOf("</think>");
  const begins = /^\s*<think>/.exec(content);
  if (end < 0 && !begins) return { thinking: "", text: content };
  const thinking = content.slice(begins?.[0].length ?? 0, end < 0 ? undefined : end);
  const text = end < 0 ? "" : content.slice(end + "</think>".length).trimStart();
  return { thinking: thinking.trim(), text };
}

export function titleOf(conversation) {
  const first = conversation.nodes.find((node) => node.role === "user");
  const text = conversation.title || first?.content.trim().split("\n")[0] || first?.pictures?.[0]?.name || "New conversation";
  return text.length > 70 ? `${text.slice(0, 69)}…` : text;
}

/** Return the conversations of an exported file. Throws an Error that says what is wrong. */
export function parseExport(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
  if (file?.format !== "minisgl-conversations" || !Array.isArray(file.conversations))
    throw new Error("This file was not exported by this page.");
  return file.conversations.map((given) => {
    const ids = new Map(); // new ones: an import replaces nothing
    const nodes = [];
    for (const node of Array.isArray(given?.nodes) ? given.nodes : []) {
      const parent = node.parent === null ? null : ids.get(node.parent);
      const isTool = node.role === "tool";
      const isWhole = !isTool || (Array.isArray(node.results) && node.results.every(isResult));
      const { pictures = [] } = node;
      const areShown = Array.isArray(pictures) && pictures.every(isPicture);
      if (parent === undefined || !ROLES.includes(node.role) || typeof node.content !== "string" || !isWhole || !areShown)
        throw new Error("A conversation in this file is damaged.");
      ids.set(node.id, crypto.randomUUID());
      nodes.push({ ...node, id: ids.get(node.id), parent });
    }
    const chosen = {};
    for (const [above, below] of Object.entries(given.chosen ?? {}))
      if (ids.has(below) && (above === "" || ids.has(above)))
        chosen[above && ids.get(above)] = ids.get(below);
    const title = String(given.title ?? "");
    const updated = Number(given.updated) || Date.now();
    return { ...newConversation(String(given.system ?? "")), title, updated, nodes, chosen };
  });
}

function isResult(one) {
  return [one?.id, one?.name, one?.content].every((value) => typeof value === "string");
}

export function toExport(conversations) {
  return JSON.stringify({ format: "minisgl-conversations", version: 1, conversations });
}
