// What a model writes, as clean HTML: markdown without HTML of its own, sanitised all the same.
// A text is split into its top-level blocks, so that a stream redraws the last of them only.
import DOMPurify from "dompurify";
import hljs from "highlight.js/lib/common";
import katex from "katex";
import MarkdownIt from "markdown-it";
import { math } from "./math.js";

export const MAX_CHARS = 200_000; // of a text that is drawn as markdown; longer ones stay plain
const MAX_HIGHLIGHTED = 40_000; // characters of a code block
const LINKS = /^(https?:|mailto:)/i;

// Models end a line where they mean a new one, in addresses and verses, so breaks are kept.
const md = new MarkdownIt({ html: false, linkify: true, breaks: true, highlight });
md.use(math);
md.core.ruler.after("inline", "tasks", markTasks);
md.core.ruler.push("directions", markDirections);
md.validateLink = (url) => LINKS.test(url);
md.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
md.renderer.rules.fence = (tokens, at) => codeBlock(tokens[at].content, tokens[at].info.trim());
md.renderer.rules.code_block = (tokens, at) => codeBlock(tokens[at].content, "");
md.renderer.rules.table_open = () => '<div class="table" tabindex="0"><table>\n';
md.renderer.rules.table_close = () => "</table></div>\n";
for (const rule of ["td_open", "th_open"]) {
  md.renderer.rules[rule] = (tokens, at) => {
    const side = /text-align:(\w+)/.exec(tokens[at].attrGet("style") ?? "")?.[1];
    return `<${tokens[at].tag}${side ? ` class="${side}"` : ""} dir="auto">`;
  };
}
md.renderer.rules.image = (tokens, at) => {
  // an image would fetch its address, and could carry the conversation in it
  const url = tokens[at].attrGet("src");
  const label = md.utils.escapeHtml(tokens[at].content || url);
  return `<a href="${md.utils.escapeHtml(url)}">${label}</a>`;
};

// Items that begin with [ ] or [x] are tasks.
function markTasks({ tokens }) {
  for (let at = 2; at < tokens.length; at++) {
    if (tokens[at].type !== "inline" || tokens[at - 2].type !== "list_item_open") continue;
    const [first] = tokens[at].children;
    const found = first?.type === "text" && /^\[([ xX])\] /.exec(first.content);
    if (!found) continue;
    first.content = `${found[1] === " " ? "☐" : "☑"} ${first.content.slice(4)}`;
    tokens[at - 2].attrSet("class", "task");
  }
}

// Every block is written from the right if its language is. Blocks in it follow it: a list or quote
// does not look into elements that have directions of their own.
function markDirections({ tokens }) {
  for (const token of tokens) {
    const isBlock = /^(paragraph|heading|bullet_list|ordered_list|blockquote)_open$/.test(token.type);
    if (isBlock && !token.level) token.attrSet("dir", "auto");
  }
}

function highlight(code, info) {
  const language = info.split(/\s/)[0].toLowerCase();
  if (!hljs.getLanguage(language) || code.length > MAX_HIGHLIGHTED) return md.utils.escapeHtml(code);
  return hljs.highlight(code, { language, ignoreIllegals: true }).value;
}

function codeBlock(code, info) {
  const label = md.utils.escapeHtml(info.split(/\s/)[0].slice(0, 40));
  return (
    `<div class="code"><div class="code-bar"><span>${label}</span>` +
    '<button type="button" class="quiet" data-copy="code">Copy</button></div>' +
    `<pre tabindex="0"><code>${highlight(code, info)}</code></pre></div>\n`
  );
}

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});
const CLEAN = {
  ALLOWED_TAGS: (
    "a b blockquote br button code del div em h1 h2 h3 h4 h5 h6 hr i li ol p pre s span strong " +
    "table tbody td th thead tr ul"
  ).split(" "),
  ALLOWED_ATTR: "class data-copy data-display data-tex dir href rel start tabindex target type".split(" "),
  ALLOW_DATA_ATTR: false,
  RETURN_TRUSTED_TYPE: true,
};

// The top-level blocks of a text: [{ key, html() }]. Blocks with one key look the same.
export function blocksOf(text) {
  const env = {};
  const tokens = md.parse(text, env);
  const lines = text.split("\n");
  const references = env.references ? JSON.stringify(env.references) : "";
  const blocks = [];
  for (let start = 0; start < tokens.length; ) {
    let end = start + 1;
    for (let depth = tokens[start].nesting; depth > 0; end++) depth += tokens[end].nesting;
    const slice = tokens.slice(start, end);
    const [from, to] = tokens[start].map ?? [0, lines.length];
    blocks.push({
      key: `${tokens[start].type}\n${lines.slice(from, to).join("\n")}${references}`,
      html: () => DOMPurify.sanitize(md.renderer.render(slice, md.options, env), CLEAN),
    });
    start = end;
  }
  return blocks;
}

// Fills the formulas below an element. KaTeX builds elements, so no HTML of it needs cleaning.
export function drawFormulas(element) {
  for (const place of element.querySelectorAll(".math")) {
    const { tex, display } = place.dataset;
    try {
      katex.render(tex, place, { displayMode: !!display, maxExpand: 200, maxSize: 20, strict: "ignore" });
    } catch {
      place.textContent = display ? `$$${tex}$$` : `$${tex}$`;
      place.classList.add("broken");
    }
  }
}
