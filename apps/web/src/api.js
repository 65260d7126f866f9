// HTTP with the server: JSON requests, the stream of an answer, the API key.
import { signal } from "@preact/signals";

const KEY = "mlxinfer.key";

export const needsKey = signal(false); // the server refused the key, or there is none
export const online = signal(true);
const RETRY_MS = 2000;
const waiting = []; // for the server to answer again

export class ApiError extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function setKey(key) {
  if (key) localStorage.setItem(KEY, key);
  else localStorage.removeItem(KEY);
  needsKey.value = false;
}

function headers(body) {
  const found = {};
  const key = localStorage.getItem(KEY);
  if (key) found.authorization = `Bearer ${key}`;
  if (body !== undefined) found["content-type"] = "application/json";
  return found;
}

async function send(path, { body, method, signal: abort } = {}) {
  let response;
  try {
    response = await fetch(path, {
      method: method ?? (body === undefined ? "GET" : "POST"),
      headers: headers(body),
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: abort,
      credentials: "omit",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (online.value) setTimeout(lookAgain, RETRY_MS);
    online.value = false;
    throw new ApiError("The server does not answer. Is it running?", 0, "offline");
  }
  answered();
  if (response.ok) return response;
  let said = {};
  try {
    said = (await response.json()).error ?? {};
  } catch {
    // an answer of a proxy
  }
  if (response.status === 401) needsKey.value = true;
  throw new ApiError(said.message ?? `The server answered ${response.status}.`, response.status, said.code);
}

function answered() {
  online.value = true;
  for (const resolve of waiting.splice(0)) resolve();
}

async function lookAgain() {
  if (online.value) return;
  try {
    await fetch("/health", { credentials: "omit" });
    answered();
  } catch {
    setTimeout(lookAgain, RETRY_MS);
  }
}

// Resolves when the server answers again; rejects when one stops waiting for it.
export function whenOnline(abort) {
  return new Promise((resolve, reject) => {
    waiting.push(resolve);
    abort?.addEventListener("abort", () => reject(abort.reason));
  });
}

export async function request(path, options) {
  return (await send(path, options)).json();
}

const lost = () => new ApiError("The connection was lost before the answer was complete.", 0, "lost");

// The data of a stream's events, one by one. A stream that ends without [DONE] was cut off.
export async function* stream(path, { body, abort }) {
  const response = await send(path, { body, signal: abort });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw lost();
    }
    if (piece.done) throw lost();
    rest += piece.value;
    const frames = rest.split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (!frame.startsWith("data: ")) continue; // a comment that keeps the connection open
      const data = frame.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, 0, event.error.code);
      yield event;
    }
  }
}
