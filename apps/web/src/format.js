// Numbers, times, and conversations as text.
import { textOf } from "./tree.js";

export function bytes(count) {
  if (count == null) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  for (; count >= 999.5 && at < 4; at++) count /= 1000;
  return `${count >= 99.5 || at === 0 ? Math.round(count) : count.toFixed(1)} ${units[at]}`;
}

export function number(count) {
  return count == null ? "–" : Math.round(count).toLocaleString("en");
}

export function seconds(value) {
  if (value == null) return "–";
  if (value < 10) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

// The end of a text on progress: the time that is left, from a second on.
export function leftText(value) {
  return value >= 1 ? `, ${seconds(value)} left` : "";
}

// Midnights between a date and now.
function daysSince(date) {
  const [today, day] = [new Date(), new Date(date)].map((each) => each.setHours(0, 0, 0, 0));
  return Math.round((today - day) / 86_400_000);
}

// What a list says of entries that changed on one day, or in one week or month.
export function dayOf(seconds) {
  const date = new Date(seconds * 1000);
  const days = daysSince(date);
  if (days <= 1) return days <= 0 ? "Today" : "Yesterday";
  if (days < 7) return "The last 7 days";
  return date.toLocaleDateString([], { year: "numeric", month: "long" });
}

export function when(seconds) {
  const date = new Date(seconds * 1000);
  const days = daysSince(date);
  if (days <= 0) return date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  if (days === 1) return "yesterday";
  if (days < 7) return date.toLocaleDateString([], { weekday: "long" });
  return date.toLocaleDateString([], { year: "numeric", month: "short", day: "numeric" });
}

// Tokens a second of an answer after its first token, as its client saw it.
export function rateOf({ usage, times }) {
  const elapsed = times && times.last_ms - times.first_ms;
  return usage && usage.answer > 1 && elapsed > 0 ? (usage.answer - 1) / (elapsed / 1000) : null;
}

export function rateText(rate) {
  return `${rate < 100 ? rate.toFixed(1) : number(rate)} tokens/s`;
}

const NAMES = { user: "You", assistant: "Assistant", tool: "Tool" };

export function asMarkdown(conversation, branch) {
  const parts = [`# ${conversation.title || "Conversation"}`];
  if (conversation.settings.system) parts.push(`> ${conversation.settings.system.replaceAll("\n", "\n> ")}`);
  for (const message of branch) parts.push(`## ${NAMES[message.role]}\n\n${named(message)}${textOf(message)}`);
  return `${parts.join("\n\n")}\n`;
}

// All branches, as `mlxinfer history show --json` has them.
export function asJson({ id, title, model, settings, head, messages }) {
  return `${JSON.stringify({ id, title, model, settings, head, messages: [...messages.values()] }, null, 2)}\n`;
}

// Lets the browser save a text as a file that is named by the conversation.
export function save({ title }, ending, type, text) {
  const name = (title || "Conversation").replace(/[\s\\/:*?"<>|]+/g, " ").trim().slice(0, 80);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = `${name}.${ending}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

export function asText(branch) {
  return branch.map((message) => `${NAMES[message.role]}: ${named(message)}${message.content}`).join("\n\n");
}

// A copied text has the names of its pictures.
function named({ details }) {
  return (details.pictures ?? []).map(({ name }) => `[picture: ${name}]\n\n`).join("");
}

export function asCurl(body) {
  // The body comes on standard input: an argument has no room for a picture.
  const data = JSON.stringify(body, null, 2);
  return (
    `curl ${location.origin}/v1/chat/completions \\\n  -H 'Content-Type: application/json' \\\n` +
    `  -H "Authorization: Bearer $MLXINFER_API_KEY" \\\n  -d @- <<'BODY'\n${data}\nBODY\n`
  );
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // a page of another machine over http has no clipboard
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "off-screen";
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}
