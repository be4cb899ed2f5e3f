"""`python -m experiments.generate run=KEY prompt='To be'`: prompts, and what a trained model says behind them.

    python -m experiments.generate run=KEY prompt='ROMEO:' max_new_tokens=300 temperature=0.8 top_p=0.95
        a run of task=text: prompt and answer are text
    python -m experiments.generate run=KEY prompt='3 17 0 4' max_new_tokens=4
        any other run: both are ids
    python -m experiments.generate run=KEY prompt='To be' prompt='Good night, good' seed=1
        several prompts, in one batch
    python -m experiments.generate run=KEY prompt='3 17 0 4' prompt='5 1'
        an encoder-decoder: prompts are sources, and an answer stands alone, up to the sign that ends it

Options: run (a folder, or a KEY in the folder `runs`), prompt, max_new_tokens=200, temperature=0 (greedy), top_k,
top_p, stop (the token that ends an answer, as prompts are written), seed=0 (of the draws), runs=runs. The newest
checkpoint is loaded, on a GPU where there is one. Mistakes end with exit code 2.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from arch.encoder_decoder import EncoderDecoder
from experiments import cli, tasks

_NUMBERS: Mapping[str, type] = {
    "max_new_tokens": int, "temperature": float, "top_k": int, "top_p": float, "seed": int,
}
_TEXTS = ("run", "runs", "stop")


class Numbers:
    """Ids of any run, as people write them."""

    def encode(self, text: str) -> list[int]:
        """Numbers between spaces or commas.

        Raises:
            ValueError: anything else.
        """
        words = text.replace(",", " ").split()
        for word in words:
            if not word.isdecimal():
                raise ValueError(f"{word!r} is no id; a run of another task than text wants ids such as '3 17 4'")
        return [int(word) for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def continued(
    run: str, prompts: Sequence[str], *, runs: str = "runs", max_new_tokens: int = 200, seed: int = 0,
    stop: str | None = None, **sampling: Any,
) -> list[str]:
    """Prompts and what a run's model says behind each, text or ids; of an encoder-decoder, its answers to the prompts.

    Args:
        run: a folder, or a key in the folder `runs`.
        seed: of the draws, from 0 to 2 ** 32 - 1.
        stop: one token, as prompts are written; None, for an encoder-decoder: the sign that ends answers.
        sampling: temperature, top_k and top_p of `LanguageModel.generate`.
    Raises:
        ValueError: no such run, no checkpoint, or something that the model cannot be asked.
    """
    # Lightning, which reads checkpoints, takes seconds to import.
    from experiments import resume
    from experiments.record import read_description

    # On the CPU, torch looks at the low 32 bits alone: larger ones would repeat the draws of others.
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} must be from 0 to {2**32 - 1}")
    task = read_description(resume.find(run, runs)).config["task"]
    tokens = resume.tokeniser(run, runs) if task["name"] == "text" else Numbers()
    end = None if stop is None else tokens.encode(stop)
    if end is not None and len(end) != 1:
        raise ValueError(f"stop={stop!r} must be one token; it is {len(end)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = resume.load(run, runs).to(device)
    options = {"generator": torch.Generator(device).manual_seed(seed), **sampling}
    asked = [tokens.encode(prompt) for prompt in prompts]
    if isinstance(model, EncoderDecoder):
        signs = tasks.build(task).signs
        assert signs is not None
        end = end or [signs[1]]
        answers = model.transduce(asked, [[signs[0]]] * len(asked), max_new_tokens, stop=end[0], **options)
        return [tokens.decode(row.tolist()) for row in answers]
    said = model.generate(asked, max_new_tokens, stop=end and end[0], **options)
    return [tokens.decode([*prompt, *row.tolist()]) for prompt, row in zip(asked, said, strict=True)]


def main() -> int:
    """The exit code: 0; 2 after a mistake."""
    cli.help_or_options("experiments.generate", __doc__)

    def say() -> None:
        options, prompts = _options(sys.argv[1:])
        print("\n---\n".join(continued(prompts=prompts, **options)))

    return cli.run(say, "train")


def _options(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The keyword arguments of `continued`, prompts apart, and the prompts."""
    given = cli.pairs(words, ("run", "prompt", *_NUMBERS, *_TEXTS[1:]))
    prompts = [value for name, value in given if name == "prompt"]
    if not prompts:
        raise cli.UsageError("prompt=... is missing; see --help")
    rest = {name: value for name, value in given if name != "prompt"}
    return {name: _number(name, value) if name in _NUMBERS else value for name, value in rest.items()}, prompts


def _number(name: str, value: str) -> float:
    try:
        return _NUMBERS[name](value)
    except ValueError:
        kind = "a whole number" if _NUMBERS[name] is int else "a number"
        raise cli.UsageError(f"{name}={value} must be {kind}") from None


if __name__ == "__main__":
    sys.exit(main())
