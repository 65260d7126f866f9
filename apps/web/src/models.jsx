// Models: what is on this disk, what the hub has and whether it fits, downloads, conversions.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { request } from "./api.js";
import { bytes, leftText, number, when } from "./format.js";
import { usePolled } from "./poll.js";
import { sidebarOpen } from "./sidebar.jsx";
import { features, notice, refreshModels } from "./store.js";
import { Get, Suggestions, Use } from "./suggestions.jsx";
import { Dialog, IconButton, Meter } from "./widgets.jsx";

const FITS_AT_ONCE = 3; // questions to the hub

export function Models() {
  const { data: jobs, again } = usePolled("/hub/jobs", 1000);
  const [local, setLocal] = useState(null);
  const [converting, setConverting] = useState(null);
  const num_done = jobs?.data.filter((job) => job.state === "done").length;

  async function refresh() {
    try {
      setLocal((await request("/hub/models")).data);
      await refreshModels();
    } catch (error) {
      notice.value = { text: error.message, retry: refresh };
    }
  }
  useEffect(() => {
    if (features.value.hub) refresh();
  }, [num_done, features.value.hub]);

  async function act(path, options) {
    try {
      await request(path, options);
      await again();
    } catch (error) {
      notice.value = { text: error.message };
    }
  }

  return (
    <section class="place">
      <header class="head">
        <IconButton icon="menu" label="Conversations" class="quiet narrow" onClick={() => (sidebarOpen.value = true)} />
        <h1 class="title">Models</h1>
      </header>
      <div class="scroll" tabindex="0" role="region" aria-label="Models">
        <div class="column wide">
          {!features.value.hub && <p class="empty">This server offers only the models that it was started with.</p>}
          {features.value.hub && (
            <>
              <Jobs jobs={jobs?.data ?? []} act={act} />
              <h2>Fits this {features.value.machine}</h2>
              <Suggestions most={6} />
              <h2>On this {features.value.machine}</h2>
              <Local models={local} refresh={refresh} convert={setConverting} />
              <h2>On the Hugging Face hub</h2>
              <Search jobs={jobs?.data ?? []} again={again} />
            </>
          )}
        </div>
      </div>
      {converting && (
        <Convert
          model={converting}
          close={() => setConverting(null)}
          start={(body) => act("/hub/conversions", { body })}
        />
      )}
    </section>
  );
}

// -- jobs -------------------------------------------------------------------------------------------

function Jobs({ jobs, act }) {
  const shown = jobs.filter((job) => job.state !== "cancelled");
  if (!shown.length) return null;
  return (
    <>
      <h2>Downloads and conversions</h2>
      <ul class="cards" aria-label="Downloads and conversions">
        {shown.map((job) => (
          <li key={job.id} class="card">
            <header>
              <h3>{job.name}</h3>
              <span class={`badge ${{ done: "good", failed: "bad" }[job.state] ?? ""}`}>
                {job.kind}: {job.state}
              </span>
            </header>
            {job.state !== "done" && (
              <Meter label={job.step || "starting"} text={progressText(job)} value={job.done} of={job.total} />
            )}
            {job.error && <p class="error">{job.error}</p>}
            {job.kind === "conversion" && job.result && <Report report={job.result} />}
            <div class="actions">
              {job.state === "running" && (
                <button type="button" onClick={() => act(`/hub/jobs/${job.id}`, { body: { action: "pause" } })}>
                  Pause
                </button>
              )}
              {job.state === "paused" && (
                <button type="button" onClick={() => act(`/hub/jobs/${job.id}`, { body: { action: "resume" } })}>
                  Resume
                </button>
              )}
              {["running", "paused", "stopping"].includes(job.state) && (
                <button type="button" class="danger" onClick={() => act(`/hub/jobs/${job.id}`, { body: { action: "cancel" } })}>
                  Cancel
                </button>
              )}
              {job.state === "failed" && (
                <>
                  <button type="button" onClick={() => act(`/hub/jobs/${job.id}`, { body: { action: "dismiss" } })}>
                    Dismiss
                  </button>
                  <button type="button" onClick={() => act(`/hub/jobs/${job.id}`, { body: { action: "resume" } })}>
                    Retry
                  </button>
                </>
              )}
              {job.state === "done" && <Use name={job.name} />}
            </div>
          </li>
        ))}
      </ul>
    </>
  );
}

function progressText({ kind, step, done, total, rate, state }) {
  if (!total) return state;
  const count = kind === "download" || step === "download" ? bytes : number;
  const pace = rate > 0 && state === "running" ? `, ${count(rate)}/s${leftText((total - done) / rate)}` : "";
  return `${count(done)} of ${count(total)} (${Math.floor((100 * done) / total)} %)${pace}`;
}

function Report({ report }) {
  return (
    <div class="report">
      <p>
        {bytes(report.num_bytes)}, {report.bits_per_weight.toFixed(2)} bits per weight, recipe {report.recipe}
        {report.passed ? "" : ": further from the source than it should be"}
      </p>
      {report.logits.map((check) => (
        <p key={check.context}>
          In contexts of {number(check.context)} tokens: KL divergence {check.kl_mean.toFixed(4)} (limit {check.max_kl}), same
          first choice {(100 * check.top1).toFixed(1)} %, perplexity {check.perplexity.toFixed(2)} (source{" "}
          {check.source_perplexity.toFixed(2)})
        </p>
      ))}
      <ul>
        {report.by_source.map((row) => (
          <li key={row.stored + row.format}>
            {row.stored} → {row.format}: {number(row.count)} tensors, {row.relative ? `relative error ${row.relative.toFixed(4)}` : "exact"}
          </li>
        ))}
      </ul>
    </div>
  );
}

// -- this disk ----------------------------------------------------------------------------------------

function Local({ models, refresh, convert }) {
  const [asked, setAsked] = useState(null);
  if (!models) return <p class="empty">Looking…</p>;
  async function remove(path) {
    setAsked(null);
    try {
      await request(path, { method: "DELETE" });
    } catch (error) {
      notice.value = { text: error.message };
    }
    refresh();
  }
  return (
    <div class="table models" tabindex="0" role="region" aria-label="Models on this machine">
      <table>
        <thead>
          <tr>
            <th>Name</th>
            <th class="right">Size</th>
            <th>State</th>
            <th>Changed</th>
            <th>
              <span class="off-screen">Actions</span>
            </th>
          </tr>
        </thead>
        <tbody>
          {models.map((model) => (
            <tr key={model.name}>
              <td class="name">{model.name}</td>
              <td class="right">{bytes(model.size_bytes)}</td>
              <td>
                <span class={`badge ${model.served ? "good" : model.complete ? "" : "bad"}`}>
                  {model.served ? "served" : model.complete ? model.source : "incomplete"}
                </span>
              </td>
              <td class="changed">{when(model.modified_s)}</td>
              <td>
                <div class="row-actions">
                  {model.complete && <Use name={model.name} />}
                  {model.complete && (
                    <button type="button" aria-label={`Convert ${model.name}`} onClick={() => convert(model.name)}>
                      Convert
                    </button>
                  )}
                  {model.added && (
                    <button
                      type="button"
                      aria-label={`Serve ${model.name} no longer`}
                      onClick={() => remove(`/hub/serve/${model.name}`)}
                    >
                      Serve no longer
                    </button>
                  )}
                  {!model.served && model.source !== "bundled" && (
                    <IconButton icon="bin" label={`Delete ${model.name}`} onClick={() => setAsked(model)} />
                  )}
                </div>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
      {asked && (
        <Dialog title="Delete a model" onClose={() => setAsked(null)}>
          <p>
            {asked.name} takes {bytes(asked.size_bytes)} on this disk.
          </p>
          <div class="actions">
            <button type="button" class="danger" onClick={() => remove(`/hub/models/${asked.name}`)}>
              Delete it
            </button>
          </div>
        </Dialog>
      )}
    </div>
  );
}

function Convert({ model, close, start }) {
  const [recipe, setRecipe] = useState("4bit");
  const base = model.split("/").at(-1);
  function submit(event) {
    event.preventDefault();
    const form = new FormData(event.target);
    start({ model, recipe, name: form.get("name"), check: form.has("check") });
    close();
  }
  return (
    <Dialog title={`Convert ${model}`} onClose={close}>
      <form onSubmit={submit}>
        <label>
          Recipe
          <select value={recipe} onChange={(event) => setRecipe(event.target.value)}>
            {(features.value.recipes ?? []).map((name) => (
              <option key={name}>{name}</option>
            ))}
          </select>
        </label>
        <label>
          Name of the result
          <input name="name" required pattern="[A-Za-z0-9][A-Za-z0-9._\-]*" defaultValue={`${base}-${recipe}`} key={recipe} />
        </label>
        <label class="check">
          <input type="checkbox" name="check" defaultChecked /> Compare its logits with the source's (takes longer)
        </label>
        <div class="actions">
          <button class="primary">Convert</button>
        </div>
      </form>
    </Dialog>
  );
}

// -- the hub ------------------------------------------------------------------------------------------

function Search({ jobs, again }) {
  const [found, setFound] = useState(null);
  const [fits, setFits] = useState(new Map());
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const place = useRef();

  // The search is the last thing on the page: what it finds would come below the window.
  useLayoutEffect(() => {
    if (found || error) place.current.scrollIntoView({ block: "nearest" });
  }, [found, error]);

  async function submit(event) {
    event?.preventDefault();
    const form = new FormData(event.target);
    setBusy(true);
    setError(null);
    try {
      const all = form.has("all") ? "&all=1" : "";
      const { data } = await request(`/hub/search?q=${encodeURIComponent(form.get("words"))}${all}`);
      setFound(data);
      look(data.map((each) => each.name));
    } catch (problem) {
      setError(problem.message);
      setFound(null);
    }
    setBusy(false);
  }

  function look(names) {
    const waiting = [...names];
    async function next() {
      for (let name = waiting.shift(); name; name = waiting.shift()) {
        let fit;
        try {
          fit = await request(`/hub/fit?model=${encodeURIComponent(name)}`);
        } catch (problem) {
          fit = { verdict: "unknown", text: problem.message };
        }
        setFits((all) => new Map(all).set(name, fit));
      }
    }
    for (let at = 0; at < FITS_AT_ONCE; at++) next();
  }

  return (
    <div ref={place}>
      <form class="hub-search" role="search" onSubmit={submit}>
        <input type="search" name="words" placeholder="Qwen3 8B" aria-label="Search the hub" />
        <label class="check">
          <input type="checkbox" name="all" /> include models in other formats
        </label>
        <button disabled={busy}>
          {busy ? "Searching…" : "Search"}
        </button>
      </form>
      {error && (
        <p class="error" role="alert">
          {error}
        </p>
      )}
      {found && !found.length && <p class="empty">The hub has no such model with safetensors.</p>}
      {found && (
        <ul class="cards" aria-label="Models of the hub">
          {found.map((each) => (
            <Found key={each.name} each={each} fit={fits.get(each.name)} jobs={jobs} again={again} />
          ))}
        </ul>
      )}
    </div>
  );
}

const VERDICTS = { fits: "good", short: "good", "too large": "bad", unsupported: "bad", unknown: "" };

function Found({ each, fit, jobs, again }) {
  return (
    <li class="card">
      <header>
        <h3>{each.name}</h3>
        {fit && <span class={`badge ${VERDICTS[fit.verdict]}`}>{fit.verdict === "short" ? "fits, shorter" : fit.verdict}</span>}
      </header>
      <p class="source">
        {number(each.downloads)} downloads · {number(each.likes)} likes
        {each.parameters ? ` · ${billions(each.parameters)} parameters` : ""}
        {each.updated_s ? ` · ${when(each.updated_s)}` : ""}
        {each.gated ? " · gated: needs a token" : ""}
      </p>
      <p class="fit">{fit ? fit.text : "Does it fit? Reading sizes…"}</p>
      <Get {...each} jobs={jobs} again={again} fits={["fits", "short"].includes(fit?.verdict)} />
    </li>
  );
}

function billions(count) {
  if (count < 1e6) return number(count);
  return count >= 1e9 ? `${(count / 1e9).toFixed(1)} billion` : `${(count / 1e6).toFixed(0)} million`;
}
