// Where one is, as the address says it: #chat/ID a stored chat, #chat/ID/MESSAGE a branch of it,
// #models, #dashboard, #new, and nothing for a chat that has not begun.
import { computed, effect, signal } from "@preact/signals";
import { conversation, open, startNew } from "./store.js";

const PLACES = ["models", "dashboard"];

export const place = signal(placeOf(location.hash));
export const address = computed(() => addressOf(conversation.value));

function placeOf(hash) {
  const name = hash.slice(1);
  return PLACES.includes(name) ? name : "chat";
}

export function addressOf({ id, stored }, message) {
  if (!stored) return "#";
  return message ? `#chat/${id}/${message}` : `#chat/${id}`;
}

// Shows what the address names: after a click, Back, Forward, and a reload.
export async function follow() {
  const { hash } = location;
  place.value = placeOf(hash);
  if (place.value !== "chat") return;
  const [, id, message] = /^#chat\/([\w-]{8,64})(?:\/([\w-]{8,64}))?$/.exec(hash) ?? [];
  if (id) {
    const other = id !== conversation.value.id || message;
    if (other && !(await open(id, message)) && location.hash === hash) rename("#");
  } else {
    if (conversation.value.stored || hash === "#new") startNew();
    if (hash) rename("#");
  }
}

// Gives the place that is shown another address. Back does not lead to the old one.
function rename(hash) {
  history.replaceState(null, "", location.pathname + location.search + (hash === "#" ? "" : hash));
}

// Shows it at once, where a new hash would be told of later: what is typed in between would go to the old chat.
export function newChat() {
  if (location.hash) history.pushState(null, "", location.pathname + location.search); // Back leads to the old chat
  place.value = "chat";
  startNew();
  document.getElementById("question")?.focus();
}

// A chat gets its address with its first question, and loses it when it is deleted.
let before = address.value;
effect(() => {
  const now = address.value;
  if (now !== before && place.peek() === "chat" && (now === "#" || !location.hash.startsWith(now))) rename(now);
  before = now;
});
effect(() => {
  const { title } = conversation.value;
  document.title = title ? `${title} · mlxinfer` : "mlxinfer";
});

addEventListener("hashchange", follow);
