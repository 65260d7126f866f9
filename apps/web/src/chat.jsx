// A conversation: its head line, its messages, and the field for the next one.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { Composer } from "./composer.jsx";
import { asCurl, asJson, asMarkdown, asText, copy, save } from "./format.js";
import { Message } from "./message.jsx";
import { newChat } from "./place.js";
import { Suggestions } from "./suggestions.jsx";
import { Settings, settingsOpen } from "./settings.jsx";
import { sidebarOpen } from "./sidebar.jsx";
import {
  arrived, ask, branch, busy, chooseModel, conversation, features, model, models, notice, regenerate,
  tools,
} from "./store.js";
import { requestOf } from "./tree.js";
import { IconButton } from "./widgets.jsx";

const SHOWN = 40; // messages that are drawn at first; long conversations show the end
const NEAR_PX = 80; // from the end: then the view follows what arrives

export function Chat({ compact }) {
  const [editing, setEditing] = useState(null);
  const setting = settingsOpen.value;
  return (
    <section class={`chat${setting ? " setting" : ""}`} aria-label="Chat">
      <Head compact={compact} />
      {setting && <Settings key={conversation.value.id} />}
      <Messages editing={editing} edit={setEditing} />
      <Composer edit={setEditing} />
    </section>
  );
}

function Head({ compact }) {
  const { title } = conversation.value;
  const setting = settingsOpen.value;
  const chosen = models.value.find(({ id }) => id === model.value);
  const width = `min(${(chosen ? optionText(chosen) : model.value).length + 7}ch, 100%)`;
  return (
    <header class="head">
      <IconButton icon="menu" label="Conversations" class="quiet narrow" onClick={() => (sidebarOpen.value = true)} />
      <select
        class="model"
        aria-label="Model"
        style={{ width }}
        value={model.value}
        onChange={(event) => chooseModel(event.target.value)}
        disabled={!models.value.length}
      >
        {models.value.map((each) => (
          <option key={each.id} value={each.id}>
            {optionText(each)}
          </option>
        ))}
      </select>
      <h1 class="title" dir="auto">{title || "New chat"}</h1>
      <Export />
      <IconButton
        icon="settings"
        label="Settings of this conversation"
        aria-expanded={setting}
        onClick={() => (settingsOpen.value = !setting)}
      />
      {compact && <IconButton icon="plus" label="New chat" onClick={newChat} />}
    </header>
  );
}

function optionText({ id, state }) {
  return state === "loaded" ? id : `${id} (${state})`;
}

function Export() {
  const [done, setDone] = useState("");
  async function write(kind) {
    const shown = branch.value;
    try {
      if (kind === "file-markdown") save(conversation.value, "md", "text/markdown", asMarkdown(conversation.value, shown));
      else if (kind === "file-json") save(conversation.value, "json", "application/json", asJson(conversation.value));
      else if (kind === "markdown") await copy(asMarkdown(conversation.value, shown));
      else if (kind === "text") await copy(asText(shown));
      else await copy(asCurl(requestOf(model.value, conversation.value.settings, questions(shown), tools.value.data)));
    } catch (error) {
      notice.value = { text: error.message };
      return;
    }
    setDone(kind.startsWith("file") ? "Saved" : "Copied");
    setTimeout(() => setDone(""), 1500);
  }
  return (
    <select
      class="export"
      aria-label="Copy or save the conversation"
      value=""
      disabled={!branch.value.length}
      onChange={(event) => {
        write(event.target.value);
        event.target.value = "";
      }}
    >
      <option value="" disabled hidden>
        {done || "Copy"}
      </option>
      <option value="markdown">as Markdown</option>
      <option value="text">as text</option>
      <option value="curl">as cURL</option>
      <option value="file-markdown">to a file, Markdown</option>
      <option value="file-json">to a file, JSON</option>
    </select>
  );
}

// Up to the last question: what was sent for the last answer.
function questions(shown) {
  const last = shown.findLastIndex((message) => message.role !== "assistant");
  return shown.slice(0, last + 1);
}

function Messages({ editing, edit }) {
  const place = useRef();
  const follows = useRef(branch.value.length > 0); // an empty chat is read from its top
  const [shown, setShown] = useState(SHOWN);
  const { id } = conversation.value;
  const all = branch.value;
  const answering = busy.value?.message.id;
  useLayoutEffect(() => {
    setShown(SHOWN);
    follows.current = all.length > 0;
  }, [id]);
  useLayoutEffect(() => {
    if (answering) follows.current = true;
  }, [answering]);
  useLayoutEffect(() => {
    if (follows.current) place.current.scrollTop = place.current.scrollHeight;
  });
  useEffect(() => {
    const grown = new ResizeObserver(() => {
      if (follows.current && place.current) place.current.scrollTop = place.current.scrollHeight;
    });
    grown.observe(place.current.firstElementChild);
    grown.observe(place.current); // it shrinks where the composer grows
    return () => grown.disconnect();
  }, []);
  function onScroll() {
    const { scrollTop, scrollHeight, clientHeight } = place.current;
    follows.current = scrollHeight - scrollTop - clientHeight < NEAR_PX;
  }
  const hidden = Math.max(all.length - shown, 0);
  return (
    <div class="messages" ref={place} onScroll={onScroll} tabindex="0" role="region" aria-label="Messages">
      <div class="column">
        {hidden > 0 && (
          <button
            type="button"
            class="quiet more"
            onClick={() => {
              follows.current = false;
              setShown(shown + 4 * SHOWN);
            }}
          >
            Show {Math.min(hidden, 4 * SHOWN)} of {hidden} earlier messages
          </button>
        )}
        {!all.length && <Welcome />}
        {all.slice(hidden).map((message) => (
          <Message
            key={message.id}
            message={message}
            version={busy.value?.message === message ? arrived.value : -1}
            arriving={answering === message.id}
            editing={editing === message.id}
            edit={edit}
            again={() => regenerate(message)}
          />
        ))}
      </div>
    </div>
  );
}

// Questions to begin with. The bundled models answer theirs.
const PROMPTS = [
  "Explain black holes to a ten-year-old.",
  "Write a polite email that moves a meeting to Friday.",
  "Plan a weekend in Lisbon.",
  "What can you help me with?",
];
const DEMO_PROMPTS = ["What is a KV cache?", "How do I get a bigger model?", "Write a haiku.", "What is 17 + 25?"];

function Welcome() {
  const name = model.value;
  const demo = name === "demo";
  return (
    <div class="welcome">
      <h2>What would you like to know?</h2>
      <p>
        {name ? <b>{name}</b> : "A model"} answers on this server; nothing is sent elsewhere.
      </p>
      {name && name !== "demo-vision" && (
        <ul class="prompts" aria-label="Questions to begin with">
          {(demo ? DEMO_PROMPTS : PROMPTS).map((text) => (
            <li key={text}>
              <button type="button" onClick={() => ask(text, {})}>
                {text}
              </button>
            </li>
          ))}
        </ul>
      )}
      {demo && <RealModels />}
    </div>
  );
}

function RealModels() {
  if (!features.value.hub) return <p>This is a small demo.</p>;
  return (
    <section class="real">
      <h3>This is a small demo. Get a real model</h3>
      <Suggestions most={3} tells={false} />
    </section>
  );
}
