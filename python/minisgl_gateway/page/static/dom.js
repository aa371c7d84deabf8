// Makes elements without HTML strings, so that a model's text is never parsed as HTML here.

/** Return a new element. `props`: attributes, `on…` listeners, `class`, `text`. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  set(element, props);
  element.append(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

export function set(element, props) {
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "text") element.textContent = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value === false || value == null) element.removeAttribute(name);
    else element.setAttribute(name, value);
  }
}

export const $ = (id) => document.getElementById(id);

// Strokes on a grid of 24.
const ICONS = {
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h10v11H9zM15 9V5H5v11h4",
  check: "M5 13l4 4L19 7",
  retry: "M19.5 12a7.5 7.5 0 1 1-2.2-5.3L20 9M20 4v5h-5",
  edit: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  trash: "M5 7h14M9 7V4h6v3M7 7l1 13h8l1-13",
  settings: "M4 7h9M19 7h1M4 17h1M11 17h9M16 4.5v5M8 14.5v5",
  menu: "M4 6h16M4 12h16M4 18h16",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  tokens: "M4 6h5v5H4zM12 6h8v5h-8zM4 14h9v5H4zM16 14h4v5h-4z",
  close: "M6 6l12 12M18 6L6 18",
  pulse: "M3 12h4l3-7 4 14 3-7h4",
  picture: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15 9h.1",
};

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  svg.setAttribute("class", "icon");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** Return a button that shows an icon and is called `label`. */
export function iconButton(name, label, onclick, props = {}) {
  return h(
    "button",
    { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...props },
    icon(name),
  );
}

/** Say `text` to a screen reader. */
export function announce(text) {
  $("announcer").textContent = text;
}

/** Show a short message at the bottom; `action` is [label, function]. */
export function toast(text, action) {
  const close = () => element.remove();
  const element = h("div", { class: "toast" }, h("span", { text }));
  if (action) {
    const run = () => (close(), action[1]());
    element.append(h("button", { type: "button", text: action[0], onclick: run }));
  }
  $("toasts").replaceChildren(element);
  setTimeout(close, action ? 8000 : 4000);
}

export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    toast("The browser does not let this page copy: it needs https or localhost.");
    return;
  }
  button.replaceChildren(icon("check"));
  announce("Copied");
  setTimeout(() => button.replaceChildren(icon("copy")), 1200);
}

/** Let the browser save `text` as a file. */
export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
