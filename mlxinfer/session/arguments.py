"""Inputs from the keyword arguments of LLM's methods."""

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

from ..core import SamplingParams, SamplingValues
from ..errors import InvalidRequestError, check_names, wrong_value
from .inputs import ENDS, ChatInput, Message, PromptLike, ResponseFormat, TextInput, check_sequence


class TextArguments(SamplingValues, total=False):
    """Keyword arguments of LLM.stream, documented at LLM.generate."""

    response_format: ResponseFormat | None
    adapter: str | None


class ChatArguments(TextArguments, total=False):
    """Keyword arguments of LLM.chat, documented there."""

    tools: Sequence[Message | Callable[..., Any]] | None
    tool_choice: str | Message
    parallel_tool_calls: bool
    chat_template_kwargs: Mapping[str, Any] | None
    images: Sequence[Any]
    videos: Sequence[Any]


def text_input(
    method: str, prompt: PromptLike, params: SamplingParams | None, options: Mapping[str, Any]
) -> TextInput:
    arguments, sampling = _split(method, options, TextArguments)
    return TextInput(prompt=prompt, params=params, sampling=sampling, **arguments)


def chat_input(
    method: str,
    messages: str | Sequence[Message],
    params: SamplingParams | None,
    options: Mapping[str, Any],
) -> ChatInput:
    arguments, sampling = _split(method, options, ChatArguments)
    variables = arguments.pop("chat_template_kwargs", None) or {}
    if variables and isinstance(variables, Mapping):  # anything else is refused by the input
        arguments |= {ENDS[name]: variables[name] for name in ENDS if name in variables}
        variables = {name: value for name, value in variables.items() if name not in ENDS}
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    tools = arguments.get("tools")
    if isinstance(tools, Sequence) and any(map(callable, tools)):
        from ..text.tools.functions import with_schemas

        arguments["tools"] = with_schemas(tools)
    images, videos = arguments.pop("images", ()), arguments.pop("videos", ())
    if images or videos:
        messages = with_images(messages, images, videos)
    return ChatInput(
        messages=messages,
        params=params,
        sampling=sampling,
        template_variables=variables,
        **arguments,
    )


def _split(
    method: str, options: Mapping[str, Any], known: type
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a method: those of its own, and those that are fields of SamplingParams."""
    check_names(method, options, known.__annotations__)
    arguments: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    for name, value in options.items():
        (sampling if name in SamplingValues.__annotations__ else arguments)[name] = value
    return arguments, sampling


def text_inputs(
    method: str,
    prompts: Sequence[Any],
    params: Any,
    form: Any,
    adapter: Any,
    sampling: Mapping[str, Any],
) -> list[TextInput]:
    """An input for each prompt; `params`, `form` and `adapter`: one for all prompts, or a list."""
    count = len(prompts)
    settings = zip(
        prompts,
        one_each(params, count, SamplingParams, "params", "SamplingParams(...)"),
        one_each(form, count, Mapping, "response_format", '{"type": ...}'),
        one_each(adapter, count, str, "adapter", "a name"),
        strict=True,
    )
    return [
        text_input(method, prompt, given, {**sampling, "response_format": form, "adapter": name})
        for prompt, given, form, name in settings
    ]


def one_each(given: Any, count: int, kind: type, name: str, wanted: str) -> list[Any]:
    if given is None or isinstance(given, kind):
        return [given] * count
    if not isinstance(given, list | tuple):
        raise wrong_value(name, given, f"{wanted} for all prompts, or a list with one for each")
    if len(given) != count:
        raise InvalidRequestError(
            f"There are {count} prompts and {len(given)} in {name}; give one, or one each.",
            param=name,
        )
    return list(given)


def with_images(messages: Sequence[Message], images: object, videos: object = ()) -> list[Message]:
    """The messages with pictures and videos before the text of the last one of the user.

    Args:
        videos: behind these, each a file or a list of frames.

    Raises:
        InvalidRequestError: `images` or `videos` is no list, or no message is the user's.
    """
    for name, given in (("images", images), ("videos", videos)):
        if not isinstance(given, list | tuple):
            expected = "pictures" if name == "images" else "videos, each a file or a list of frames"
            raise wrong_value(name, given, f"a list of {expected}")
    assert isinstance(images, list | tuple)
    assert isinstance(videos, list | tuple)
    seen = list(messages)
    roles = [isinstance(message, Mapping) and message.get("role") == "user" for message in seen]
    shown_first = [{"type": "image", "image": image} for image in images]
    shown_first += [
        {"type": "video", "frames" if isinstance(video, list | tuple) else "video": video}
        for video in videos
    ]
    if shown_first and True not in roles:
        name = "images" if images else "videos"
        raise InvalidRequestError(f"{name} go with a message of the user.", param=name)
    if shown_first:
        place = len(roles) - 1 - roles[::-1].index(True)
        content = seen[place].get("content") or []
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else [*content]
        seen[place] = {**seen[place], "content": [*shown_first, *parts]}
    return seen


def is_one_prompt(prompts: Any) -> bool:
    """Whether this is a text or a flat list of token ids, and not a list of such prompts."""
    if isinstance(prompts, str):
        return True
    check_sequence(prompts)
    return len(prompts) > 0 and all(type(i) is int or isinstance(i, Integral) for i in prompts)
