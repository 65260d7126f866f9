// A conversation is a tree of messages: each has a parent, and `head` is the leaf that is shown.

export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16)); // randomUUID needs https or localhost
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// The messages from the first one to `head`.
export function branchOf(messages, head) {
  const found = [];
  for (let at = messages.get(head); at; at = messages.get(at.parent)) found.push(at);
  return found.reverse();
}

// The children of every message, in the order in which they were made.
export function childrenOf(messages) {
  const found = new Map();
  for (const message of messages.values()) {
    const list = found.get(message.parent);
    if (list) list.push(message);
    else found.set(message.parent, [message]);
  }
  return found;
}

// The newest leaf below a message.
export function leafOf(children, id) {
  for (let below = children.get(id); below; below = children.get(id)) id = below.at(-1).id;
  return id;
}

// What the API is sent of one message.
export function asSent(message) {
  const { role, content, reasoning, details } = message;
  if (role === "tool") return { role, content, tool_call_id: details.tool_call_id };
  if (role === "assistant") {
    const sent = { role, content };
    if (reasoning) sent.reasoning_content = reasoning;
    if (details.tool_calls?.length) sent.tool_calls = details.tool_calls.map(asCall);
    return sent;
  }
  const text = textOf(message);
  const images = (details.pictures ?? []).filter(({ url }) => url);
  if (!images.length) return { role, content: text };
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  if (text) parts.push({ type: "text", text });
  return { role, content: parts };
}

// The text of a message as a model is sent it: files that were attached come first.
export function textOf({ content, details }) {
  const files = (details.attachments ?? []).map(
    ({ name, text }) => `<file name="${name.replace(/["\n]/g, "'")}">\n${text}\n</file>\n\n`,
  );
  return files.join("") + content;
}

// Bytes that the texts and pictures of these details have in a request, nearly.
export function weightOf({ attachments = [], pictures = [] }) {
  const files = attachments.map(({ text }) => text.length);
  return [...files, ...pictures.map(({ url }) => url?.length ?? 0)].reduce((sum, each) => sum + each, 0);
}

// Whether the API is sent pictures of these messages.
export function hasPictures(branch) {
  return branch.some(({ details }) => details.pictures?.some(({ url }) => url));
}

function asCall({ id, name, arguments: text }) {
  return { id, type: "function", function: { name, arguments: text || "{}" } };
}

// The request of an answer to a branch; `offered`: tools beside those of the settings.
export function requestOf(model, settings, branch, offered = []) {
  const body = { model, stream: true, stream_options: { include_usage: true }, return_progress: true };
  const system = settings.system?.trim();
  body.messages = [...(system ? [{ role: "system", content: system }] : []), ...branch.map(asSent)];
  for (const [name, value] of Object.entries(settings.sampling ?? {})) {
    if (value === "" || value == null) continue;
    body[name] = name === "stop" ? [value] : Number(value);
  }
  if (settings.thinking === "on") body.chat_template_kwargs = { enable_thinking: true };
  if (settings.thinking === "off") body.chat_template_kwargs = { enable_thinking: false };
  const tools = [...(settings.tools?.trim() ? parsed("tools", settings.tools) : []), ...offered];
  if (tools.length) body.tools = tools;
  Object.assign(body, formOf(settings));
  return body;
}

function formOf({ form, schema, regex, choices }) {
  if (form === "json") return { response_format: { type: "json_object" } };
  if (form === "schema") {
    const json_schema = { name: "answer", strict: true, schema: parsed("The schema", schema) };
    return { response_format: { type: "json_schema", json_schema } };
  }
  if (form === "regex") return { guided_regex: regex };
  if (form === "choice") {
    return { guided_choice: choices.split("\n").map((line) => line.trim()).filter(Boolean) };
  }
  return {};
}

function parsed(what, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} in the settings is not valid JSON: ${error.message}`);
  }
}
