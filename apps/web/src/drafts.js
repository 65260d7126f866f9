// What is typed and attached but not sent, of each conversation. It stays over a reload.
import { signal } from "@preact/signals";

const PLACE = "mlxinfer.draft.";
const NEW = "new"; // every tab has its own draft of a new chat
const SAVE_MS = 300; // after the last change
const NONE = { text: "", attached: [] };

const drafts = signal(new Map());
const changed = new Set();
let saving = 0;

const keyOf = ({ id, stored }) => (stored ? id : NEW);
const storageOf = (key) => (key === NEW ? sessionStorage : localStorage);

// { text, attached }: files with name and text, and pictures with name and URL.
export function draftOf(conversation) {
  const key = keyOf(conversation);
  return drafts.value.get(key) ?? load(key);
}

function load(key) {
  try {
    return { ...NONE, ...JSON.parse(storageOf(key).getItem(PLACE + key)) };
  } catch {
    return NONE;
  }
}

export function changeDraft(conversation, change) {
  const key = keyOf(conversation);
  drafts.value = new Map(drafts.value).set(key, { ...draftOf(conversation), ...change });
  changed.add(key);
  clearTimeout(saving);
  saving = setTimeout(save, SAVE_MS);
}

export function forgetDraft(conversation) {
  changeDraft(conversation, NONE);
}

function save() {
  for (const key of changed) {
    const draft = drafts.value.get(key);
    const storage = storageOf(key);
    storage.removeItem(PLACE + key);
    if (!draft.text && !draft.attached.length) continue;
    for (const kept of [draft, { text: draft.text }]) {
      try {
        storage.setItem(PLACE + key, JSON.stringify(kept));
        break;
      } catch {
        // there is no room for the files
      }
    }
  }
  changed.clear();
}

addEventListener("pagehide", save);
