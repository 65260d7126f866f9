"""Options to sources, controller and proposer: the one place that assembles them."""

from ..config import EngineConfig
from ..engine.kernels import choose_on_this_machine
from ..models.decoder import LanguageModel
from ..sampling.rejection import DrawnProposals, RejectionChoice
from ..sampling.sampler import Choice
from .controller import Controller, FixedDepth, Policy
from .draft import DraftProposer
from .forced import ForcedProposer
from .ngram import NgramProposer
from .options import SpeculationOptions
from .source import Score, Source
from .speculation import Speculation


def make_speculation(
    options: SpeculationOptions,
    model: LanguageModel | None = None,
    draft: LanguageModel | None = None,
    draft_config: EngineConfig | None = None,
) -> Speculation:
    """What the options ask for; to be called on the thread that runs the model.

    Args:
        options: not off.
        model, draft, draft_config: with a draft model, these two and the sizes of the latter.
    """

    drawn: DrawnProposals | None = None
    choice: Choice | None = None
    if options.acceptance == "rejection" and model is not None:
        drawn = DrawnProposals()
        choice = RejectionChoice(drawn, model.config.vocab_size)

    def sources(score: Score) -> list[Source]:
        made: list[Source] = [ForcedProposer()]
        if options.method in ("auto", "ngram"):
            made.append(NgramProposer(score))
        if model is not None and draft is not None and draft_config is not None:
            made.append(
                DraftProposer(
                    draft,
                    draft_config,
                    vocab_size=model.config.vocab_size,
                    cost=draft.num_bytes / model.num_bytes,
                    kernels=choose_on_this_machine(),
                    drawn=drawn,
                )
            )
        return made

    policy: Policy = Controller(max_depth=options.depth)
    if options.fixed:
        policy = FixedDepth(options.depth)
    return Speculation(
        sources, policy, max_depth=options.depth, method=options.method, choice=choice
    )
