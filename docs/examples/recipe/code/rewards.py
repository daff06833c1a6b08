"""Rewards of grpo.toml: f(prompts, completions, **columns of the rows) -> a number for each completion."""


def said(completion):
    return completion[0]["content"].strip()


def exact(prompts, completions, answer, **columns):
    return [float(said(one) == right) for one, right in zip(completions, answer, strict=True)]


def places(prompts, completions, answer, **columns):
    """Share of letters that are in their place."""
    return [
        sum(a == b for a, b in zip(said(one), right, strict=False)) / max(len(said(one)), len(right))
        for one, right in zip(completions, answer, strict=True)
    ]
