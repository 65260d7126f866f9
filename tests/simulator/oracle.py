"""A model made of hashes: what it answers is a closed form of a request's own tokens.

A token's key in a layer is a hash of what the token saw in the layers before; what it sees in a
layer is the sum of the keys that its group's window and sinks let it see. So a key that is wrong,
stale, missing or of another sequence changes every later token, in later layers too.
"""

from collections.abc import Iterator, Sequence

from mlxinfer.cache.pages import AttentionWindow
from mlxinfer.core import FinishReason, Request

ROUNDS = 2  # layers of every group; they alternate, as in a real model


def layer_groups(num_groups: int) -> list[int]:
    """The group of each layer."""
    return list(range(num_groups)) * ROUNDS


def embed(token: int, position: int) -> int:
    return hash((token, position))


def key(layer: int, position: int, x: int) -> int:
    return hash((layer, position, x))


def mix(x: int, seen: int) -> int:
    return hash((x, seen))


State = tuple[int, int]  # of the two recurrent layers, one before all others and one after
NO_STATE: State = (0, 0)


def next_state(state: int, layer: int, x: int) -> int:
    return hash((state, layer, x))


def sample(x: int, seed: int, output_index: int, history: int, vocab: int) -> int:
    """The next token; `history` is the sum of all tokens before it, as penalties would see them."""
    return hash((x, seed, output_index, history)) % vocab


class Rules:
    """A grammar of hashes: what comes next depends on all that was said, in its order."""

    def __init__(self) -> None:
        self.said: list[int] = []

    problem = None
    accepting = finished = False

    @property
    def state(self) -> int:
        return hash(tuple(self.said))

    def accept(self, token: int) -> None:
        self.said.append(token)

    def fork(self) -> "Rules":
        other = Rules()
        other.said = list(self.said)
        return other


class Oracle:
    """One request alone: its tokens, without end, and what each position computes.

    Windows follow their definition, by sums over ranges, and share no code with the package.
    """

    def __init__(
        self,
        windows: Sequence[AttentionWindow],
        prompt_ids: Sequence[int],
        *,
        seed: int,
        vocab: int,
        constrained: bool = False,
        recurrent: bool = False,
        history: int | None = None,
    ) -> None:
        self._recurrent = recurrent
        # What is known of the prompt's tokens where key ids of pictures stand in `prompt_ids`.
        self._more = 0 if history is None else history - sum(prompt_ids)
        self._states = [NO_STATE]  # after the first n positions
        self.tokens = list(prompt_ids)
        self._num_prompt = len(prompt_ids)
        self._seed, self._vocab = seed, vocab
        self._rules = Rules() if constrained else None
        self._reaches = [windows[g] for g in layer_groups(len(windows))]
        self._sums = [[0] for _ in self._reaches]  # by layer: of the keys of the first n positions
        self._hidden: list[int] = []

    def hidden(self, position: int) -> int:
        """What the last layer gives at a position."""
        self._compute(position)
        return self._hidden[position]

    def keys(self, position: int) -> list[int]:
        """What each layer keeps of a position."""
        self._compute(position)
        return [sums[position + 1] - sums[position] for sums in self._sums]

    def state(self, num_tokens: int) -> State:
        """The states after the first `num_tokens` positions."""
        self._compute(num_tokens - 1)
        return self._states[num_tokens]

    def token(self, position: int) -> int:
        """The token at a position, of prompt or answer."""
        if position == len(self.tokens):
            self._compute(position - 1)
            self._append()
        self._compute(position)
        return self.tokens[position]

    def answer(self, request: Request, max_output: int) -> tuple[list[int], FinishReason]:
        """All tokens of the answer, and why it ends."""
        answer: list[int] = []
        for token in self._stream():
            answer.append(token)
            if token in request.stop_ids and len(answer) > request.params.min_tokens:
                return answer, FinishReason.STOP
            if len(answer) == max_output:
                break
        return answer, FinishReason.LENGTH

    def _stream(self) -> Iterator[int]:
        position = self._num_prompt - 1
        while True:
            self._compute(position)
            position += 1
            if position == len(self.tokens):
                self._append()
            yield self.tokens[position]

    def _append(self) -> None:
        index = len(self.tokens) - self._num_prompt
        history = sum(self.tokens) + self._more + (self._rules.state if self._rules else 0)
        self.tokens.append(sample(self._hidden[-1], self._seed, index, history, self._vocab))
        if self._rules:
            self._rules.said.append(self.tokens[-1])

    def _compute(self, last: int) -> None:
        for position in range(len(self._hidden), last + 1):
            if position == len(self.tokens):
                self._append()
            x = embed(self.tokens[position], position)
            before, after = self._states[-1]
            if self._recurrent:
                before = next_state(before, 0, x)
                x = mix(x, before)
            for layer, (reach, sums) in enumerate(zip(self._reaches, self._sums, strict=True)):
                sums.append(sums[-1] + key(layer, position, x))
                x = mix(x, _seen(sums, reach))
            if self._recurrent:
                after = next_state(after, 1, x)
                x = mix(x, after)
            self._states.append((before, after))
            self._hidden.append(x)


def _seen(sums: list[int], window: AttentionWindow) -> int:
    """Sum of the keys that the newest position sees."""
    num_keys = len(sums) - 1
    if window.size is None:
        return sums[-1]
    lowest = max(num_keys - window.size, 0)
    return sums[-1] - sums[lowest] + sums[min(window.sinks, lowest)]
