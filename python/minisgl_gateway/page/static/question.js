// One message of the user, and the form in which a message is edited.

import { copy, h, iconButton } from "./dom.js";
import { Tray, thumbnails } from "./pictures.js";

/** Return the field of a message for its pictures, if there are any. */
export const given = (pictures) => (pictures.length ? { pictures } : {});

/** Show a message of the user. actions: {edit}, called with the node. */
export function questionView(node, actions) {
  const nav = h("span", { class: "nav" });
  const copyButton = iconButton("copy", "Copy this message", () => copy(node.content, copyButton));
  const element = h(
    "article",
    { class: "message question", "aria-label": "You", id: `m-${node.id}` },
    node.pictures && h("ul", { class: "pictures", "aria-label": "Pictures" }, thumbnails(node.pictures)),
    node.content.trim() && h("div", { class: "bubble", text: node.content }),
    h("div", { class: "actions" }, nav, copyButton, iconButton("edit", "Edit this message", () => actions.edit(node))),
  );
  return { element, nav, update() {} };
}

/** A form that edits a message. done: called once, with the changed fields, or with null if nothing is changed. */
export function editForm(node, done) {
  const before = node.pictures ?? [];
  const tray = new Tray(() => {}, before);
  const field = h("textarea", { "aria-label": "Edited message", rows: "3" });
  field.value = node.content;
  const finish = () => {
    const content = field.value;
    const { pictures } = tray;
    const isEmpty = !content.trim() && !pictures.length;
    const isSame = content === node.content && pictures.length === before.length;
    done(isEmpty || isSame ? null : { content, ...given(pictures) });
  };
  return h(
    "form",
    {
      class: "editor",
      onsubmit: (event) => (event.preventDefault(), finish()),
      onkeydown: (event) => {
        if (event.key === "Escape") done(null);
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) finish();
      },
    },
    tray.element,
    field,
    h("button", { type: "button", text: "Cancel", onclick: () => done(null) }),
    h("button", { type: "submit", class: "primary", text: node.role === "user" ? "Send" : "Save" }),
  );
}
