// Conversations and settings, kept in this browser: nothing is stored on the server.

const memory = new Map(); // where the browser has no IndexedDB, as in some private windows
let opened;

function database() {
  opened ??= new Promise((resolve) => {
    const request = indexedDB.open("minisgl", 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("heads", { keyPath: "id" });
      request.result.createObjectStore("conversations", { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => resolve(null);
  }).catch(() => null);
  return opened;
}

/** Run `work` on both stores. Returns the result of the request that `work` returns. */
async function transact(mode, work) {
  const db = await database();
  return new Promise((resolve, reject) => {
    const transaction = db.transaction(["heads", "conversations"], mode);
    const request = work(transaction.objectStore("heads"), transaction.objectStore("conversations"));
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

/** Return {id, title, updated} of every conversation, the newest first. */
export async function list() {
  const heads = (await database())
    ? await transact("readonly", (heads) => heads.getAll())
    : [...memory.values()].map(({ head }) => head);
  return heads.sort((a, b) => b.updated - a.updated);
}

export async function load(id) {
  return (await database())
    ? transact("readonly", (_, bodies) => bodies.get(id))
    : structuredClone(memory.get(id)?.conversation);
}

/** title: shown in the list. Throws the browser's error if it has no more room. */
export async function save(conversation, title) {
  const head = { id: conversation.id, title, updated: conversation.updated };
  if (!(await database())) {
    memory.set(conversation.id, { head, conversation: structuredClone(conversation) });
    return;
  }
  await transact("readwrite", (heads, bodies) => {
    heads.put(head);
    bodies.put(conversation);
  });
}

export async function remove(id) {
  memory.delete(id);
  if (await database())
    await transact("readwrite", (heads, bodies) => {
      heads.delete(id);
      bodies.delete(id);
    });
}

export const DEFAULTS = {
  key: "",
  theme: "",
  system: "",
  n: 1,
  tokens: true,
  thinking: "",
  form: "",
  schema: '{\n  "type": "object",\n  "properties": {"answer": {"type": "string"}},\n  "required": ["answer"],\n  "additionalProperties": false\n}',
  toolList: "",
  toolChoice: "",
  sampling: {},
  compare: false,
  second: {},
};

export function loadSettings() {
  try {
    return { ...structuredClone(DEFAULTS), ...JSON.parse(localStorage.getItem("settings")) };
  } catch {
    return structuredClone(DEFAULTS);
  }
}

export function saveSettings(settings) {
  try {
    localStorage.setItem("settings", JSON.stringify(settings));
  } catch {
    // They last as long as this page.
  }
}
