// Models to begin with that fit the machine of the server, as cards.
import { useEffect, useState } from "preact/hooks";
import { request } from "./api.js";
import { bytes, number } from "./format.js";
import { address } from "./place.js";
import { usePolled } from "./poll.js";
import { chooseModel, notice, refreshModels } from "./store.js";

const TASKS = {
  ...{ chat: "conversation", code: "code", reasoning: "reasoning", tools: "calling tools" },
  vision: "pictures",
};

export function Suggestions({ most, tells = true }) {
  const [found, setFound] = useState(null);
  const [all, setAll] = useState(false);
  const { data: jobs, again } = usePolled("/hub/jobs", 1000);
  const num_done = jobs?.data.filter((job) => job.state === "done").length;
  useEffect(() => {
    request("/hub/suggestions").then(({ data }) => setFound(data), () => setFound([]));
  }, [num_done]);
  if (!found) return <p class="empty">Looking…</p>;
  if (!found.length) return <p class="empty">No model of our table fits this machine.</p>;
  return (
    <>
      <ul class="cards suggestions" aria-label="Models that fit">
        {found.slice(0, all ? undefined : most).map((each, at) => (
          <li key={each.name} class="card">
            <header>
              <h3>{each.name.split("/").at(-1)}</h3>
              {at === 0 && <span class="badge good">best balance</span>}
            </header>
            <p>Good at {each.tasks.map((task) => TASKS[task]).join(", ")}</p>
            <p class="source">{factsOf(each)}</p>
            <Get {...each} jobs={jobs?.data ?? []} again={again} first={at === 0} tells={tells} />
          </li>
        ))}
      </ul>
      {!all && found.length > most && (
        <button type="button" class="quiet more" onClick={() => setAll(true)}>
          Show all {found.length}
        </button>
      )}
    </>
  );
}

function factsOf({ weights_bytes, longest_context, tokens_per_s }) {
  const facts = [bytes(weights_bytes), `${number(longest_context)} tokens of context fit`];
  if (tokens_per_s) {
    const [least, largest] = tokens_per_s;
    facts.push(`at most ${least === largest ? least : `${least} to ${largest}`} tokens/s (estimate)`);
  }
  return facts.join(" · ");
}

// Download a model of the hub, see how far it is or why it failed, or chat with it.
export function Get({ name, here, jobs, again, fits = true, first = false, tells = true }) {
  const job = jobs.find((each) => each.kind === "download" && each.name === name && each.state !== "cancelled");
  const state = job?.state;
  if (here || state === "done") {
    return (
      <div class="actions">
        <Use name={name} first={first} />
      </div>
    );
  }
  async function download() {
    try {
      await request("/hub/downloads", { body: { model: name } });
      await again();
    } catch (error) {
      notice.value = { text: error.message };
    }
  }
  const share = job?.total ? ` ${Math.floor((100 * job.done) / job.total)} %` : "…";
  const begun = here === false || state === "paused";
  return (
    <>
      {state === "failed" && tells && (
        <p class="error" role="alert">
          {job.error}
        </p>
      )}
      <div class="actions">
        <button
          type="button"
          class={fits && first ? "primary" : ""}
          disabled={["running", "stopping"].includes(state)}
          aria-label={`Download ${name}`}
          onClick={download}
        >
          {state === "running" ? `Downloading${share}` : begun ? "Go on with the download" : "Download"}
        </button>
      </div>
    </>
  );
}

export function Use({ name, first }) {
  async function onClick() {
    await refreshModels();
    await chooseModel(name);
    location.hash = address.value;
  }
  return (
    <button type="button" class={first ? "primary" : ""} onClick={onClick}>
      Chat with it
    </button>
  );
}
