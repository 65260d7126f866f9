// Stored conversations, search, and the way to the other places.
import { signal } from "@preact/signals";
import { useEffect, useState } from "preact/hooks";
import { dayOf, when } from "./format.js";
import { address, addressOf, newChat } from "./place.js";
import {
  conversation, conversations, features, moreConversations, olderConversations, pin, remove, rename, running, search,
} from "./store.js";
import { Dialog, Icon, IconButton } from "./widgets.jsx";

export const sidebarOpen = signal(false); // on narrow screens it lies over the rest
const words = signal("");
const found = signal(null);
const editing = signal(null);

function go(id, message) {
  location.hash = addressOf({ id, stored: true }, message);
  sidebarOpen.value = false;
}

function Place({ name, label, here }) {
  return (
    <a
      href={name === "chat" ? address.value : `#${name}`}
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
        <span class="title" dir="auto">{each.title || "Untitled"}</span>
        <span class="when">{running.value.has(each.id) || each.answering ? "answering…" : when(each.changed_s)}</span>
      </button>
      <IconButton
        icon="pin"
        label={`${each.pinned ? "Unpin" : "Pin"} ${each.title || "Untitled"}`}
        aria-pressed={each.pinned}
        onClick={() => pin(each.id, !each.pinned)}
      />
      <IconButton icon="edit" label={`Rename or delete ${each.title || "Untitled"}`} onClick={() => (editing.value = each)} />
    </li>
  );
}

// The conversations under the days of their last change; those that are pinned come first.
function Days() {
  const days = new Map();
  for (const each of conversations.value) {
    const day = each.pinned ? "Pinned" : dayOf(each.changed_s);
    days.set(day, [...(days.get(day) ?? []), each]);
  }
  return [...days].map(([day, entries]) => (
    <section key={day} aria-label={day}>
      <h2>{day}</h2>
      <ul>
        {entries.map((each) => (
          <Entry key={each.id} each={each} />
        ))}
      </ul>
    </section>
  ));
}

function Edit({ each }) {
  const [asked, setAsked] = useState(false);
  const close = () => (editing.value = null);
  function submit(event) {
    event.preventDefault();
    rename(each.id, new FormData(event.target).get("title"));
    close();
  }
  if (asked) {
    return (
      <Dialog key="ask" title="Delete this conversation?" onClose={close}>
        <p>“{each.title || "Untitled"}” and all its messages are deleted. This cannot be undone.</p>
        <div class="actions">
          <button type="button" onClick={close}>
            Keep it
          </button>
          <button
            type="button"
            class="danger"
            onClick={() => {
              remove(each.id);
              close();
            }}
          >
            Delete
          </button>
        </div>
      </Dialog>
    );
  }
  return (
    <Dialog key="edit" title="Conversation" onClose={close}>
      <form onSubmit={submit}>
        <label>
          Title
          <input name="title" maxlength="200" defaultValue={each.title} />
        </label>
        <div class="actions">
          <button type="button" class="danger" onClick={() => setAsked(true)}>
            Delete…
          </button>
          <button class="primary">Save</button>
        </div>
      </form>
    </Dialog>
  );
}

// Each conversation once, at its first hit.
function Found() {
  const hits = new Map();
  for (const each of found.value) hits.set(each.conversation, [...(hits.get(each.conversation) ?? []), each]);
  if (!hits.size) return <p class="empty">Nothing has all of these words.</p>;
  return (
    <ul class="entries" aria-label="Search results">
      {[...hits.values()].map(([first, ...others]) => (
        <li key={first.conversation}>
          <button type="button" class="entry tall" onClick={() => go(first.conversation, first.message)}>
            <span class="title">{first.title || "Untitled"}</span>
            <span class="excerpt">
              <Marked text={plain(first.excerpt)} />
            </span>
            {others.length > 0 && <span class="when">and {others.length} more here</span>}
          </button>
        </li>
      ))}
    </ul>
  );
}

// The text with the words of the search marked.
function Marked({ text }) {
  const asked = words.value.trim().split(/\s+/).map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  const pieces = text.split(new RegExp(`(${asked.join("|")})`, "gi")); // every second one is a match
  return pieces.map((piece, at) => (at % 2 ? <mark key={at}>{piece}</mark> : piece));
}

// Markdown without its marks.
function plain(text) {
  return text.replace(/!?\[([^\]]*)\]\([^)]*\)/g, "$1").replace(/[*_`~]+|^\s*(#+|>|[-+]|\d+\.)\s+/gm, "");
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
        setProblem(error.code === "offline" ? null : error.message); // the page says that
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
          newChat();
          sidebarOpen.value = false;
        }}
      >
        <Icon name="plus" /> New chat
      </button>
      {features.value.history ? (
        <>
          <input
            id="search"
            type="search"
            dir="auto"
            placeholder="Search all messages"
            aria-label="Search all messages"
            value={words.value}
            onInput={(event) => (words.value = event.target.value)}
          />
          {problem && <p class="empty">{problem}</p>}
          {found.value ? (
            <Found />
          ) : (
            <div class="entries">
              <Days />
              {moreConversations.value && (
                <button type="button" class="quiet more" onClick={olderConversations}>
                  Older conversations
                </button>
              )}
            </div>
          )}
        </>
      ) : (
        <p class="empty">This server keeps no history: conversations end with this tab.</p>
      )}
      {editing.value && <Edit each={editing.value} />}
    </aside>
  );
}
