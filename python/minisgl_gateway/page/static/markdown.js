// Turns a model's Markdown into elements: parses, sanitises, then sets code and formulas.
//
// While an answer streams, only blocks whose source has changed are made again. Raw HTML is shown as
// text and images become links, so that an answer cannot make the browser fetch anything.

import { Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";
import { lex, MOST_CODE, MOST_TEX } from "./bounded.js";
import { copy, h, iconButton } from "./dom.js";

const purify = globalThis.DOMPurify;
const SAFE = {
  ALLOWED_TAGS:
    "a b blockquote br code del em h1 h2 h3 h4 h5 h6 hr i li ol p pre s span strong sub sup table tbody td th thead tr ul".split(" "),
  ALLOWED_ATTR: ["href", "class", "start", "align"],
  ADD_URI_SAFE_ATTR: ["start", "align"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};
purify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});

const escape = (text) =>
  text.replace(/[&<>"']/g, (char) => `&#${char.charCodeAt(0)};`);

const formula = (tex, block) =>
  `<span class="tex${block ? " display" : ""}">${escape(tex)}</span>`;

const blockMath = {
  name: "blockMath",
  level: "block",
  // Only within the paragraph: Marked asks for each one, and `src` is all that follows.
  start: (src) => src.slice(0, src.search(/\n[ \t]*\n|$/)).match(/(?:^|\n) {0,3}(?:\$\$|\\\[)/)?.index,
  tokenizer(src) {
    const found = /^ {0,3}(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])[ \t]*(?:\n+|$)/.exec(src);
    return found && { type: "blockMath", raw: found[0], tex: (found[1] ?? found[2]).trim() };
  },
  renderer: (token) => `<p>${formula(token.tex, true)}</p>`,
};

const inlineMath = {
  name: "inlineMath",
  level: "inline",
  start: (src) => src.match(/\$|\\[([]/)?.index,
  tokenizer(src) {
    // A dollar sign that begins a formula is followed by no space, one that ends it by no digit.
    const found =
      /^\$\$([^$]+?)\$\$/.exec(src) ??
      /^\$(?![\s$])((?:\\.|[^\\$\n])*?[^\s\\$])\$(?!\d)/.exec(src) ??
      /^\\\(([\s\S]+?)\\\)/.exec(src) ??
      /^\\\[([\s\S]+?)\\\]/.exec(src);
    return found && { type: "inlineMath", raw: found[0], tex: found[1].trim() };
  },
  renderer: (token) => formula(token.tex, false),
};

/** A text that exceeds a bound (bounded.js). */
const plain = {
  name: "plain",
  level: "block",
  renderer: (token) => `<p class="plain">${escape(token.raw)}</p>`,
};

const marked = new Marked({
  gfm: true,
  extensions: [],
  renderer: {
    html: ({ text }) => escape(text),
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || "image")}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});
marked.use({ extensions: [blockMath, inlineMath, plain] });

/** Show `text` in `element`, which nothing else may change. isLast: no more text will come. */
export function render(element, text, isLast) {
  const tokens = lex(text, marked.defaults);
  const sources = (element.sources ??= []);
  for (const [index, token] of tokens.entries()) {
    const settled = isLast || index < tokens.length - 1;
    const source = (settled ? "1" : "0") + token.type + token.raw;
    if (sources[index] === source) continue;
    const block = h("div", { class: "block" }, purify.sanitize(marked.parser([token]), SAFE));
    decorate(block, settled);
    if (element.children[index]) element.children[index].replaceWith(block);
    else element.append(block);
    sources[index] = source;
  }
  sources.length = tokens.length;
  while (element.children.length > tokens.length) element.lastChild.remove();
}

function decorate(block, settled) {
  for (const code of block.querySelectorAll("pre > code")) setCode(code, settled);
  for (const span of block.querySelectorAll(".tex")) setFormula(span);
  for (const table of block.querySelectorAll("table")) {
    const frame = h("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
}

function setCode(code, settled) {
  const text = code.textContent;
  const language = /language-([\w+#-]+)/.exec(code.className)?.[1] ?? "";
  const button = iconButton("copy", "Copy the code", () => copy(text.replace(/\n$/, ""), button));
  const head = h("div", { class: "code-head" }, h("span", { text: language || "text" }), button);
  const pre = code.parentElement;
  const label = language ? `Code, ${language}` : "Code";
  for (const [name, value] of Object.entries({ tabindex: "0", role: "region", "aria-label": label }))
    pre.setAttribute(name, value);
  const frame = h("div", { class: "code" }, head);
  pre.replaceWith(frame);
  frame.append(pre);
  if (settled && language && text.length <= MOST_CODE) highlight(code, text, language);
}

async function highlight(code, text, language) {
  const { default: highlighter } = await import("./vendor/highlight.min.js");
  if (!highlighter.getLanguage(language)) return;
  const { value } = highlighter.highlight(text, { language, ignoreIllegals: true });
  code.replaceChildren(purify.sanitize(value, SAFE));
}

async function setFormula(span) {
  const tex = span.textContent;
  if (tex.length > MOST_TEX) return;
  const displayMode = span.classList.contains("display");
  await import("./vendor/katex.min.js");
  // MathML: the browser sets it, a screen reader reads it, and it needs no fonts and no styles.
  const options = { output: "mathml", displayMode, throwOnError: false, trust: false };
  globalThis.katex.render(tex, span, { ...options, maxExpand: 200, maxSize: 20 });
}
