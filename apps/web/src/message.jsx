// One message: its text as markdown, thoughts, tool calls, facts, and what can be done with it.
import { memo } from "preact/compat";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { asCurl, bytes, copy, leftText, number, rateOf, rateText, seconds } from "./format.js";
import { blocksOf, drawFormulas, MAX_CHARS } from "./markdown.js";
import {
  ask, branch, busy, canRun, children, conversation, goOn, notice, resend, rewrite, runCall, sendResults, show, tools,
} from "./store.js";
import { branchOf, requestOf } from "./tree.js";
import { Dialog, Icon, IconButton } from "./widgets.jsx";

const FOLDED = 5; // lines of a tool's result that are shown at once
const WHO = { user: "You", assistant: "Assistant", tool: "Tool result" };

export function Message({ message, version, arriving, editing, edit, again }) {
  const { role } = message;
  return (
    <article class={`message ${role}`} aria-label={WHO[role]} aria-busy={arriving ? "true" : undefined}>
      {role === "user" ? (
        <User message={message} editing={editing} edit={edit} />
      ) : role === "tool" ? (
        <Result message={message} editing={editing} edit={edit} />
      ) : (
        <Answer message={message} version={version} arriving={arriving} again={again} editing={editing} edit={edit} />
      )}
    </article>
  );
}

function User({ message, editing, edit }) {
  const { attachments = [], pictures = [] } = message.details;
  if (editing) {
    const save = (text) => ask(text, message.details, message.parent);
    return <Edit message={message} label="Edit the question" done="Ask anew" save={save} close={() => edit(null)} />;
  }
  return (
    <>
      <div class="bubble">
        {attachments.map(({ name, text }) => (
          <span key={name} class="file">
            <Icon name="attach" /> {name} <small>{number(text.length)} characters</small>
          </span>
        ))}
        {pictures.length > 0 && <Pictures pictures={pictures} />}
        <Plain text={message.content} />
      </div>
      <div class="tools">
        <Versions message={message} />
        <CopyButton text={() => message.content} label="Copy this question" />
        <IconButton icon="edit" label="Edit this question" disabled={!!busy.value} onClick={() => edit(message.id)} />
      </div>
    </>
  );
}

// Small pictures; a click shows one as large as the window. The oldest in the history are not kept.
function Pictures({ pictures }) {
  const [open, setOpen] = useState(null);
  return (
    <>
      <ul class="pictures" aria-label="Pictures">
        {pictures.map(({ name, url }, at) => (
          <li key={at}>
            {url ? (
              <button type="button" class="quiet" title={name} onClick={() => setOpen(pictures[at])}>
                <img src={url} alt={`Picture ${name}`} />
              </button>
            ) : (
              <span class="file">
                {name} <small>is no longer kept, and not sent</small>
              </span>
            )}
          </li>
        ))}
      </ul>
      {open && (
        <Dialog title={open.name} class="large" onClose={() => setOpen(null)}>
          <img src={open.url} alt={`Picture ${open.name}`} />
        </Dialog>
      )}
    </>
  );
}

function Result({ message, editing, edit }) {
  if (editing) {
    const save = (text) => resend(message, text);
    return <Edit message={message} label="Edit the result" done="Send it" save={save} close={() => edit(null)} />;
  }
  return (
    <>
      <Folded text={message.content} />
      <div class="tools">
        <Versions message={message} />
        <IconButton icon="edit" label="Edit this result" disabled={!!busy.value} onClick={() => edit(message.id)} />
      </div>
    </>
  );
}

// A result of a tool: its first lines, and all of it when one asks.
function Folded({ text }) {
  const lines = text.split("\n");
  if (lines.length <= FOLDED) return <pre class="tool-result">{text}</pre>;
  return (
    <details class="tool-result">
      <summary>
        {lines[0]} <small>and {lines.length - 1} more lines</small>
      </summary>
      <pre>{text}</pre>
    </details>
  );
}

function Edit({ message, label, done, save, close }) {
  const field = useRef();
  // Before it is drawn: later, the caret would move under what is typed already.
  useLayoutEffect(() => {
    field.current.focus();
    field.current.setSelectionRange(field.current.value.length, field.current.value.length);
  }, []);
  function submit(event) {
    event?.preventDefault();
    const text = field.current.value.trim();
    if (!text && !message.details.pictures) return;
    close();
    save(text);
  }
  function onKeyDown(event) {
    if (event.key === "Enter" && !event.shiftKey) submit(event);
    if (event.key === "Escape") {
      event.stopPropagation();
      close();
    }
  }
  return (
    <form class="edit" onSubmit={submit}>
      <textarea ref={field} dir="auto" aria-label={label} defaultValue={message.content} onKeyDown={onKeyDown} />
      <div class="actions">
        <button type="button" onClick={close}>
          Cancel
        </button>
        <button class="primary">{done}</button>
      </div>
    </form>
  );
}

function Answer({ message, version, arriving, again, editing, edit }) {
  const { content, reasoning, details } = message;
  if (editing) {
    const save = (text) => rewrite(message, text);
    return <Edit message={message} label="Edit the answer" done="Keep it" save={save} close={() => edit(null)} />;
  }
  const calls = (details.tool_calls ?? []).filter(Boolean);
  return (
    <>
      {reasoning && <Thoughts message={message} version={version} arriving={arriving && !content && !calls.length} />}
      <Markdown text={content} arriving={arriving} />
      {calls.map((call) => (
        <Call key={call.id} call={call} />
      ))}
      {calls.length > 0 && !arriving && conversation.value.head === message.id && (
        <Results message={message} calls={calls} />
      )}
      {arriving && !content && !reasoning && !calls.length && <Waiting message={message} />}
      {details.error && (
        <p class="error" role="alert">
          {details.error}{" "}
          <button type="button" class="quiet" onClick={again}>
            Try again
          </button>
        </p>
      )}
      {!arriving && <Foot message={message} again={again} edit={edit} />}
    </>
  );
}

// What an answer waits for before its first word.
function Waiting({ message: { waiting, details } }) {
  return <p class="waiting">{waitingText(waiting, details)}</p>;
}

function loadingText(model, { loaded_bytes, total_bytes }) {
  if (!total_bytes) return `loading ${model}…`;
  return `loading ${model}: ${Math.floor((100 * loaded_bytes) / total_bytes)} % of ${bytes(total_bytes)}`;
}

function waitingText(waiting, { model }) {
  if (waiting?.for === "model") return loadingText(model, waiting);
  if (waiting?.for !== "prompt") return "waiting for its turn…";
  const { total, processed, cache, time_ms } = waiting;
  const left = processed > cache ? (time_ms * (total - processed)) / (processed - cache) / 1000 : 0;
  const share = Math.floor((100 * processed) / total);
  return `reading ${number(total)} tokens: ${share} %${leftText(left)}`;
}

// Under an answer: copy, redo, one figure. The rest is behind the last button.
function Foot({ message, again, edit }) {
  const [open, setOpen] = useState(false);
  const [kind, figure] = figureOf(message.details);
  return (
    <>
      <div class="tools">
        <Versions message={message} />
        <CopyButton text={() => message.content} label="Copy this answer" />
        <IconButton icon="again" label="Another answer" disabled={!!busy.value} onClick={again} />
        {canGoOn(message) && (
          <button type="button" disabled={!!busy.value} onClick={() => goOn(message)}>
            Continue
          </button>
        )}
        {figure && <span class={`figure ${kind}`}>{figure}</span>}
        <IconButton icon="info" label="About this answer" aria-expanded={open} onClick={() => setOpen(!open)} />
      </div>
      {open && (
        <div class="about">
          <Facts details={message.details} />
          <div class="tools">
            <IconButton icon="edit" label="Edit this answer" disabled={!!busy.value} onClick={() => edit(message.id)} />
            <CurlButton message={message} />
          </div>
        </div>
      )}
    </>
  );
}

function Thoughts({ message, arriving }) {
  const { thought_ms } = message.details;
  const [open, setOpen] = useState(false);
  return (
    <details class="thoughts" open={open} onToggle={(event) => setOpen(event.target.open)}>
      <summary>{arriving ? `Thinking… ${seconds((thought_ms ?? 0) / 1000)}` : `Thought for ${seconds(thought_ms / 1000)}`}</summary>
      {open && <Markdown text={message.reasoning} arriving={arriving} />}
    </details>
  );
}

function Call({ call }) {
  return (
    <details class="call" open>
      <summary>
        Calls <code>{call.name}</code>
      </summary>
      <pre tabindex="0">{indented(call.arguments)}</pre>
    </details>
  );
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

// The server runs tools of MCP servers, when one says so; of others one types what they gave back.
function Results({ message, calls }) {
  const [given, setGiven] = useState({});
  const set = (id, text) => setGiven((before) => ({ ...before, [id]: text }));
  async function run(call) {
    try {
      set(call.id, (await runCall(call, { consent: true })).text);
    } catch (error) {
      notice.value = { text: error.message };
    }
  }
  function submit(event) {
    event.preventDefault();
    sendResults(message, calls.map(({ id }) => ({ id, text: given[id] ?? "" })));
  }
  return (
    <form class="results" onSubmit={submit}>
      {calls.map((call) => (
        <div key={call.id}>
          <label>
            Result of {call.name}
            <textarea rows="2" value={given[call.id] ?? ""} onInput={(event) => set(call.id, event.target.value)} />
          </label>
          {canRun(call) && (
            <button type="button" onClick={() => run(call)}>
              Run {call.name}
            </button>
          )}
        </div>
      ))}
      <div class="actions">
        <button class="primary">Send results</button>
      </div>
    </form>
  );
}

const FORMS = { schema: "holds to the schema", json: "is JSON", regex: "matches the pattern", choice: "is one of the choices" };

// An answer of text that was cut off, at the end of the conversation.
function canGoOn({ id, content, details }) {
  const cut = details.grows || details.error || ["length", "stopped"].includes(details.finish);
  return cut && content && !details.form && !details.tool_calls && conversation.value.head === id;
}

// [kind, text]: how the answer ended if it did not end by itself, else how fast it was.
function figureOf(details) {
  const { finish, form, edited, grows } = details;
  if (grows) return ["bad", "cut off when the server ended"];
  if (form && finish === "length") return ["bad", "cut off before the form was complete"];
  if (finish === "length") return ["bad", "cut off at the token limit"];
  if (finish === "stopped") return ["", "stopped"];
  if (edited) return ["", "edited by you"];
  const rate = rateOf(details);
  return ["", rate && rateText(rate)];
}

function Facts({ details }) {
  const { usage, times, finish, form } = details;
  const facts = [];
  if (form && finish === "stop") facts.push(["good", `${FORMS[form]}: guaranteed`]);
  if (usage) {
    if (usage.cached) facts.push(["good", `${number(usage.cached)} of ${number(usage.prompt)} prompt tokens from the cache`]);
    else facts.push(["", `${number(usage.prompt)} prompt tokens`]);
    facts.push(["", `${number(usage.answer)} tokens`]);
  }
  if (times) facts.push(["", `first after ${seconds(times.first_ms / 1000)}`]);
  return (
    <ul class="facts" aria-label="Facts about this answer">
      {details.model && <li>{details.model}</li>}
      {facts.map(([kind, text]) => (
        <li key={text} class={kind}>
          {text}
        </li>
      ))}
    </ul>
  );
}

// Other questions or answers in this place.
function Versions({ message }) {
  const all = children.value.get(message.parent) ?? [message];
  if (all.length < 2) return null;
  const at = all.findIndex((each) => each.id === message.id);
  return (
    <span class="versions">
      <IconButton icon="left" label="Previous version" disabled={at === 0} onClick={() => show(all[at - 1])} />
      <span aria-label={`Version ${at + 1} of ${all.length}`}>
        {at + 1}/{all.length}
      </span>
      <IconButton icon="right" label="Next version" disabled={at === all.length - 1} onClick={() => show(all[at + 1])} />
    </span>
  );
}

function CopyButton({ text, label }) {
  const [done, setDone] = useState(false);
  async function onClick() {
    await copy(text());
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  }
  return (
    <button type="button" class="quiet" aria-label={label} title={label} onClick={onClick}>
      {done ? "Copied" : <Icon name="copy" />}
    </button>
  );
}

function CurlButton({ message }) {
  const [done, setDone] = useState(false);
  async function onClick() {
    const { messages, settings } = conversation.value;
    try {
      await copy(asCurl(requestOf(message.details.model, settings, branchOf(messages, message.parent), tools.value.data)));
    } catch (error) {
      notice.value = { text: error.message };
      return;
    }
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  }
  return (
    <button type="button" class="quiet" title="Copy the request as cURL" onClick={onClick}>
      {done ? "Copied" : "cURL"}
    </button>
  );
}

// -- text -------------------------------------------------------------------------------------------

function Plain({ text }) {
  const [whole, setWhole] = useState(false);
  const clipped = !whole && text.length > MAX_CHARS;
  return (
    <div class="plain" dir="auto">
      {clipped ? text.slice(0, MAX_CHARS) : text}
      {clipped && (
        <button type="button" class="quiet more" onClick={() => setWhole(true)}>
          Show all {number(text.length)} characters
        </button>
      )}
    </div>
  );
}

// A text that arrives is drawn a few times a second, and less often when drawing takes long.
function Markdown({ text, arriving }) {
  const { current: drawn } = useRef({ text: null, blocks: [], at: 0, took: 0, timer: 0 });
  const [, redraw] = useState(0);
  const wait = Math.max(30, 4 * drawn.took);
  const now = performance.now();
  const long = text.length > MAX_CHARS;
  if (!long && drawn.text !== text && (!arriving || now - drawn.at >= wait)) {
    drawn.blocks = blocksOf(text);
    drawn.took = performance.now() - now;
    drawn.at = now;
    drawn.text = text;
  }
  useEffect(() => {
    if (long || drawn.text === text || drawn.timer) return;
    drawn.timer = setTimeout(() => {
      drawn.timer = 0;
      redraw((n) => n + 1);
    }, wait);
  });
  useEffect(() => () => clearTimeout(drawn.timer), []);
  if (long) return <Plain text={text} />;
  return (
    <div class="markdown" onClick={onCopyCode}>
      {drawn.blocks.map((block, at) => (
        <Block key={at} block={block} />
      ))}
    </div>
  );
}

const Block = memo(
  function Block({ block }) {
    const place = useRef();
    useLayoutEffect(() => {
      place.current.innerHTML = block.html();
      drawFormulas(place.current);
    }, [block.key]);
    return <div ref={place} />;
  },
  (before, after) => before.block.key === after.block.key,
);

async function onCopyCode(event) {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  await copy(button.closest(".code").querySelector("code").textContent);
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}
