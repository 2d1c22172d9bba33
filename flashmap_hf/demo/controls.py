"""What a visitor chose, checked, and what it means for `generate`."""

from dataclasses import dataclass

from flashmap_hf import FlashMapGenerationConfig, drafters, prompts, targets
from flashmap_hf.generation_config import Verification
from flashmap_hf.runs import Settings

MOST_TOKENS = 1024  # one visitor must not hold the device for an hour
TREE_SIZE = 16  # nodes, where a tree is asked for


@dataclass(frozen=True)
class Controls:
    """One race. Empty names stand for the embedded target and the drafter trained for it; None: the drafter's own.

    adaptive: every step chooses what to draft; block_size and tree then do not count.

    Raises:
        ValueError: a value cannot work; names it.
    """

    prompt: str
    target: str = ""
    drafter: str = ""
    block_size: int | None = None
    num_steps: int | None = None
    temperature: float = 0.0
    verification: Verification = "auto"
    tree: bool = False
    adaptive: bool = False
    max_new_tokens: int = 96
    seed: int = 0

    def __post_init__(self) -> None:
        prompts.check_prompt(self.prompt)
        if self.block_size is not None and self.block_size < 1:
            raise ValueError(f"K must be at least 1, not {self.block_size}")
        if self.max_new_tokens > MOST_TOKENS:
            raise ValueError(f"max tokens must be at most {MOST_TOKENS}, not {self.max_new_tokens}")
        self.drafted()

    @property
    def target_name(self) -> str:
        return self.target.strip() or targets.SMOLLM2.name

    @property
    def drafter_name(self) -> str:
        """Folder or Hub id.

        Raises:
            ValueError: none was named, and none is known for the target.
        """
        try:
            return self.drafter.strip() or str(drafters.default_drafter(self.target_name))
        except ValueError as error:
            raise ValueError(f"no drafter is known for {self.target_name!r}: name one under Drafter") from error

    @property
    def settings(self) -> Settings:
        """Of both sides. The accept rule is one for sampling, so greedy decoding leaves it aside."""
        rule: Verification = self.verification if self.temperature else "auto"
        return Settings(self.max_new_tokens, self.temperature, rule, self.seed)

    def plain(self) -> FlashMapGenerationConfig:
        """The configuration of the plain side."""
        return self.settings.generation_config()

    def drafted(self) -> FlashMapGenerationConfig:
        """The configuration of the side with the drafter; the one place where the drafting options are set."""
        size = None if self.adaptive else self.block_size
        tree = TREE_SIZE if self.tree and not self.adaptive else None
        return self.settings.generation_config(
            num_steps=self.num_steps, num_assistant_tokens=size, tree_size=tree, adaptive=self.adaptive
        )
