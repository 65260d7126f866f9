// Reads a path again and again while something shows it.
import { useEffect, useState } from "preact/hooks";
import { request } from "./api.js";

export function usePolled(path, every_ms) {
  const [found, setFound] = useState({ data: null, error: null, again: () => {} });
  useEffect(() => {
    let timer;
    let gone = false;
    async function read() {
      clearTimeout(timer);
      try {
        const data = await request(path);
        if (!gone) setFound({ data, error: null, again: read });
      } catch (error) {
        const said = error.code === "offline" ? null : error.message; // the page says it
        if (!gone) setFound((before) => ({ ...before, error: said, again: read }));
      }
      if (!gone) timer = setTimeout(read, document.hidden ? 5 * every_ms : every_ms);
    }
    read();
    return () => {
      gone = true;
      clearTimeout(timer);
    };
  }, [path, every_ms]);
  return found;
}
