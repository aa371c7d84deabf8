// Bounds what the page makes of a model's Markdown, so that no answer freezes the browser.
//
// What exceeds a bound is shown as plain text: nothing is left out. While an answer streams, its last
// block is made again in each frame, so the bounds of a block are tighter than those of an answer.

import { Lexer } from "./vendor/marked.esm.js";

const MOST_CHARS = 100_000; // of an answer: all of it is read in each frame
const MOST_BLOCKS = 1_000; // of an answer: each takes about a millisecond, once
const MOST_PARTS = 10_000; // of an answer: cells, items, words in bold, formulas, ...
const MOST_OF_BLOCK = 2_000; // parts of one block
const MOST_DEPTH = 20; // lists and quotes in each other: each reads its content again
const MOST_INLINE = 5_000; // characters of a paragraph: the time grows with their square
export const MOST_CODE = 20_000; // characters of code that is coloured
export const MOST_TEX = 2_000; // characters of a formula

const plain = (raw) => ({ type: "plain", raw });

class BoundedLexer extends Lexer {
  depth = 0;

  blockTokens(src, tokens = [], ...rest) {
    if (this.depth > MOST_DEPTH) {
      tokens.push(plain(src));
      return tokens;
    }
    this.depth += 1;
    try {
      return super.blockTokens(src, tokens, ...rest);
    } finally {
      this.depth -= 1;
    }
  }

  inlineTokens(src, tokens = []) {
    if (src.length <= MOST_INLINE) return super.inlineTokens(src, tokens);
    tokens.push({ type: "text", raw: src, text: src, escaped: false });
    return tokens;
  }
}

/** Return the number of parts of a token except plain words, or a number above `most`. */
function countParts(token, most) {
  let count = 1;
  const open = [token];
  while (open.length && count <= most) {
    const next = open.pop();
    const rows = next.type === "table" ? [next.header, ...next.rows] : [];
    for (const inner of [next.tokens ?? [], next.items ?? [], ...rows]) {
      for (const part of inner.slice(0, most + 1)) {
        count += part.type !== "text" || part.tokens ? 1 : 0;
        open.push(part);
      }
    }
  }
  return count;
}

/** Return the blocks of a text as Marked's tokens; those of type "plain" are shown as they are. */
export function lex(text, options) {
  const cut = text.length > MOST_CHARS ? text.lastIndexOf("\n", MOST_CHARS) + 1 || MOST_CHARS : text.length;
  const blocks = [];
  let rest = "";
  let left = MOST_PARTS;
  for (const token of new BoundedLexer(options).lex(text.slice(0, cut))) {
    if (rest || (token.type !== "space" && (blocks.length === MOST_BLOCKS || left < 0))) {
      rest += token.raw;
    } else if (token.type !== "space") {
      const count = countParts(token, MOST_OF_BLOCK);
      left -= count;
      blocks.push(count > MOST_OF_BLOCK ? plain(token.raw) : token);
    }
  }
  rest += text.slice(cut);
  if (rest.trim()) blocks.push(plain(rest));
  return blocks;
}
