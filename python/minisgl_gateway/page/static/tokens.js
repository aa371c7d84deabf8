// Shows the tokens of an answer: a token's shade is its probability; the pointer shows its alternatives.

import { h } from "./dom.js";

const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return share >= 99.95 ? "100 %" : share < 0.1 ? "< 0.1 %" : `${share.toFixed(1)} %`;
};
const visible = (token) => token.replace(/ /g, "␣").replace(/\n/g, "↵").replace(/\t/g, "⇥") || "(end)";

/** tokens: [text, logprob, [[text, logprob], ...]], in order. Arrow keys move between them. */
export function tokenView(tokens) {
  const card = h("div", { class: "token-card", role: "status", hidden: true });
  const spans = tokens.map(([text, logprob], index) => {
    const span = h("span", { class: "token", text: text.replace(/\n/g, "↵\n") || "∅" });
    span.dataset.index = index;
    span.style.setProperty("--doubt", String(1 - Math.exp(logprob)));
    return span;
  });
  const field = h(
    "div",
    {
      class: "tokens",
      tabindex: "0",
      role: "group",
      "aria-label": "Tokens. The arrow keys show the alternatives of each.",
      onpointerover: ({ target }) => target.dataset?.index && show(Number(target.dataset.index)),
      onpointerleave: hide,
      onblur: hide,
      onfocus: () => spans.length && show(Math.max(current, 0)),
      onkeydown: (event) => {
        const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (!step || !spans.length) return;
        event.preventDefault();
        show(Math.min(Math.max(current + step, 0), spans.length - 1));
      },
    },
    spans,
    card,
  );
  let current = -1;

  function hide() {
    card.hidden = true;
    spans[current]?.classList.remove("current");
  }

  function show(index) {
    hide();
    current = index;
    const [text, logprob, top = []] = tokens[index];
    spans[index].classList.add("current");
    const rows = [[text, logprob], ...top.filter(([other]) => other !== text)];
    card.replaceChildren(
      ...rows.map(([token, value], row) => {
        const share = h("i");
        share.style.width = `${100 * Math.exp(value)}%`;
        return h(
          "div",
          { class: row ? "row" : "row chosen" },
          h("code", { text: visible(token) }),
          h("span", { class: "share" }, share),
          h("span", { text: percent(value), title: `log-probability ${value.toFixed(4)}` }),
        );
      }),
    );
    card.hidden = false;
    const spot = spans[index].getBoundingClientRect();
    const frame = field.getBoundingClientRect();
    const left = Math.min(spot.left - frame.left, frame.width - card.offsetWidth);
    card.style.left = `${Math.max(left, 0)}px`;
    card.style.top = `${spot.bottom - frame.top + 6}px`;
  }

  return field;
}
