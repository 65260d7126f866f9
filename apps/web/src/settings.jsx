// The settings of one conversation, in a sheet at the side. What is typed applies at once.
import { signal } from "@preact/signals";
import { useId, useState } from "preact/hooks";
import { changeSettings, conversation, modelCard } from "./store.js";
import { IconButton } from "./widgets.jsx";

export const settingsOpen = signal(false);

const SAMPLING = [
  ["temperature", "Temperature", { least: 0, most: 100 }],
  ["top_p", "Top-p", { least: 0, most: 1 }],
  ["top_k", "Top-k", { least: -1, whole: true }],
  ["min_p", "Min-p", { least: 0, most: 1 }],
  ["repetition_penalty", "Repetition penalty", { least: 0, most: 100 }],
  ["presence_penalty", "Presence penalty", { least: -2, most: 2 }],
  ["frequency_penalty", "Frequency penalty", { least: -2, most: 2 }],
  ["seed", "Seed", { whole: true }],
  ["max_tokens", "Most tokens", { least: 1, whole: true }],
];
const FORMS = [
  ["", "Any text"],
  ["json", "Any JSON object"],
  ["schema", "JSON that holds to a schema"],
  ["regex", "A regular expression"],
  ["choice", "One of some texts"],
];
const FORM_FIELDS = {
  schema: ["Schema", "schema", '{"type": "object", "properties": {"name": {"type": "string"}}}'],
  regex: ["Expression", "regex", "[0-9]{4}-[0-9]{2}-[0-9]{2}"],
  choice: ["Texts, one a line", "choices", "yes\nno"],
};

// Give it the conversation's id as key: what is typed belongs to that conversation.
export function Settings() {
  const [draft, setDraft] = useState(conversation.value.settings);
  const wrong = problemsOf(draft);
  const { sampling: defaults, capabilities } = modelCard.value ?? {};

  function change(fields) {
    const next = { ...draft, ...fields };
    setDraft(next);
    changeSettings(validPart(next, conversation.value.settings));
  }
  const changeSampling = (name, text) => change({ sampling: { ...draft.sampling, [name]: text } });

  return (
    <form class="settings" aria-label="Settings of this conversation" onSubmit={(event) => event.preventDefault()}>
      <div class="settings-head">
        <h2>This conversation</h2>
        <IconButton icon="close" label="Close the settings" onClick={() => (settingsOpen.value = false)} />
      </div>
      <Field label="System message">
        {(more) => <textarea rows="3" {...more} value={draft.system ?? ""} onInput={(event) => change({ system: event.target.value })} />}
      </Field>
      {capabilities?.reasoning !== false && (
        <Field label="Thinking">
          {(more) => (
            <select {...more} value={draft.thinking ?? ""} onChange={(event) => change({ thinking: event.target.value })}>
              <option value="">as the model does by itself</option>
              <option value="on">on</option>
              <option value="off">off</option>
            </select>
          )}
        </Field>
      )}
      <fieldset>
        <legend>Sampling</legend>
        <div class="grid">
          {SAMPLING.map(([name, label]) => (
            <Field key={name} label={label} wrong={wrong[name]}>
              {(more) => (
                <input
                  inputmode="decimal"
                  {...more}
                  placeholder={defaults?.[name] ?? ""}
                  value={draft.sampling?.[name] ?? ""}
                  onInput={(event) => changeSampling(name, event.target.value)}
                />
              )}
            </Field>
          ))}
          <Field label="Stop at">
            {(more) => <input {...more} value={draft.sampling?.stop ?? ""} onInput={(event) => changeSampling("stop", event.target.value)} />}
          </Field>
        </div>
      </fieldset>
      <fieldset>
        <legend>Form of answers</legend>
        <Field label="Answers are">
          {(more) => (
            <select {...more} value={draft.form ?? ""} onChange={(event) => change({ form: event.target.value })}>
              {FORMS.map(([value, label]) => (
                <option key={value} value={value}>
                  {label}
                </option>
              ))}
            </select>
          )}
        </Field>
        <FormField draft={draft} change={change} wrong={wrong.form} />
        {draft.form && <p class="hint">Every token is checked while it is chosen, so the answer cannot break the form.</p>}
      </fieldset>
      <details>
        <summary>Tools</summary>
        <Field
          label="A JSON list in OpenAI's form. You type what they give back. Tools of MCP servers are offered beside them."
          wrong={wrong.tools}
        >
          {(more) => (
            <textarea
              rows="4"
              class="code-field"
              spellcheck={false}
              {...more}
              value={draft.tools ?? ""}
              onInput={(event) => change({ tools: event.target.value })}
            />
          )}
        </Field>
      </details>
      <div class="actions">
        <button type="button" onClick={() => change({ system: "", thinking: "", sampling: {}, form: "", tools: "" })}>
          Reset to the model's defaults
        </button>
      </div>
    </form>
  );
}

// A field under its label; below it, in words, why its value does not count.
function Field({ label, wrong, children }) {
  const id = useId();
  const more = wrong ? { "aria-invalid": "true", "aria-describedby": id } : {};
  return (
    <div class="field">
      <label>
        {label}
        {children(more)}
      </label>
      {wrong && (
        <small id={id} class="wrong" role="alert">
          {wrong}
        </small>
      )}
    </div>
  );
}

function FormField({ draft, change, wrong }) {
  if (!FORM_FIELDS[draft.form]) return null;
  const [label, name, placeholder] = FORM_FIELDS[draft.form];
  return (
    <Field label={label} wrong={wrong}>
      {(more) => (
        <textarea
          rows="4"
          class="code-field"
          spellcheck={false}
          {...more}
          placeholder={placeholder}
          value={draft[name] ?? ""}
          onInput={(event) => change({ [name]: event.target.value })}
        />
      )}
    </Field>
  );
}

// -- which values count -----------------------------------------------------------------------------

// Field -> what is wrong with its value; "form" and "tools" for those texts.
function problemsOf({ sampling = {}, form, schema, regex, choices, tools }) {
  const found = {};
  for (const [name, , range] of SAMPLING) {
    const problem = numberProblem(String(sampling[name] ?? "").trim(), range);
    if (problem) found[name] = problem;
  }
  if (form === "schema") found.form = jsonProblem(schema ?? "");
  if (form === "regex" && !regex) found.form = "Type an expression.";
  if (form === "choice" && !choices?.trim()) found.form = "Type a text to choose.";
  if (tools?.trim()) found.tools = jsonProblem(tools);
  return found;
}

function numberProblem(text, { least = -Infinity, most = Infinity, whole }) {
  if (!text) return null;
  const value = Number(text);
  if (!Number.isFinite(value)) return "Type a number.";
  if (whole && !Number.isSafeInteger(value)) return "Type a whole number.";
  if (value >= least && value <= most) return null;
  if (most === Infinity) return `Type ${least} or more.`;
  return `Type a number from ${least} to ${most}.`;
}

function jsonProblem(text) {
  if (!text.trim()) return "Type a JSON schema.";
  try {
    JSON.parse(text);
    return null;
  } catch (error) {
    return `This is not valid JSON: ${error.message}`;
  }
}

// `next`, but what is wrong in it stays as it was.
function validPart(next, before) {
  const wrong = problemsOf(next);
  const sampling = { ...next.sampling };
  for (const [name] of SAMPLING) if (wrong[name]) sampling[name] = before.sampling?.[name] ?? "";
  const found = { ...next, sampling };
  const kept = [...(wrong.form ? ["form", "schema", "regex", "choices"] : []), ...(wrong.tools ? ["tools"] : [])];
  for (const name of kept) found[name] = before[name];
  return found;
}
