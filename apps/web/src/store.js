// What the page knows: models, stored conversations, the one that is shown, answers that arrive.
import { batch, computed, signal } from "@preact/signals";
import { ApiError, request, stream, whenOnline } from "./api.js";
import { forgetDraft } from "./drafts.js";
import { branchOf, childrenOf, hasPictures, leafOf, newId, requestOf, weightOf } from "./tree.js";

const MODEL = "mlxinfer.model";
const LOOK_MS = 3000; // between two looks at answers that this tab does not follow
const DRAW_MS = 30; // between two redraws
const MAX_TRIES = 5; // of a save that the server does not answer
const MAX_ROUNDS = 20; // of allowed calls and their results, for one question
const OTHER_TABS = new BroadcastChannel("mlxinfer");

export const models = signal([]); // of /v1/models, and those on the disk that can be added
export const features = signal({ history: false, hub: false, pdf: false, admin: false, max_body_bytes: Infinity });
export const tools = signal({ data: [], allowed: [] }); // of MCP servers of the config file
export const chosenModel = signal(localStorage.getItem(MODEL) ?? "");
export const conversations = signal([]);
export const moreConversations = signal(false);
export const conversation = signal(empty());
export const running = signal(new Map()); // conversation id -> { abort, message }
export const arrived = signal(0); // counts redraws of answers that arrive
export const notice = signal(null); // { text, retry? }: what went wrong, for people
export const said = signal(""); // for screen readers

export const branch = computed(() => branchOf(conversation.value.messages, conversation.value.head));
export const children = computed(() => childrenOf(conversation.value.messages));
export const busy = computed(() => running.value.get(conversation.value.id));
export const model = computed(() => {
  const wanted = conversation.value.model || chosenModel.value;
  const known = models.value;
  return known.some((each) => each.id === wanted) ? wanted : (known[0]?.id ?? "");
});

// What /v1/models says of the model; its abilities are known when it has been loaded once.
export const modelCard = computed(() => models.value.find((each) => each.id === model.value));
export const sees = computed(() => modelCard.value?.capabilities?.vision); // pictures
export const shownPictures = computed(() => hasPictures(branch.value));
export const shownBytes = computed(() => branch.value.reduce((sum, { details }) => sum + weightOf(details), 0));

export function empty() {
  return { id: newId(), title: "", model: "", settings: {}, head: null, messages: new Map(), stored: false };
}

function fail(error, retry) {
  if (error.name === "AbortError" || error.status === 401) return;
  if (error.code === "offline" && retry) return void whenOnline().then(retry);
  notice.value = { text: error.message, retry };
}

// -- models ---------------------------------------------------------------------------------------

export async function refreshModels() {
  try {
    const served = (await request("/v1/models")).data;
    let others = [];
    if (features.value.hub) {
      const { data } = await request("/hub/models");
      const names = new Set(served.map((each) => each.id));
      others = data
        .filter((each) => each.complete && !each.served && !names.has(each.name) && !isDraft(each))
        .map((each) => ({ id: each.name, state: "on disk", addable: true }));
    }
    models.value = [...served, ...others];
  } catch (error) {
    fail(error, refreshModels);
  }
}

// A bundled model that only proposes tokens for another.
const isDraft = ({ name, source }) => source === "bundled" && name.endsWith("-draft");

export async function chooseModel(id) {
  const chosen = models.value.find((each) => each.id === id);
  try {
    if (chosen?.addable) {
      await request("/hub/serve", { body: { model: id } });
      await refreshModels();
    }
  } catch (error) {
    return fail(error);
  }
  localStorage.setItem(MODEL, id);
  batch(() => {
    chosenModel.value = id;
    conversation.value = { ...conversation.value, model: id };
  });
  if (conversation.value.stored) await saveFields({ model: id });
}

// -- history --------------------------------------------------------------------------------------

export async function refreshConversations() {
  if (!features.value.history) return;
  try {
    const { data, more } = await request("/history/conversations");
    conversations.value = data;
    moreConversations.value = more;
    clearTimeout(looking);
    const unseen = data.some(({ id, answering }) => answering && !running.value.has(id));
    if (unseen) looking = setTimeout(refreshConversations, LOOK_MS);
  } catch (error) {
    fail(error, refreshConversations);
  }
}

let looking = 0; // whether answers that no tab shows have ended

export async function olderConversations() {
  const last = conversations.value.at(-1);
  try {
    const { data, more } = await request(`/history/conversations?before=${last.changed_s}`);
    conversations.value = [...conversations.value, ...data];
    moreConversations.value = more;
  } catch (error) {
    fail(error, olderConversations);
  }
}

let made = 0; // counts what this tab changes of conversations, and ends of answers
let wanted = 0; // counts conversations that were chosen: the last one is shown

// A stored conversation with all that this tab made: an answer may begin or end while the server
// reads, so that neither its reply nor `running` would have it.
async function stored(id) {
  for (;;) {
    await saving;
    const before = made;
    const card = await request(`/history/conversations/${id}`);
    if (before === made) return card;
  }
}

function present(card, message) {
  const messages = new Map(card.messages.map((each) => [each.id, each]));
  let arriving = running.value.get(card.id)?.message;
  if (arriving) messages.set(arriving.id, arriving);
  else if (messages.has(card.answering)) arriving = messages.get(card.answering);
  const head = message && messages.has(message) ? leafOf(childrenOf(messages), message) : card.head;
  conversation.value = { ...card, head: arriving ? arriving.id : head, messages, stored: true };
  if (arriving && !running.value.has(card.id)) follow(card.id, arriving);
}

// Shows a stored conversation, at the branch of a message of it; false: there is none.
export async function open(id, message) {
  const turn = ++wanted;
  try {
    const card = await stored(id);
    if (turn !== wanted) return true; // another one was chosen in the meantime
    present(card, message);
    notice.value = null;
  } catch (error) {
    if (turn === wanted) fail(error, () => turn === wanted && open(id, message));
    return error.status !== 404;
  }
  return true;
}

// What another tab or the server made of the conversation that is shown.
async function refresh(id) {
  const turn = wanted;
  try {
    const card = await stored(id);
    if (turn === wanted) present(card);
  } catch (error) {
    fail(error, () => refresh(id));
  }
}

export function startNew() {
  wanted += 1;
  const { settings } = conversation.value;
  conversation.value = { ...empty(), settings };
  notice.value = null;
}

export async function remove(id) {
  try {
    await request(`/history/conversations/${id}`, { method: "DELETE" });
    conversations.value = conversations.value.filter((each) => each.id !== id);
    forgetDraft({ id, stored: true });
    if (conversation.value.id === id) startNew();
    OTHER_TABS.postMessage({ id });
  } catch (error) {
    fail(error, () => remove(id));
  }
}

export async function rename(id, title) {
  await saveFields({ title }, id);
  if (conversation.value.id === id) conversation.value = { ...conversation.value, title };
}

export const pin = (id, pinned) => saveFields({ pinned }, id);

// Saves happen one after the other: a message after its parent, the end of an answer last.
let saving = Promise.resolve();

function save(store) {
  saving = saving.then(store);
  return saving;
}

function saveMessage(id, message) {
  return save(() => storeMessage(id, message));
}

async function saveFields(fields, id = conversation.value.id) {
  if (!features.value.history) return;
  made += 1;
  await save(() => storeFields(fields, id));
  await refreshConversations();
}

// Waits for a server that does not answer; the saves after this one wait too. What fails again and
// again although the server answers others is an error.
async function persist(path, body) {
  for (let tries = 1; ; tries++) {
    try {
      return await request(path, { body });
    } catch (error) {
      if (error.code !== "offline" || tries === MAX_TRIES) throw new ApiError(error.message, error.status);
      await whenOnline();
    }
  }
}

async function storeFields(fields, id) {
  try {
    await persist("/history/conversations", { id, ...fields });
    OTHER_TABS.postMessage({ id });
  } catch (error) {
    fail(error, () => saveFields(fields, id));
  }
}

async function storeMessage(id, message) {
  if (!features.value.history) return;
  const { parent, role, content, reasoning, details, created_s } = message;
  const body = { conversation: id, id: message.id, parent, role, content, reasoning, details, created_s };
  try {
    const card = await persist("/history/messages", body);
    if (conversation.value.id === id && conversation.value.title !== card.title) {
      conversation.value = { ...conversation.value, title: card.title };
    }
  } catch (error) {
    fail(new ApiError(`Not saved: ${error.message}`, error.status), () => saveMessage(id, message));
  }
}

OTHER_TABS.onmessage = ({ data: { id } }) => lookAgain(id, () => true);
// Other browsers and the terminal may have gone on.
addEventListener("visibilitychange", () => {
  if (!document.hidden) lookAgain(conversation.value.id, (each) => each.changed_s !== conversation.value.changed_s);
});

async function lookAgain(id, isNew) {
  await refreshConversations();
  if (conversation.value.id !== id || running.value.has(id)) return;
  if (conversations.value.some((each) => each.id === id && isNew(each))) await refresh(id);
}

export async function search(words) {
  return (await request(`/history/search?q=${encodeURIComponent(words)}`)).data;
}

// -- settings -------------------------------------------------------------------------------------

const settling = new Map(); // conversation id -> timer

// They apply at once, and are saved when typing pauses.
export function changeSettings(settings) {
  conversation.value = { ...conversation.value, settings };
  const { id, stored } = conversation.value;
  if (!stored) return;
  clearTimeout(settling.get(id));
  settling.set(id, setTimeout(() => saveFields({ settings }, id), 300));
}

// -- asking ---------------------------------------------------------------------------------------

function add(message) {
  made += 1;
  const { value } = conversation;
  const messages = new Map(value.messages).set(message.id, message);
  conversation.value = { ...value, messages, head: message.id, model: value.model || model.value };
}

function newMessage(role, parent, content, details = {}) {
  return { id: newId(), parent, role, content, reasoning: "", details, created_s: Date.now() / 1000 };
}

// Ask `text` after the message `parent`; beside other children of it this is another branch.
// `details`: files as `attachments`, each with name and text, and `pictures`, each with name and URL.
export async function ask(text, details, parent = conversation.value.head) {
  const question = newMessage("user", parent, text, details);
  await send([question]);
}

function offer(found) {
  tools.value = found;
  const failed = Object.entries(found.failures).map(([name, why]) => `${name}: ${why}`);
  if (failed.length) notice.value = { text: `Tools of MCP servers that are not offered: ${failed.join("; ")}` };
}

// Whether a call is of a tool of an MCP server: then the server can run it.
export const canRun = (call) => tools.value.data.some((tool) => tool.function.name === call.name);

// `consent`: somebody has pressed the button of this call.
export async function runCall({ id, name, arguments: given }, { abort, consent = false } = {}) {
  const body = { name, arguments: given || "{}", consent };
  const { text } = await request("/page/tools", { body, signal: abort });
  return { id, text };
}

// Runs the calls of an answer that has just arrived, if all of them are allowed.
async function runAllowed(message, rounds) {
  const calls = (message.details.tool_calls ?? []).filter(Boolean);
  const complete = calls.length && message.details.finish === "tool_calls" && conversation.value.head === message.id;
  if (!complete || rounds >= MAX_ROUNDS || !calls.every(({ name }) => tools.value.allowed.includes(name))) return;
  const { id } = conversation.value;
  const abort = begin(id, message, { served: false });
  let results;
  try {
    results = await Promise.all(calls.map((call) => runCall(call, { abort })));
  } catch (error) {
    if (error.name !== "AbortError") fail(error);
    return;
  } finally {
    end(id);
  }
  if (conversation.value.head === message.id) await sendResults(message, results, rounds + 1);
}

// A conversation is busy from `begin` to `end`; `served`: the server generates the message. Stop
// ends that, or aborts the signal.
function begin(id, message, { served }) {
  const abort = new AbortController();
  running.value = new Map(running.value).set(id, { abort, message, served });
  return abort.signal;
}

function end(id) {
  const rest = new Map(running.value);
  rest.delete(id);
  running.value = rest;
}

// Send the results of an answer's tool calls: [{ id, text }].
export async function sendResults(answer, results, rounds = 0) {
  let parent = answer.id;
  const messages = results.map(({ id, text }) => {
    const message = newMessage("tool", parent, text, { tool_call_id: id });
    parent = message.id;
    return message;
  });
  await send(messages, rounds);
}

async function send(messages, rounds = 0) {
  for (const message of messages) add(message);
  const { id, settings, stored } = conversation.value;
  for (const message of messages) saveMessage(id, message);
  if (!stored && features.value.history) {
    conversation.value = { ...conversation.value, stored: true };
    const fields = { settings, model: model.value };
    saveFields(fields, id);
  }
  await answer(messages.at(-1).id, rounds);
}

// Put another text in the place of an answer: a branch of its own, from which the conversation goes on.
export async function rewrite(message, text) {
  const { model: made } = message.details;
  const edited = newMessage("assistant", message.parent, text, { model: made, edited: true });
  add(edited);
  await saveMessage(conversation.value.id, edited);
}

// Send another result of a tool; the results beside it stay as they are.
export async function resend(message, text) {
  const shown = branch.value;
  const at = shown.indexOf(message);
  const after = shown.slice(at + 1);
  const end = after.findIndex((each) => each.role !== "tool");
  let { parent } = message;
  const results = [{ ...message, content: text }, ...after.slice(0, end < 0 ? after.length : end)];
  await send(
    results.map(({ content, details }) => {
      const result = newMessage("tool", parent, content, details);
      parent = result.id;
      return result;
    }),
  );
}

// Another answer to the same question.
export async function regenerate(message) {
  await answer(message.parent);
}

async function answer(parent, rounds = 0) {
  const { id, settings } = conversation.value;
  notice.value = null;
  let request;
  try {
    request = requestOf(model.value, settings, branchOf(conversation.value.messages, parent), tools.value.data);
  } catch (error) {
    return fail(error);
  }
  const message = newMessage("assistant", parent, "", { model: model.value });
  if (["schema", "json", "regex", "choice"].includes(settings.form)) message.details.form = settings.form;
  add(message);
  await follow(id, message, { conversation: id, message, request });
  await runAllowed(message, rounds);
}

// Goes on with an answer that was cut off.
export async function goOn(message) {
  const { id, settings, messages } = conversation.value;
  const request = requestOf(model.value, settings, branchOf(messages, message.id), tools.value.data);
  request.continue_final_message = true;
  const { finish, error, grows, ...details } = message.details;
  message.details = details;
  await follow(id, message, { conversation: id, message, request });
}

// Follows an answer to its end: one that `body` begins, or one that the server is generating. It
// goes on there, whether or not a tab follows it.
async function follow(id, message, body) {
  const abort = begin(id, message, { served: true });
  said.value = "Answering";
  try {
    if (body) await saving; // the question is there before its answer
    await receive(id, message, body, abort);
    said.value = message.details.error ? `Error: ${message.details.error}` : `Answer: ${message.content.slice(0, 300)}`;
  } catch (error) {
    said.value = error.name === "AbortError" ? "Stopped" : `Error: ${error.message}`;
    if (error.name === "AbortError") message.details.finish = "stopped";
    else message.details.error = error.message;
  } finally {
    made += 1;
    batch(() => {
      end(id);
      arrived.value += 1;
    });
  }
  OTHER_TABS.postMessage({ id });
  if (!modelCard.value?.capabilities) await refreshModels(); // it has been loaded
  await refreshConversations();
}

// Reads the stream of an answer into its message, and goes on after a lost connection.
async function receive(id, message, body, abort) {
  for (let begun = !body; ; ) {
    try {
      const events = begun ? stream(`/page/answers/${message.id}`, { abort }) : stream("/page/answers", { body, abort });
      let first = true;
      for await (const event of events) {
        if (!begun) OTHER_TABS.postMessage({ id });
        begun = true;
        take(event, message, first);
        first = false;
      }
      return;
    } catch (error) {
      if (begun && error.status === 404) return reread(id, message); // it has ended in the meantime
      if (error.code !== "offline" && error.code !== "lost") throw error;
      if (error.code === "offline") await whenOnline(abort);
    }
  }
}

// The first event of a stream has all that the answer has.
function take({ content, reasoning, details, waiting, problem }, message, first) {
  message.content = (first ? "" : message.content) + content;
  message.reasoning = (first ? "" : message.reasoning) + reasoning;
  message.details = details;
  message.waiting = waiting;
  if (problem && problem !== message.problem) notice.value = { text: `Not saved: ${problem}` };
  message.problem = problem;
  drawSoon();
}

async function reread(id, message) {
  if (!features.value.history) throw new ApiError("The server was started again, and the answer is lost.");
  const { messages } = await request(`/history/conversations/${id}`);
  Object.assign(message, messages.find((each) => each.id === message.id));
}

let drawing = 0;

function drawSoon() {
  drawing ||= setTimeout(() => {
    drawing = 0;
    arrived.value += 1;
  }, DRAW_MS);
}

// Ends the answer that arrives: its pages are free at once.
export async function stop() {
  const { abort, message, served } = busy.value ?? {};
  try {
    if (served) return await request(`/page/answers/${message.id}`, { method: "DELETE" });
  } catch {
    // the server does not answer, or has not begun
  }
  abort?.abort();
}

// Show another answer or question beside `message`: the newest leaf below it becomes the head.
export async function show(message) {
  const head = leafOf(children.value, message.id);
  conversation.value = { ...conversation.value, head };
  if (conversation.value.stored) await saveFields({ head });
}

export async function start() {
  try {
    features.value = await request("/page/features");
  } catch (error) {
    fail(error, start);
    return;
  }
  if (features.value.tools) request("/page/tools").then(offer, fail);
  await Promise.all([refreshModels(), refreshConversations()]);
}
