// Stored conversations, search, and the way to the other places.
import { signal } from "@preact/signals";
import { useEffect, useState } from "preact/hooks";
import { when } from "./format.js";
import {
  conversation, conversations, features, moreConversations, olderConversations, open, remove, rename,
  running, search, startNew,
} from "./store.js";
import { Dialog, Icon, IconButton } from "./widgets.jsx";

export const sidebarOpen = signal(false); // on narrow screens it lies over the rest
const words = signal("");
const found = signal(null);
const editing = signal(null);

function go(id, message) {
  open(id, message);
  location.hash = "";
  sidebarOpen.value = false;
}

function Place({ name, label, here }) {
  return (
    <a
      href={`#${name === "chat" ? "" : name}`}
      aria-current={here === name ? "page" : undefined}
      onClick={() => (sidebarOpen.value = false)}
    >
      <Icon name={name} />
      {label}
    </a>
  );
}

function Entry({ each }) {
  const current = each.id === conversation.value.id;
  return (
    <li class={current ? "current" : ""}>
      <button type="button" class="entry" aria-current={current ? "true" : undefined} onClick={() => go(each.id)}>
        <span class="title">{each.title || "Untitled"}</span>
        <span class="when">{running.value.has(each.id) ? "answering…" : when(each.changed_s)}</span>
      </button>
      <IconButton icon="edit" label={`Rename or delete ${each.title || "Untitled"}`} onClick={() => (editing.value = each)} />
    </li>
  );
}

function Edit({ each }) {
  const close = () => (editing.value = null);
  function submit(event) {
    event.preventDefault();
    rename(each.id, new FormData(event.target).get("title"));
    close();
  }
  return (
    <Dialog title="Conversation" onClose={close}>
      <form onSubmit={submit}>
        <label>
          Title
          <input name="title" maxlength="200" defaultValue={each.title} />
        </label>
        <div class="actions">
          <button
            type="button"
            class="danger"
            onClick={() => {
              remove(each.id);
              close();
            }}
          >
            Delete for good
          </button>
          <button class="primary">Save</button>
        </div>
      </form>
    </Dialog>
  );
}

function Found() {
  if (!found.value.length) return <p class="empty">Nothing has all of these words.</p>;
  return (
    <ul class="entries" aria-label="Search results">
      {found.value.map((each) => (
        <li key={each.message}>
          <button type="button" class="entry tall" onClick={() => go(each.conversation, each.message)}>
            <span class="title">{each.title || "Untitled"}</span>
            <span class="excerpt">{each.excerpt}</span>
          </button>
        </li>
      ))}
    </ul>
  );
}

export function Sidebar({ place, theme, help }) {
  const [problem, setProblem] = useState(null);
  const text = words.value.trim();
  useEffect(() => {
    if (!text) {
      found.value = null;
      return undefined;
    }
    const timer = setTimeout(async () => {
      try {
        found.value = await search(text);
        setProblem(null);
      } catch (error) {
        setProblem(error.message);
      }
    }, 150);
    return () => clearTimeout(timer);
  }, [text]);
  return (
    <aside aria-label="Conversations">
      <div class="brand">
        <strong>mlxinfer</strong>
        <span>
          <IconButton icon="help" label="Keyboard shortcuts" onClick={help} />
          {theme}
        </span>
      </div>
      <nav aria-label="Places">
        <Place name="chat" label="Chat" here={place} />
        {features.value.admin && <Place name="models" label="Models" here={place} />}
        {features.value.admin && <Place name="dashboard" label="Dashboard" here={place} />}
      </nav>
      <button
        type="button"
        class="new"
        onClick={() => {
          startNew();
          location.hash = "";
          sidebarOpen.value = false;
          document.getElementById("question")?.focus();
        }}
      >
        <Icon name="plus" /> New chat
      </button>
      {features.value.history ? (
        <>
          <input
            id="search"
            type="search"
            placeholder="Search all messages"
            aria-label="Search all messages"
            value={words.value}
            onInput={(event) => (words.value = event.target.value)}
          />
          {problem && <p class="empty">{problem}</p>}
          {found.value ? (
            <Found />
          ) : (
            <ul class="entries" aria-label="Conversations">
              {conversations.value.map((each) => (
                <Entry key={each.id} each={each} />
              ))}
              {moreConversations.value && (
                <li>
                  <button type="button" class="quiet more" onClick={olderConversations}>
                    Older conversations
                  </button>
                </li>
              )}
            </ul>
          )}
        </>
      ) : (
        <p class="empty">This server keeps no history: conversations end with this tab.</p>
      )}
      {editing.value && <Edit each={editing.value} />}
    </aside>
  );
}
