// The settings of one conversation: system message, thinking, sampling, the form of answers, tools.
import { useState } from "preact/hooks";
import { changeSettings, conversation, features } from "./store.js";
import { IconButton } from "./widgets.jsx";

const SAMPLING = [
  ["temperature", "Temperature", { min: 0, max: 100, step: "any" }],
  ["top_p", "Top-p", { min: 0, max: 1, step: "any" }],
  ["top_k", "Top-k", { min: -1, step: 1 }],
  ["min_p", "Min-p", { min: 0, max: 1, step: "any" }],
  ["repetition_penalty", "Repetition penalty", { min: 0, max: 100, step: "any" }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: "any" }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: "any" }],
  ["seed", "Seed", { step: 1 }],
  ["max_tokens", "Longest answer, tokens", { min: 1, step: 1 }],
];
const FORMS = [
  ["", "Any text"],
  ["json", "Any JSON object"],
  ["schema", "JSON that holds to a schema"],
  ["regex", "A regular expression"],
  ["choice", "One of some texts"],
];

// Give it the conversation's id as key: what is typed belongs to that conversation.
export function Settings({ close }) {
  const [draft, setDraft] = useState(conversation.value.settings);
  const [problem, setProblem] = useState(null);

  function change(fields) {
    setDraft({ ...draft, ...fields });
  }

  function submit(event) {
    event.preventDefault();
    const wrong = problemOf(draft);
    setProblem(wrong);
    if (wrong) return;
    changeSettings(draft);
    close();
  }

  return (
    <form class="settings" aria-label="Settings of this conversation" onSubmit={submit}>
      <div class="settings-head">
        <h2>This conversation</h2>
        <IconButton icon="close" label="Close the settings" onClick={close} />
      </div>
      <label>
        System message
        <textarea rows="3" value={draft.system ?? ""} onInput={(event) => change({ system: event.target.value })} />
      </label>
      <label>
        Thinking
        <select value={draft.thinking ?? ""} onChange={(event) => change({ thinking: event.target.value })}>
          <option value="">as the model does by itself</option>
          <option value="on">on</option>
          <option value="off">off</option>
        </select>
      </label>
      <fieldset>
        <legend>
          Sampling <small>empty: the model's own defaults</small>
        </legend>
        <div class="grid">
          {SAMPLING.map(([name, label, rest]) => (
            <label key={name}>
              {label}
              <input
                type="number"
                {...rest}
                value={draft.sampling?.[name] ?? ""}
                onInput={(event) => change({ sampling: { ...draft.sampling, [name]: event.target.value } })}
              />
            </label>
          ))}
          <label>
            Stop at
            <input
              value={draft.sampling?.stop ?? ""}
              onInput={(event) => change({ sampling: { ...draft.sampling, stop: event.target.value } })}
            />
          </label>
        </div>
      </fieldset>
      <fieldset>
        <legend>Form of answers</legend>
        <label>
          Answers are
          <select value={draft.form ?? ""} onChange={(event) => change({ form: event.target.value })}>
            {FORMS.map(([value, label]) => (
              <option key={value} value={value}>
                {label}
              </option>
            ))}
          </select>
        </label>
        <FormField draft={draft} change={change} />
        {draft.form && <p class="hint">Every token is checked while it is chosen, so the answer cannot break the form.</p>}
      </fieldset>
      <details>
        <summary>Tools</summary>
        <label>
          A JSON list in OpenAI's form. The page shows calls and lets you type their results; it runs nothing.
          <textarea
            rows="4"
            class="code-field"
            spellcheck={false}
            value={draft.tools ?? ""}
            onInput={(event) => change({ tools: event.target.value })}
          />
        </label>
      </details>
      {problem && (
        <p class="error" role="alert">
          {problem}
        </p>
      )}
      <div class="actions">
        <button type="button" onClick={() => change({ system: "", thinking: "", sampling: {}, form: "", tools: "" })}>
          Reset
        </button>
        <button class="primary">{features.value.history ? "Save" : "Apply"}</button>
      </div>
    </form>
  );
}

function FormField({ draft, change }) {
  const { form } = draft;
  const fields = {
    schema: ["Schema", "schema", '{"type": "object", "properties": {"name": {"type": "string"}}}'],
    regex: ["Expression", "regex", "[0-9]{4}-[0-9]{2}-[0-9]{2}"],
    choice: ["Texts, one a line", "choices", "yes\nno"],
  };
  if (!fields[form]) return null;
  const [label, name, placeholder] = fields[form];
  return (
    <label>
      {label}
      <textarea
        rows="4"
        class="code-field"
        spellcheck={false}
        placeholder={placeholder}
        value={draft[name] ?? ""}
        onInput={(event) => change({ [name]: event.target.value })}
      />
    </label>
  );
}

function problemOf({ form, schema, regex, choices, tools }) {
  for (const [what, text, needed] of [
    ["The schema", schema, form === "schema"],
    ["The list of tools", tools, !!tools?.trim()],
  ]) {
    if (!needed) continue;
    try {
      JSON.parse(text ?? "");
    } catch (error) {
      return `${what} is not valid JSON: ${error.message}`;
    }
  }
  if (form === "regex" && !regex) return "The expression is empty.";
  if (form === "choice" && !choices?.trim()) return "There is no text to choose.";
  return null;
}
