// The field for the next message, and what goes with it: pictures, and files as text.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { request } from "./api.js";
import { changeDraft, draftOf, forgetDraft } from "./drafts.js";
import { number } from "./format.js";
import { isPicture, pictureOf } from "./pictures.js";
import {
  ask, branch, busy, conversation, features, model, notice, said, sees, shownBytes, shownPictures, stop,
} from "./store.js";
import { weightOf } from "./tree.js";
import { IconButton } from "./widgets.jsx";

const DRAGS = ["dragover", "dragleave", "drop"];
const FOLDED_CHARS = 4000; // a longer text that is pasted becomes a file
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
  throw new Error(`${file.name} is no text and no picture: pictures, text files in UTF-8 and PDFs can be attached.`);
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

async function read(file) {
  const { name } = file;
  return isPicture(file) ? { name, url: await pictureOf(file) } : { name, text: await textOf(file) };
}

// Files and pictures apart, as messages have them.
function detailsOf(attached) {
  const attachments = attached.filter(({ url }) => !url);
  const pictures = attached.filter(({ url }) => url);
  return { ...(attachments.length && { attachments }), ...(pictures.length && { pictures }) };
}

// Why pictures cannot be sent to this model, or what is not known yet.
function Blind({ attached }) {
  if (!attached && !shownPictures.value) return null;
  if (sees.value === undefined && attached) {
    return <p class="hint">Whether {model.value} sees pictures is known when it has been loaded.</p>;
  }
  if (sees.value !== false) return null;
  return (
    <p class="blind" role="alert">
      {model.value} does not see pictures. Choose a model that does,{" "}
      {shownPictures.value ? "or begin a new chat." : "or remove the pictures."}
    </p>
  );
}

// Why the server would refuse a request of this size.
function Heavy({ attached }) {
  const most = Math.floor(features.value.max_body_bytes / 2 ** 20);
  return (
    <p class="blind" role="alert">
      This server takes {most} MB at once, with all that was said before.{" "}
      {attached ? "Remove files, or begin a new chat." : "Begin a new chat."}
    </p>
  );
}

export function Composer({ edit }) {
  const field = useRef();
  const files = useRef();
  const { text, attached } = draftOf(conversation.value);
  const [reading, setReading] = useState(0);
  const [over, setOver] = useState(false);
  const pictured = attached.some(({ url }) => url);
  const blind = sees.value === false && (pictured || shownPictures.value);
  const heavy = shownBytes.value + weightOf(detailsOf(attached)) > features.value.max_body_bytes;
  const ready = (text.trim() || attached.length) && !reading && !blind && !heavy && model.value;

  // As high as its lines or its placeholder, wrapped ones too, up to the limit of its style.
  useLayoutEffect(() => {
    const fit = () => {
      field.current.style.height = "auto";
      field.current.style.height = `${field.current.scrollHeight}px`;
    };
    fit();
    addEventListener("resize", fit);
    return () => removeEventListener("resize", fit);
  }, [text, model.value]);

  useEffect(() => {
    // a keyboard that covers half of the screen comes only when it is asked for
    if (matchMedia("(hover: hover)").matches) field.current.focus();
  }, [conversation.value.id]);

  useEffect(() => {
    // a file may be dropped anywhere on the chat
    const dragged = ({ type, relatedTarget }) => setOver(type === "dragover" || (type === "dragleave" && !!relatedTarget));
    const dropped = (event) => attach(event.dataTransfer.files);
    for (const type of DRAGS) addEventListener(type, dragged);
    addEventListener("drop", dropped);
    return () => {
      for (const type of DRAGS) removeEventListener(type, dragged);
      removeEventListener("drop", dropped);
    };
  }, []);

  const before = useRef(Promise.resolve()); // files are attached in the order in which they came

  function attach(list) {
    const given = [...list]; // the browser empties its list when the event is over
    const chat = conversation.value; // another one may be shown when they are read
    before.current = before.current.then(() => readAll(given, chat));
  }

  async function readAll(given, chat) {
    for (const file of given) {
      setReading((n) => n + 1);
      try {
        const found = await read(file);
        changeDraft(chat, { attached: [...draftOf(chat).attached, found] });
        said.value = `Attached ${file.name}`;
      } catch (error) {
        notice.value = { text: error.message };
      } finally {
        setReading((n) => n - 1);
      }
    }
    field.current?.focus();
  }

  function detach(file) {
    changeDraft(conversation.value, { attached: attached.filter((each) => each !== file) });
    said.value = `Removed ${file.name}`;
    field.current.focus();
  }

  function send() {
    if (busy.value || !ready) return;
    forgetDraft(conversation.value);
    ask(text.trim(), detailsOf(attached));
  }

  function onKeyDown(event) {
    if (event.key === "Enter" && !event.shiftKey) {
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
    const { files, types } = event.clipboardData;
    const pasted = event.clipboardData.getData("text/plain");
    if (!files.length && pasted.length > FOLDED_CHARS) {
      event.preventDefault();
      const count = attached.filter(({ name }) => name.startsWith("pasted")).length;
      const name = count ? `pasted ${count + 1}.txt` : "pasted.txt";
      changeDraft(conversation.value, { attached: [...attached, { name, text: pasted }] });
      said.value = `Attached ${name}`;
      return;
    }
    if (!files.length || (types.includes("text/plain") && types.includes("text/html"))) return; // cells come as a picture too
    event.preventDefault();
    attach(files);
  }

  const form = conversation.value.settings.form;
  return (
    <form
      class={`composer${over ? " over" : ""}`}
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
    >
      {(attached.length > 0 || reading > 0) && (
        <ul class="attached" aria-label="Attached files">
          {attached.map((file, at) => (
            <li key={at} class={file.url && "picture"}>
              {file.url ? (
                <img src={file.url} alt={`Picture ${file.name}`} title={file.name} />
              ) : (
                <>
                  {file.name} <small>{number(file.text.length)} characters</small>
                </>
              )}
              <IconButton icon="close" label={`Remove ${file.name}`} onClick={() => detach(file)} />
            </li>
          ))}
          {reading > 0 && <li>reading…</li>}
        </ul>
      )}
      <Blind attached={pictured} />
      {heavy && <Heavy attached={attached.length > 0} />}
      <div class="row">
        <IconButton icon="attach" label="Attach pictures, text files or PDFs" onClick={() => files.current.click()} />
        <input
          ref={files}
          type="file"
          multiple
          hidden
          aria-label="Files"
          onChange={(event) => {
            attach(event.target.files);
            event.target.value = "";
          }}
        />
        <textarea
          id="question"
          dir="auto"
          ref={field}
          rows="1"
          value={text}
          placeholder={model.value ? `Ask ${model.value}` : "No model is here yet: see Models"}
          aria-label="Message"
          onInput={(event) => changeDraft(conversation.value, { text: event.target.value })}
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
            disabled={!ready}
          />
        )}
      </div>
      {form && <p class="hint">The answer is held to the form in this conversation's settings.</p>}
    </form>
  );
}
