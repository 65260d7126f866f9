// The page: its parts, the theme, the keyboard.
import "katex/dist/katex.css";
import "./style.css";
import { signal } from "@preact/signals";
import { render } from "preact";
import { useEffect } from "preact/hooks";
import { needsKey, online, setKey } from "./api.js";
import { Chat } from "./chat.jsx";
import { Dashboard } from "./dashboard.jsx";
import { Models } from "./models.jsx";
import { settingsOpen } from "./settings.jsx";
import { Sidebar, sidebarOpen } from "./sidebar.jsx";
import { address, follow, newChat, place } from "./place.js";
import { busy, notice, said, start, stop } from "./store.js";
import { Dialog, Icon } from "./widgets.jsx";

const THEME = "mlxinfer.theme";
const HIDE = "mlxinfer:hide"; // where an app that shows the page learns that Esc is left over
const asked = new URLSearchParams(location.search);
export const compact = asked.has("compact");
const shell = asked.has("shell"); // the page is in a window of the menubar app
const theme = signal(localStorage.getItem(THEME) ?? "auto");
const helping = signal(false);

function applyTheme(value) {
  theme.value = value;
  localStorage.setItem(THEME, value);
  if (value === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = value;
}

const SHORTCUTS = [
  ["Enter", "send"],
  ["Shift + Enter", "new line"],
  ["Esc", "stop the answer, close what is open"],
  ["↑ in an empty field", "edit the last question"],
  ["Ctrl or ⌘ + K", "search"],
  ["Ctrl or ⌘ + Shift + O", "new chat"],
  ["Alt + 1, 2, 3", "chat, models, dashboard"],
  ["?", "this list"],
];

// Keys that an input method takes are not the page's: the Enter that confirms a Chinese word sends
// nothing. Safari says so by the key code alone, because its composition has ended before the key.
function ofInputMethod(event) {
  if (event.isComposing || event.keyCode === 229) event.stopImmediatePropagation();
}

addEventListener("keydown", ofInputMethod, { capture: true });
for (const type of ["dragover", "drop"]) addEventListener(type, (event) => event.preventDefault()); // else the browser opens the file
addEventListener("hashchange", () => (sidebarOpen.value = false)); // it would hide the place

function onKey(event) {
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
  const command = event.ctrlKey || event.metaKey;
  if (command && event.key.toLowerCase() === "k") {
    sidebarOpen.value = true;
    requestAnimationFrame(() => document.getElementById("search")?.focus());
  } else if (command && event.shiftKey && event.key.toLowerCase() === "o") {
    newChat();
    sidebarOpen.value = false;
  } else if (event.altKey && ["1", "2", "3"].includes(event.key)) {
    location.hash = [address.value, "models", "dashboard"][event.key - 1];
  } else if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (sidebarOpen.value) sidebarOpen.value = false;
    else if (settingsOpen.value) settingsOpen.value = false;
    else if (busy.value) stop();
    else if (shell) location.href = HIDE;
    else return;
  } else if (event.key === "?" && !typing) {
    helping.value = true;
  } else return;
  event.preventDefault();
}

function KeyDialog() {
  function submit(event) {
    event.preventDefault();
    setKey(new FormData(event.target).get("key").trim());
    start();
  }
  return (
    <Dialog title="API key" onClose={() => (needsKey.value = false)}>
      <form onSubmit={submit}>
        <label>
          This server answers only with a key. It stays in this browser.
          <input type="password" name="key" required autocomplete="current-password" autofocus />
        </label>
        <div class="actions">
          <button class="primary">Use this key</button>
        </div>
      </form>
    </Dialog>
  );
}

function Help() {
  return (
    <Dialog title="Keyboard" onClose={() => (helping.value = false)}>
      <dl class="keys">
        {SHORTCUTS.map(([keys, text]) => (
          <div key={keys}>
            <dt>
              <kbd>{keys}</kbd>
            </dt>
            <dd>{text}</dd>
          </div>
        ))}
      </dl>
    </Dialog>
  );
}

function Notice() {
  const { text, retry } = notice.value;
  return (
    <div class="notice" role="alert">
      <span>{text}</span>
      {retry && (
        <button
          type="button"
          class="quiet"
          onClick={() => {
            notice.value = null;
            retry();
          }}
        >
          Try again
        </button>
      )}
      <button type="button" class="quiet" aria-label="Dismiss" onClick={() => (notice.value = null)}>
        <Icon name="close" />
      </button>
    </div>
  );
}

function ThemeButton() {
  const next = { auto: "light", light: "dark", dark: "auto" }[theme.value];
  return (
    <button
      type="button"
      class="quiet"
      onClick={() => applyTheme(next)}
      aria-label={`Theme: ${theme.value}. Switch to ${next}`}
      title={`Theme: ${theme.value}`}
    >
      <Icon name={theme.value} />
    </button>
  );
}

function App() {
  useEffect(() => {
    addEventListener("keydown", onKey);
    start().then(follow);
    return () => removeEventListener("keydown", onKey);
  }, []);
  const here = place.value;
  return (
    <div class={`app${compact ? " compact" : ""}${sidebarOpen.value ? " open" : ""}`}>
      <a class="skip" href="#main" onClick={skip}>
        Skip to the content
      </a>
      <Sidebar place={here} theme={<ThemeButton />} help={() => (helping.value = true)} />
      <div class="scrim" onClick={() => (sidebarOpen.value = false)} />
      <main id="main" tabindex="-1">
        {!online.value && (
          <p class="offline" role="alert">
            The server does not answer. The page goes on by itself when it does.
          </p>
        )}
        {online.value && notice.value && <Notice />}
        {here === "chat" && <Chat compact={compact} />}
        {here === "models" && <Models />}
        {here === "dashboard" && <Dashboard />}
      </main>
      <div class="off-screen" role="status" aria-live="polite">
        {said.value}
      </div>
      {needsKey.value && <KeyDialog />}
      {helping.value && <Help />}
    </div>
  );
}

function skip(event) {
  event.preventDefault();
  (document.getElementById("question") ?? document.getElementById("main")).focus();
}

applyTheme(theme.value);
const root = document.getElementById("app");
root.replaceChildren();
render(<App />, root);
