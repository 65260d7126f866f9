// What the server does now: memory of the models, the batch, errors, settings.
import { useEffect, useRef, useState } from "preact/hooks";
import { online, request } from "./api.js";
import { bytes, leftText, number, rateText, seconds, when } from "./format.js";
import { usePolled } from "./poll.js";
import { sidebarOpen } from "./sidebar.jsx";
import { notice, refreshModels } from "./store.js";
import { IconButton, Meter } from "./widgets.jsx";

const EVERY_MS = 1000;
const KEPT = 60; // samples of the rates: a minute

export function Dashboard() {
  const { data, error, again } = usePolled("/admin/state", EVERY_MS);
  const rates = useRates(data);
  if (!data) return <Shell>{error ? <p class="error">{error}</p> : <p class="empty">Loading…</p>}</Shell>;
  return (
    <Shell>
      {error && <p class="error">{error}</p>}
      <Busy state={data} rates={rates} />
      <Memory state={data} />
      <h2>What went wrong</h2>
      <Problems problems={data.problems} />
      <h2>Models</h2>
      <div class="cards">
        {data.models.map((model) => (
          <ModelCard key={model.state.name} model={model} rate={rates.models.get(model.state.name)} again={again} />
        ))}
      </div>
      <h2>Figures</h2>
      <Figures state={data} />
      <h2>Settings</h2>
      <Settings />
    </Shell>
  );
}

function Shell({ children }) {
  return (
    <section class="place">
      <header class="head">
        <IconButton icon="menu" label="Conversations" class="quiet narrow" onClick={() => (sidebarOpen.value = true)} />
        <h1 class="title">Dashboard</h1>
      </header>
      <div class="scroll" tabindex="0" role="region" aria-label="Dashboard">
        <div class="column wide">{children}</div>
      </div>
    </section>
  );
}

// Rates follow from two states of the counters.
function useRates(data) {
  const before = useRef(null);
  const [rates, setRates] = useState({ total: [], models: new Map() });
  useEffect(() => {
    if (!data) return;
    const now = { at: performance.now(), models: new Map(data.models.map((each) => [each.state.name, each])) };
    const last = before.current;
    before.current = now;
    if (!last) return;
    const elapsed = (now.at - last.at) / 1000;
    const models = new Map();
    let total = 0;
    for (const [name, model] of now.models) {
      const old = last.models.get(name);
      if (!old) continue;
      const tokens = model.counters.generation_tokens - old.counters.generation_tokens;
      const steps = model.engine && old.engine ? model.engine.steps - old.engine.steps : 0;
      const computed = steps > 0 ? model.engine.tokens_computed - old.engine.tokens_computed : 0;
      models.set(name, { perSecond: tokens / elapsed, perStep: steps > 0 ? computed / steps : null });
      total += tokens / elapsed;
    }
    setRates(({ total: samples }) => ({ total: [...samples, total].slice(-KEPT), models }));
  }, [data]);
  return rates;
}

const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

// Is it busy?
function Busy({ state, rates }) {
  const waiting = state.requests.filter((each) => each.waiting).length;
  const running = state.requests.length - waiting;
  const rate = rates.total.at(-1) ?? 0;
  const busy = running ? `Answering ${plural(running, "request")}` : waiting ? "Busy" : "Idle";
  const said = online.value ? busy : `Not reachable; before that: ${busy}`;
  return (
    <>
      <p class="busy" role="status">
        <b>{said}</b>
        {waiting > 0 && `, ${number(waiting)} waiting`}
        {rate > 0 && ` · ${rateText(rate)}`}
      </p>
      <Spark samples={rates.total} />
      {state.requests.length > 0 && <Requests state={state} />}
      {Object.keys(state.keys).length > 1 && <Keys keys={state.keys} />}
    </>
  );
}

const loadedOf = (state) => state.models.filter((each) => each.engine);
const sumOf = (list, get) => list.reduce((total, each) => total + get(each), 0);

// How full is it?
function Memory({ state }) {
  const loaded = loadedOf(state);
  const weights = sumOf(loaded, (each) => each.state.weights_bytes);
  const used = sumOf(loaded, (each) => each.engine.kv_used_bytes);
  const kept = sumOf(loaded, (each) => each.engine.kv_cached_bytes);
  const all = weights + used + kept;
  return (
    <Meter
      label="Memory"
      text={`${bytes(all)} of ${bytes(state.memory_limit_bytes)} used (${Math.round((100 * all) / state.memory_limit_bytes)} %)`}
      of={state.memory_limit_bytes}
      parts={[
        { kind: "weights", value: weights },
        { kind: "used", value: used },
        { kind: "cached", value: kept },
      ]}
    />
  );
}

// For those who want to know more.
function Figures({ state }) {
  const loaded = loadedOf(state);
  const prompts = sumOf(state.models, (each) => each.counters.prompt_tokens);
  const cached = sumOf(state.models, (each) => each.counters.cached_tokens);
  const rows = [
    ["Weights", bytes(sumOf(loaded, (each) => each.state.weights_bytes))],
    ["KV cache in use", bytes(sumOf(loaded, (each) => each.engine.kv_used_bytes))],
    ["KV cache kept for later prompts", bytes(sumOf(loaded, (each) => each.engine.kv_cached_bytes))],
    ["Held by MLX", `${bytes(state.memory_active_bytes)} now, ${bytes(state.memory_peak_bytes)} at most`],
    ["Memory of this machine", bytes(state.machine_bytes)],
    ["Prompt tokens from the cache", `${number(cached)} of ${number(prompts)}`],
  ];
  return (
    <details>
      <summary>Memory and cache in detail</summary>
      <dl class="rows">
        {rows.map(([name, value]) => (
          <Row key={name} name={name} value={value} />
        ))}
      </dl>
    </details>
  );
}

function Spark({ samples }) {
  if (!samples.some((value) => value > 0)) return null;
  const most = Math.max(...samples, 1);
  const points = samples.map((value, at) => `${(at * 100) / (KEPT - 1)},${(24 - (22 * value) / most).toFixed(1)}`);
  return (
    <svg class="spark" viewBox="0 0 100 25" preserveAspectRatio="none" role="img" aria-label="Tokens a second in the last minute">
      <polyline points={points.join(" ")} />
    </svg>
  );
}

function Requests({ state }) {
  return (
    <div class="table" tabindex="0" role="region" aria-label="Running requests">
      <table>
        <thead>
          <tr>
            <th>Model</th>
            <th>State</th>
            <th class="right">Prompt</th>
            <th class="right">Answer</th>
            <th class="right">Since</th>
            <th>Path</th>
            <th>Key</th>
          </tr>
        </thead>
        <tbody>
          {state.requests.map((each) => (
            <tr key={each.id}>
              <td>{each.model}</td>
              <td>
                <span class={`badge ${each.waiting ? "" : "good"}`}>{stateOf(each)}</span>
              </td>
              <td class="right">
                {number(each.prompt_tokens)}
                {each.reuse && <Reuse reuse={each.reuse} />}
              </td>
              <td class="right">
                {number(each.answer_tokens)}
                {each.max_tokens ? ` / ${number(each.max_tokens)}` : ""}
              </td>
              <td class="right">{seconds(each.age_s)}</td>
              <td>{each.path}</td>
              <td>{each.key ?? "–"}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

// What each key has of the server.
function Keys({ keys }) {
  return (
    <div class="table" tabindex="0" role="region" aria-label="Keys">
      <table>
        <thead>
          <tr>
            <th>Key</th>
            <th class="right">Answering</th>
            <th class="right">Waiting</th>
            <th class="right">Mean wait for a first token</th>
            <th class="right">Refused</th>
          </tr>
        </thead>
        <tbody>
          {Object.entries(keys).map(([name, key]) => (
            <tr key={name}>
              <td>{name}</td>
              <td class="right">{number(key.running)}</td>
              <td class="right">{number(key.waiting)}</td>
              <td class="right">{key.mean_wait_s === null ? "–" : seconds(key.mean_wait_s)}</td>
              <td class="right">{number(key.rejected)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

// How much of a prompt was reused, and why no more, as `mlxinfer why` lists it.
function Reuse({ reuse }) {
  return (
    <small class="why" title={reuse.message}>
      {number(reuse.cached_tokens)} reused: {reuse.cause} at {number(reuse.position)}
    </small>
  );
}

function kvText([keys, values]) {
  if (keys === null && values === null) return "KV cache not quantised";
  return keys === values ? `KV cache ${keys} bit` : `KV cache ${keys ?? 16}/${values ?? 16} bit`;
}

function ModelCard({ model, rate, again }) {
  const { state, engine, counters } = model;
  const [busy, setBusy] = useState("");
  const loaded = state.state === "loaded";
  async function act(doing, path, body) {
    setBusy(doing);
    try {
      await request(path, { body });
      await Promise.all([again(), refreshModels()]);
    } catch (error) {
      notice.value = { text: error.message };
    }
    setBusy("");
  }
  const name = state.name;
  return (
    <article class="card" aria-label={name}>
      <header>
        <h3>{name}</h3>
        <span class={`badge ${loaded ? "good" : ""}`}>{busy || state.state}</span>
        {state.pinned && <span class="badge">pinned</span>}
      </header>
      <p class="source">
        {model.source && model.source !== name ? `${model.source} · ` : ""}
        {kvText(model.kv_bits)}
        {state.max_model_len ? ` · ${number(state.max_model_len)} tokens of context` : ""}
        {loaded && !state.pinned && state.ttl_left_s != null ? ` · unloads in ${seconds(state.ttl_left_s)}` : ""}
        {state.aliases.length ? ` · also ${state.aliases.join(", ")}` : ""}
      </p>
      {engine && (
        <Meter
          label="KV cache"
          text={`${bytes(engine.kv_used_bytes)} in use, ${bytes(engine.kv_cached_bytes)} kept for later prompts, of ${bytes(engine.kv_limit_bytes)}`}
          of={engine.kv_limit_bytes}
          parts={[
            { kind: "used", value: engine.kv_used_bytes },
            { kind: "cached", value: engine.kv_cached_bytes },
          ]}
        />
      )}
      <details>
        <summary>Figures</summary>
        <dl class="rows">
        <Row name="Weights" value={bytes(state.weights_bytes)} />
        {engine?.disk_bytes != null && <Row name="Kept on disk" value={bytes(engine.disk_bytes)} />}
        <Row name="Requests" value={`${state.requests_running} running, ${state.requests_waiting} waiting`} />
        {rate && loaded && (
          <Row
            name="Rate"
            value={`${rateText(rate.perSecond)}${rate.perStep ? `, ${rate.perStep.toFixed(1)} tokens a step` : ""}`}
          />
        )}
        <Row name="From the cache" value={`${number(counters.cached_tokens)} of ${number(counters.prompt_tokens)} prompt tokens`} />
        <Row name="Answered" value={`${number(counters.generation_tokens)} tokens`} />
        {engine && engine.preemptions > 0 && <Row name="Preempted" value={number(engine.preemptions)} />}
        {Object.entries(engine?.failed_proposals ?? {}).map(([source, why]) => (
          <Row key={source} name={`No proposals by ${source}`} value={why} />
        ))}
        </dl>
      </details>
      {state.failure && <p class="error">Not loaded: {state.failure}</p>}
      <div class="actions">
        <button
          type="button"
          disabled={!!busy}
          onClick={() => act(state.pinned ? "unpinning…" : "pinning…", "/admin/models/pin", { model: name, pinned: !state.pinned })}
        >
          {state.pinned ? "Unpin" : "Pin"}
        </button>
        {loaded ? (
          <button
            type="button"
            disabled={!!busy || state.pinned}
            onClick={() => act("unloading…", "/admin/models/unload", { model: name, drain_s: 30 })}
          >
            Unload
          </button>
        ) : (
          <button
            type="button"
            class="primary"
            disabled={!!busy || state.state !== "unloaded"}
            onClick={() => act("loading…", "/admin/models/load", { model: name })}
          >
            Load
          </button>
        )}
      </div>
    </article>
  );
}

function Row({ name, value }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{value}</dd>
    </div>
  );
}

function Problems({ problems }) {
  if (!problems.length) return <p class="empty">Nothing since the server started.</p>;
  return (
    <ul class="problems">
      {problems.map((each, at) => (
        <li key={at}>
          <span class={`badge ${each.level === "warning" ? "" : "bad"}`}>{each.level}</span>
          <time>{when(each.time_s)}</time>
          <span class="said">
            {each.model ? `${each.model}: ` : ""}
            {each.message}
          </span>
        </li>
      ))}
    </ul>
  );
}

function Settings() {
  const [rows, setRows] = useState(null);
  useEffect(() => {
    request("/admin/settings").then(({ data }) => setRows(data), () => setRows([]));
  }, []);
  if (!rows?.length) return <p class="empty">This server was not started by mlxinfer serve.</p>;
  return (
    <details>
      <summary>
        {rows.filter((each) => each.origin !== "default").length} of {rows.length} differ from the defaults
      </summary>
      <div class="table" tabindex="0" role="region" aria-label="Settings of the server">
        <table>
          <thead>
            <tr>
              <th>Setting</th>
              <th>Value</th>
              <th>From</th>
            </tr>
          </thead>
          <tbody>
            {rows.map(({ name, value, origin }) => (
              <tr key={name} class={origin === "default" ? "dim" : ""}>
                <td>{name}</td>
                <td class="value">{Array.isArray(value) ? value.join(", ") || "–" : String(value ?? "–")}</td>
                <td>{origin}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </details>
  );
}

function stateOf({ waiting, prompt_read, prompt_left_s, prompt_tokens }) {
  if (!waiting) return "answering";
  if (prompt_read === null) return "waiting or reading its prompt";
  if (!prompt_read) return "waiting for its turn";
  return `reading its prompt: ${Math.floor((100 * prompt_read) / prompt_tokens)} %${leftText(prompt_left_s)}`;
}
