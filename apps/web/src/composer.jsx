// The field for the next message, and files that go with it as text.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { request } from "./api.js";
import { number } from "./format.js";
import { ask, branch, busy, conversation, features, model, notice, stop } from "./store.js";
import { IconButton } from "./widgets.jsx";

const MAX_FILE_BYTES = 20 * 2 ** 20;

// The text of a file; PDFs are read by the server, what is no text is refused by name.
async function textOf(file) {
  if (file.size > MAX_FILE_BYTES) throw new Error(`${file.name} is larger than 20 MB.`);
  const data = new Uint8Array(await file.arrayBuffer());
  if (String.fromCharCode(...data.slice(0, 5)) === "%PDF-") return pdfText(file, data);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(data);
    if (!text.includes("\0")) return text;
  } catch {
    // refused below
  }
  throw new Error(`${file.name} is no text: text files in UTF-8 and PDFs can be attached.`);
}

async function pdfText(file, data) {
  if (!features.value.pdf) {
    throw new Error(`${file.name} is a PDF, which this server cannot read: install its extra, mlxinfer[pdf].`);
  }
  let binary = "";
  for (let at = 0; at < data.length; at += 0x8000) {
    binary += String.fromCharCode(...data.subarray(at, at + 0x8000));
  }
  const { text } = await request("/page/pdf", { body: { name: file.name, data: btoa(binary) } });
  return text;
}

export function Composer({ edit }) {
  const field = useRef();
  const files = useRef();
  const [text, setText] = useState("");
  const [attached, setAttached] = useState([]);
  const [reading, setReading] = useState(0);
  const [over, setOver] = useState(false);
  useLayoutEffect(() => {
    const { current } = field;
    current.rows = Math.min(Math.max(current.value.split("\n").length, 1), 12);
  }, [text]);

  useEffect(() => {
    // a keyboard that covers half of the screen comes only when it is asked for
    if (matchMedia("(hover: hover)").matches) field.current.focus();
  }, [conversation.value.id]);

  async function attach(list) {
    for (const file of list) {
      setReading((n) => n + 1);
      try {
        const text = await textOf(file);
        setAttached((all) => [...all, { name: file.name, text }]);
      } catch (error) {
        notice.value = { text: error.message };
      } finally {
        setReading((n) => n - 1);
      }
    }
    field.current?.focus();
  }

  function send() {
    if (busy.value || reading || !(text.trim() || attached.length) || !model.value) return;
    setText("");
    setAttached([]);
    ask(text.trim(), attached);
  }

  function onKeyDown(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    } else if (event.key === "ArrowUp" && !text && !busy.value) {
      const last = branch.value.findLast((message) => message.role === "user");
      if (last) {
        event.preventDefault();
        edit(last.id);
      }
    }
  }

  function onPaste(event) {
    if (event.clipboardData.files.length) {
      event.preventDefault();
      attach(event.clipboardData.files);
    }
  }

  const form = conversation.value.settings.form;
  return (
    <form
      class={`composer${over ? " over" : ""}`}
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
      onDragOver={(event) => {
        event.preventDefault();
        setOver(true);
      }}
      onDragLeave={() => setOver(false)}
      onDrop={(event) => {
        event.preventDefault();
        setOver(false);
        attach(event.dataTransfer.files);
      }}
    >
      {(attached.length > 0 || reading > 0) && (
        <ul class="attached" aria-label="Attached files">
          {attached.map((file, at) => (
            <li key={at}>
              {file.name} <small>{number(file.text.length)} characters</small>
              <IconButton
                icon="close"
                label={`Remove ${file.name}`}
                onClick={() => setAttached(attached.filter((each) => each !== file))}
              />
            </li>
          ))}
          {reading > 0 && <li>reading…</li>}
        </ul>
      )}
      <div class="row">
        <IconButton icon="attach" label="Attach text files or PDFs" onClick={() => files.current.click()} />
        <input
          ref={files}
          type="file"
          multiple
          hidden
          aria-label="Files"
          onChange={(event) => {
            attach([...event.target.files]);
            event.target.value = "";
          }}
        />
        <textarea
          id="question"
          ref={field}
          rows="1"
          value={text}
          placeholder={model.value ? `Ask ${model.value}` : "No model is here yet: see Models"}
          aria-label="Message"
          onInput={(event) => setText(event.target.value)}
          onKeyDown={onKeyDown}
          onPaste={onPaste}
        />
        {busy.value ? (
          <IconButton icon="stop" label="Stop the answer" class="round stop" onClick={stop} />
        ) : (
          <IconButton
            icon="send"
            label="Send"
            type="submit"
            class="round"
            disabled={!(text.trim() || attached.length) || !!reading || !model.value}
          />
        )}
      </div>
      {form && <p class="hint">The answer is held to the form in this conversation's settings.</p>}
    </form>
  );
}
