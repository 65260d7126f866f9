// Formulas in markdown: $…$ and \(…\) within a line, $$…$$ and \[…\] as blocks of their own.
// They become empty elements with the source in data-tex, which the page fills with KaTeX.

const INLINE = [
  ["\\(", "\\)"],
  ["$", "$"],
];
const BLOCK = [
  ["\\[", "\\]"],
  ["$$", "$$"],
];

export function math(md) {
  md.inline.ruler.before("escape", "math", inlineMath);
  md.block.ruler.before("fence", "math", blockMath, { alt: ["paragraph", "reference", "blockquote", "list"] });
  md.renderer.rules.math = (tokens, at) => {
    const { content, block } = tokens[at];
    const tex = md.utils.escapeHtml(content);
    return block
      ? `<div class="math" data-display="1" data-tex="${tex}"></div>\n`
      : `<span class="math" data-tex="${tex}"></span>`;
  };
}

function inlineMath(state, silent) {
  const { src, pos, posMax } = state;
  for (const [open, close] of [...BLOCK, ...INLINE]) {
    if (!src.startsWith(open, pos)) continue;
    const start = pos + open.length;
    const end = src.indexOf(close, start);
    if (end < 0 || end + close.length > posMax) continue;
    const content = src.slice(start, end);
    if (!content.trim()) continue;
    if (open === "$" && !isFormula(content, src[end + 1])) continue;
    if (!silent) state.push("math", "math", 0).content = content;
    state.pos = end + close.length;
    return true;
  }
  return false;
}

// "$5 and $6" is money: no space inside of the signs, and no digit after the second.
function isFormula(content, next) {
  return !/^\s|\s$|\n\n/.test(content) && !(next >= "0" && next <= "9");
}

function blockMath(state, startLine, endLine, silent) {
  const start = state.bMarks[startLine] + state.tShift[startLine];
  const first = state.src.slice(start, state.eMarks[startLine]);
  const pair = BLOCK.find(([open]) => first.startsWith(open));
  if (!pair) return false;
  const [open, close] = pair;
  for (let line = startLine; line < endLine; line++) {
    const from = line === startLine ? start + open.length : state.bMarks[line];
    const text = state.src.slice(from, state.eMarks[line]);
    const at = text.indexOf(close);
    if (at < 0) continue;
    if (text.slice(at + close.length).trim()) return false; // more follows: it is within a line
    if (silent) return true;
    const token = state.push("math", "math", 0);
    token.block = true;
    token.content = state.src.slice(start + open.length, from + at);
    token.map = [startLine, line + 1];
    state.line = line + 1;
    return true;
  }
  return false;
}
