"""Markdown as models write it: the parser that terminals and notebooks share, and its HTML.

An answer is foreign text. HTML in it is shown as text, and links lead to the web or to mail only.
Images become links, because fetching an image would tell its server about the answer. The HTML then
passes nh3 (ammonia), which drops everything that is not listed here.
"""

from collections.abc import Sequence
from functools import cache
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.renderer import RendererHTML
    from markdown_it.rules_core import StateCore
    from markdown_it.rules_inline import StateInline
    from markdown_it.token import Token

SCHEMES = {"http", "https", "mailto"}
TAGS = {
    "a", "blockquote", "br", "code", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol",
    "p", "pre", "s", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
}  # fmt: skip
ATTRIBUTES = {"ol": {"start"}, "a": {"href"}, **{tag: {"style"} for tag in ("span", "td", "th")}}
STYLES = {"color", "font-style", "font-weight", "text-align", "text-decoration"}
CODE_STYLE = "friendly"  # of pygments; readable on light ground and on dark
_CLOSING = {"\\(": "\\)", "\\[": "\\]"}


def html_of(text: str) -> str:
    """HTML of Markdown, code highlighted and formulas as they were written."""
    import nh3

    return nh3.clean(
        _html_parser().render(text),
        tags=TAGS,
        attributes=ATTRIBUTES,
        url_schemes=SCHEMES,
        filter_style_properties=STYLES,
        link_rel="noopener noreferrer",
    )


def new_parser() -> "MarkdownIt":
    """A parser of CommonMark with tables and strikethrough, in which formulas are plain text.

    Formulas are between dollars, `\\(` and `\\)`, or `\\[` and `\\]`. Markdown does not change
    escapes, emphasis or lists in them. Images are links.
    """
    from markdown_it import MarkdownIt
    from mdit_py_plugins.dollarmath import dollarmath_plugin
    from mdit_py_plugins.texmath import texmath_plugin

    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    parser.use(dollarmath_plugin, allow_space=False, allow_digits=False, double_inline=True)
    parser.use(texmath_plugin, delimiters="brackets")
    parser.inline.ruler.before("escape", "bracket_math", _bracket_math)
    parser.core.ruler.push("plain_tokens", _as_plain_tokens)
    return parser


@cache
def _html_parser() -> "MarkdownIt":
    parser = new_parser()
    parser.add_render_rule("fence", _fence)
    return parser


def _bracket_math(state: "StateInline", silent: bool) -> bool:
    """A rule for `\\[ x \\]` within a paragraph, which the plugin knows only as a block."""
    opening = state.src[state.pos : state.pos + 2]
    if opening not in _CLOSING:
        return False
    end = state.src.find(_CLOSING[opening], state.pos + 2, state.posMax)
    if end < 0:
        return False
    if not silent:
        state.push("text", "", 0).content = state.src[state.pos : end + 2]
    state.pos = end + 2
    return True


def _as_plain_tokens(state: "StateCore") -> None:
    """Replace formulas by text as it was written, a block by a paragraph, and images by links."""
    tokens: list[Token] = []
    for token in state.tokens:
        if token.children:
            token.children = [plain for child in token.children for plain in _plain(child)]
        tokens += _paragraph(token) if token.type.startswith("math_block") else [token]
    state.tokens = tokens


def _plain(child: "Token") -> "list[Token]":
    from markdown_it.token import Token

    if child.type.startswith("math_inline"):
        return [Token("text", "", 0, content=_as_written(child))]
    if child.type == "image":
        link = Token("link_open", "a", 1, attrs={"href": child.attrs.get("src", "")})
        text = Token("text", "", 0, content=child.content or "image")
        return [link, text, Token("link_close", "a", -1)]
    return [child]


def _as_written(token: "Token") -> str:
    return f"{token.markup}{token.content}{_CLOSING.get(token.markup, token.markup)}"


def _paragraph(block: "Token") -> "list[Token]":
    from markdown_it.token import Token

    text = Token("text", "", 0, content=_as_written(block))
    inline = Token("inline", "", 0, content=text.content, children=[text], map=block.map)
    return [Token("paragraph_open", "p", 1), inline, Token("paragraph_close", "p", -1)]


def _fence(_: "RendererHTML", tokens: "Sequence[Token]", index: int, *__: Any) -> str:
    language = (tokens[index].info.split() or [""])[0]
    return f"<pre><code>{_highlighted(tokens[index].content, language)}</code></pre>\n"


def _highlighted(code: str, language: str) -> str:
    """HTML of code in a language of pygments; plain where it knows none of this name."""
    from pygments import highlight
    from pygments.formatters.html import HtmlFormatter
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        lexer = get_lexer_by_name(language, stripnl=False)
    except ClassNotFound:
        return escape(code)
    form = HtmlFormatter(nowrap=True, noclasses=True, style=CODE_STYLE)
    return str(highlight(code, lexer, form))
