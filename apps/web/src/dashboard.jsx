// What the server does now: memory of the models, the batch, errors, settings.
import { useEffect, useRef, useState } from "preact/hooks";
import { request } from "./api.js";
import { bytes, number, seconds, when } from "./format.js";
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
      <Machine state={data} rates={rates} />
      <h2>Batch</h2>
      <Batch state={data} />
      <h2>Models</h2>
      <div class="cards">
        {data.models.map((model) => (
          <ModelCard key={model.state.name} model={model} rate={rates.models.get(model.state.name)} again={again} />
        ))}
      </div>
      <h2>Last warnings and errors</h2>
      <Problems problems={data.problems} />
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

function Machine({ state, rates }) {
  const running = state.requests.filter((each) => !each.waiting).length;
  const waiting = state.requests.length - running;
  const counters = state.models.map((each) => each.counters);
  const sum = (name) => counters.reduce((total, each) => total + each[name], 0);
  const prompts = sum("prompt_tokens");
  const cached = sum("cached_tokens");
  const rate = rates.total.at(-1) ?? 0;
  const loaded = state.models.filter((each) => each.engine);
  const weights = loaded.reduce((total, each) => total + each.state.weights_bytes, 0);
  const used = loaded.reduce((total, each) => total + each.engine.kv_used_bytes, 0);
  const kept = loaded.reduce((total, each) => total + each.engine.kv_cached_bytes, 0);
  return (
    <>
      <ul class="figures">
        <Figure value={rate.toFixed(rate < 100 ? 1 : 0)} unit="tokens/s" label="now" />
        <Figure value={running} unit={running === 1 ? "request" : "requests"} label="running" />
        <Figure value={waiting} unit={waiting === 1 ? "request" : "requests"} label="waiting" />
        <Figure
          value={prompts ? `${Math.round((100 * cached) / prompts)} %` : "–"}
          unit={`${number(cached)} tokens`}
          label="of prompts came from the prefix cache"
        />
      </ul>
      <Spark samples={rates.total} />
      <Meter
        label="Memory of models"
        text={`${bytes(weights)} weights, ${bytes(used)} KV cache in use, ${bytes(kept)} kept as prefixes, of ${bytes(state.memory_limit_bytes)}`}
        of={state.memory_limit_bytes}
        parts={[
          { kind: "weights", value: weights },
          { kind: "used", value: used },
          { kind: "cached", value: kept },
        ]}
      />
      <Meter
        label="Arrays in use by MLX"
        text={`${bytes(state.memory_active_bytes)} now, ${bytes(state.memory_peak_bytes)} at most; this machine has ${bytes(state.machine_bytes)}`}
        value={state.memory_active_bytes}
        of={state.machine_bytes}
      />
    </>
  );
}

function Figure({ value, unit, label }) {
  return (
    <li>
      <b>{value}</b> <span>{unit}</span>
      <small>{label}</small>
    </li>
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

function Batch({ state }) {
  if (!state.requests.length) return <p class="empty">Nothing runs.</p>;
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
                <span class={`badge ${each.waiting ? "" : "good"}`}>{each.waiting ? "reads its prompt or waits" : "answers"}</span>
              </td>
              <td class="right">{number(each.prompt_tokens)}</td>
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

function kvText([keys, values]) {
  if (keys === null && values === null) return "KV cache as computed";
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
        {state.aliases.length ? ` · also ${state.aliases.join(", ")}` : ""}
      </p>
      {engine && (
        <Meter
          label="KV cache"
          text={`${bytes(engine.kv_used_bytes)} used, ${bytes(engine.kv_cached_bytes)} kept as prefixes, of ${bytes(engine.kv_limit_bytes)}`}
          of={engine.kv_limit_bytes}
          parts={[
            { kind: "used", value: engine.kv_used_bytes },
            { kind: "cached", value: engine.kv_cached_bytes },
          ]}
        />
      )}
      <dl class="rows">
        <Row name="Weights" value={bytes(state.weights_bytes)} />
        {engine?.disk_bytes != null && <Row name="Prefixes on disk" value={bytes(engine.disk_bytes)} />}
        <Row name="In the batch" value={`${state.requests_running} running, ${state.requests_waiting} waiting`} />
        {rate && loaded && (
          <Row
            name="Rate"
            value={`${rate.perSecond.toFixed(1)} tokens/s${rate.perStep ? `, ${rate.perStep.toFixed(1)} tokens a step` : ""}`}
          />
        )}
        <Row name="Prefix hits" value={`${number(counters.cached_tokens)} of ${number(counters.prompt_tokens)} prompt tokens`} />
        <Row name="Answered" value={`${number(counters.generation_tokens)} tokens`} />
        {engine && engine.preemptions > 0 && <Row name="Preempted" value={number(engine.preemptions)} />}
        {Object.entries(engine?.failed_proposals ?? {}).map(([source, why]) => (
          <Row key={source} name={`No proposals by ${source}`} value={why} />
        ))}
        {loaded && (
          <Row name="Unloads in" value={state.pinned ? "never: pinned" : state.ttl_left_s == null ? "never" : seconds(state.ttl_left_s)} />
        )}
      </dl>
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
  if (!problems.length) return <p class="empty">None since the server started.</p>;
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
