// The page: starts its parts, and shows the list of conversations, the composer and the connection.

import { Chat } from "./chat.js";
import { isAlive, servedModel } from "./client.js";
import { $, announce, download, h, icon, iconButton, set, toast } from "./dom.js";
import { Tray, onFiles } from "./pictures.js";
import { activeOf, connectSettings, isBase, readsPictures, showModel } from "./settings.js";
import * as store from "./store.js";
import * as tree from "./tree.js";

const ASK_AGAIN_MS = 2000;
const FOLLOW_MS = 500;
const BUILTIN = ["Which models are supported?", "What is a radix cache?", "What is 12 + 30?", "Spell the word lamp."];
const ABOUT_BUILTIN =
  "The built-in model is small: it answers questions about this engine, adds, spells and counts, and knows nothing else.";
const TEXTS = ["Once upon a time", "A radix cache is", "The capital of France is"];
const SUGGESTIONS = ["Explain paged attention to a friend.", "Write a haiku about memory.", "What makes a good test?"];

const settings = store.loadSettings();
const chat = new Chat($("messages"), settings, {
  changed,
  lost,
  refused: askForKey,
  grown: () => ((grownAt = performance.now()), isAtEnd && scrollToEnd()),
});
let isAtEnd = true;
let grownAt = -Infinity; // when an answer grew last, in ms
let model = "";

// --- the connection ------------------------------------------------------------------------------

async function connect() {
  try {
    chat.model = await servedModel(settings.key);
    model = chat.model.id;
    showModel(chat.model);
    set($("banner"), { hidden: true });
    set($("key-note"), { hidden: true, class: "note" });
    if (!document.body.classList.contains("xray-open")) $("model").textContent = model;
    document.title = `${model} · Mini-SGLang`;
    showWelcome();
    changed();
  } catch (error) {
    if (error.status === 401 || error.status === 403) askForKey(error);
    else lost();
  }
}

/** Show the error of the API key beside its field. */
function askForKey(error) {
  openSettings("set-key");
  const isMissing = error.code === "invalid_api_key" && !settings.key;
  $("key-note").textContent = isMissing ? "This server needs an API key. Its operator gives you one." : error.message;
  set($("key-note"), { hidden: false, class: "note error" });
}

let isWaiting = false;

/** Say that the server does not answer, and when it does again. */
async function lost() {
  if (isWaiting) return;
  isWaiting = true;
  if (!(await isAlive())) {
    set($("banner"), { hidden: false });
    announce("The server does not answer");
    while (!(await isAlive())) await new Promise((resolve) => setTimeout(resolve, ASK_AGAIN_MS));
    toast("The server is back.");
    announce("The server is back");
  }
  isWaiting = false;
  await connect();
}

// --- conversations -------------------------------------------------------------------------------

async function showList() {
  const heads = await store.list();
  const current = chat.conversation.id;
  $("list").replaceChildren(
    ...heads.map((head) => {
      const item = h(
        "li",
        {},
        h("a", { href: `#${head.id}`, text: head.title, "aria-current": head.id === current && location.hash !== "#xray" ? "page" : null }),
        iconButton("edit", `Rename: ${head.title}`, () => rename(item, head)),
        iconButton("trash", `Delete: ${head.title}`, () => removeOne(head)),
      );
      return item;
    }),
  );
  set($("no-list"), { hidden: heads.length > 0 });
}

function rename(item, head) {
  const field = h("input", { type: "text", "aria-label": "Title", maxlength: "70" });
  field.value = head.title;
  const done = async () => {
    const live = chat.conversation.id === head.id ? chat.conversation : chat.runs.get(head.id)?.conversation;
    const conversation = live ?? (await store.load(head.id));
    if (conversation && field.value.trim()) {
      conversation.title = field.value.trim();
      await chat.save(conversation);
    }
    showList();
  };
  field.addEventListener("blur", done, { once: true });
  field.addEventListener("keydown", (event) => event.key === "Enter" && field.blur());
  item.replaceChildren(field);
  field.select();
}

async function removeOne(head) {
  await chat.stop(head.id); // else its answer would be kept behind the removal
  const conversation = await store.load(head.id);
  await store.remove(head.id);
  if (head.id === chat.conversation.id) startNew();
  await showList();
  toast("The conversation is deleted.", ["Undo", async () => (await chat.save(conversation), showList())]);
}

function startNew() {
  showXray(false);
  chat.open(tree.newConversation(settings.system));
  history.replaceState(null, "", "#");
  $("question").focus();
}

let xray = null;

async function showXray(isOpen) {
  document.body.classList.toggle("xray-open", isOpen);
  set($("xray-link"), { "aria-current": isOpen ? "page" : null });
  $("model").textContent = isOpen ? "X-ray" : model;
  if (isOpen) {
    const { XRay } = await import("./xray.js");
    xray ??= new XRay($("xray"), () => settings.key);
    xray.open();
  } else xray?.close();
}

async function route() {
  const id = location.hash.slice(1);
  await showXray(id === "xray");
  if (id === "xray") return (showList(), closeList());
  if (!id || id === chat.conversation.id) return showList();
  const conversation = await store.load(id);
  if (conversation) {
    chat.open(conversation);
    scrollToEnd();
    showList();
  } else startNew();
  closeList();
}

async function exportAll() {
  const heads = await store.list();
  const all = await Promise.all(heads.map(({ id }) => store.load(id)));
  download(`conversations-${new Date().toISOString().slice(0, 10)}.json`, tree.toExport(all));
}

async function importFile(file) {
  try {
    const found = tree.parseExport(await file.text());
    for (const conversation of found) await store.save(conversation, tree.titleOf(conversation));
    toast(found.length === 1 ? "One conversation is imported." : `${found.length} conversations are imported.`);
    showList();
  } catch (error) {
    toast(error.message);
  }
}

// --- the composer --------------------------------------------------------------------------------

const question = $("question");
const tray = new Tray(() => resize());
$("composer").prepend(tray.element);
onFiles($("add-pictures"), $("picture-files"), addPictures);

function resize() {
  question.style.height = "auto";
  question.style.height = `${Math.min(question.scrollHeight, innerHeight * 0.4)}px`;
  set($("send"), { disabled: !chat.isRunning && (tray.isReading || (!question.value.trim() && !tray.pictures.length)) });
}

async function submit() {
  if (chat.isRunning || tray.isReading) return;
  const text = question.value;
  const { pictures } = tray;
  if (!text.trim() && !pictures.length) return;
  question.value = "";
  tray.put([]);
  resize();
  isAtEnd = true;
  await connecting; // whether it is a base model
  const isFirst = chat.isEmpty;
  const answered = chat.send(text, pictures);
  if (isFirst) {
    history.replaceState(null, "", `#${chat.conversation.id}`);
    await chat.save(chat.conversation);
    showList();
  }
  await answered;
  showList();
}

/** Update the page after a change of the shown conversation or of running answers. */
function changed() {
  const { isRunning, isEmpty } = chat;
  set($("send"), { "aria-label": isRunning ? "Stop" : "Send", title: isRunning ? "Stop (Esc)" : "Send (Enter)" });
  $("send").replaceChildren(icon(isRunning ? "stop" : "send"));
  document.body.classList.toggle("empty", isEmpty);
  $("system").value = chat.conversation.system;
  const active = activeOf(settings, chat.conversation).join(" · ");
  set($("active"), { hidden: !active, text: active, "aria-label": `Settings: ${active}` });
  showMeter();
  resize();
}

/** Show how many tokens of the context the conversation takes. */
function showMeter() {
  const used = chat.usedTokens;
  const most = chat.model.context_length;
  const says = most && `${used.toLocaleString("en")} of ${most.toLocaleString("en")} tokens`;
  set($("meter"), {
    hidden: !used || !most, class: used > 0.9 * most ? "full" : "", title: `Context: ${says}`,
    "aria-valuemax": most, "aria-valuenow": used, "aria-valuetext": says,
  }); // prettier-ignore
  $("meter").querySelector(".says").textContent = says ?? "";
  $("meter").querySelector("i").style.width = `${Math.min(100, (100 * used) / most)}%`;
}

function showWelcome() {
  const isBuiltin = model === "minisgl-builtin";
  const base = isBase(chat.model);
  const writes = chat.model.capabilities?.includes("completion") ?? true;
  const texts = !writes ? [] : isBuiltin ? BUILTIN : base ? TEXTS : SUGGESTIONS;
  const does = base ? "is a base model: it goes on with your text." : "answers, on this server.";
  const about = writes ? does : "embeds texts or scores pairs, over HTTP. It writes no answers.";
  $("about").textContent = isBuiltin ? ABOUT_BUILTIN : `${model} ${about}`;
  $("invitation").textContent = base ? "How does your text begin?" : "What would you like to ask?";
  set($("add-pictures"), { hidden: !readsPictures(chat.model) });
  set(question, { placeholder: base ? "Text to go on with" : "Message" });
  $("suggestions").replaceChildren(
    ...texts.map((text) =>
      h("button", { type: "button", text, onclick: () => ((question.value = text), submit()) }),
    ),
  );
}

async function addPictures(files) {
  await connecting; // whether the model reads pictures
  if (!readsPictures(chat.model)) return toast(`${model || "This model"} reads text only. Paste what the file says instead.`);
  const problems = await tray.add(files);
  if (problems.length) toast([...new Set(problems)].slice(0, 3).join(" "));
  question.focus();
}

// --- the frame -----------------------------------------------------------------------------------

const view = $("view");

function scrollToEnd() {
  view.scrollTop = view.scrollHeight;
}

function openSettings(focus) {
  if (!$("settings").open) $("settings").showModal();
  if (focus) $(focus).focus();
}

/** Show the list over the page, where the screen has no room beside it. */
function showSidebar(isOpen) {
  document.body.classList.toggle("list-open", isOpen);
  set($("open-list"), { "aria-expanded": String(isOpen) });
  if (isOpen) $("new-chat").focus();
}

const closeList = () => showSidebar(false);

function showEnd() {
  isAtEnd = view.scrollHeight - view.scrollTop - view.clientHeight < 60;
  set($("to-end"), { hidden: isAtEnd });
}

view.addEventListener("scroll", showEnd);
// The last piece of an answer, and what appears below it, are laid out after the text is set.
new ResizeObserver(() => {
  if (isAtEnd && performance.now() - grownAt < FOLLOW_MS) scrollToEnd();
  showEnd();
}).observe($("messages"));
for (const [id, name] of Object.entries({
  "new-chat": "plus", "new-chat-2": "plus", "open-settings": "settings", "open-list": "menu",
  "close-settings": "close", "to-end": "down", "xray-link": "pulse", "add-pictures": "picture",
})) $(id).prepend(icon(name)); // prettier-ignore
$("new-chat").addEventListener("click", () => (startNew(), showList(), closeList()));
$("new-chat-2").addEventListener("click", () => (startNew(), showList()));
$("to-end").addEventListener("click", scrollToEnd);
$("open-settings").addEventListener("click", () => openSettings());
$("close-settings").addEventListener("click", () => $("settings").close());
$("settings").addEventListener("click", (event) => event.target === $("settings") && $("settings").close());
$("open-list").addEventListener("click", () => showSidebar(true));
$("active").addEventListener("click", () => openSettings());
$("reset").addEventListener("click", () => {
  Object.assign(settings, structuredClone(store.DEFAULTS), { key: settings.key, theme: settings.theme });
  chat.conversation.system = "";
  showSettings();
  settingsChanged();
});
$("shade").addEventListener("click", closeList);
$("export").addEventListener("click", exportAll);
$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", ({ target }) => {
  if (target.files[0]) importFile(target.files[0]);
  target.value = "";
});
$("system").addEventListener("change", ({ target }) => {
  chat.conversation.system = settings.system = target.value;
  settingsChanged();
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (chat.isRunning) chat.stop();
  else submit();
});
question.addEventListener("input", resize);
question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  } else if (event.key === "ArrowUp" && !question.value) {
    const last = tree.path(chat.conversation).findLast((node) => node.role === "user");
    if (last) (event.preventDefault(), chat.edit(last));
  }
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && document.body.classList.contains("list-open")) (closeList(), $("open-list").focus());
  else if (event.key === "Escape" && chat.isRunning) chat.stop();
  if (event.key.toLowerCase() === "o" && event.ctrlKey && event.shiftKey) {
    event.preventDefault();
    startNew();
    showList();
  }
});
addEventListener("hashchange", route);

function settingsChanged() {
  store.saveSettings(settings);
  if (!chat.isEmpty) chat.save(chat.conversation);
  changed();
}

const showSettings = connectSettings(settings, (name) => (settingsChanged(), name === "key" && connect()));
const connecting = connect();
if (location.hash.length > 1) await route();
else startNew();
showList();
