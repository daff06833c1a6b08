"""One turn of a trial's agent with the policy, rendered here because the template is here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rollout.model.errors import InputError
from rollout.workloads.train.rollouts import Answer, Ask
from rollout.workloads.train.templates import Template

from rollout_worker.backends.port import Choice, Request, Sampling
from rollout_worker.backends.tokens import TextCodec

Draw = Callable[[Request], Awaitable[Choice]]


async def answer(ask: Ask, request_id: str, codec: TextCodec, template: Template, draw: Draw) -> Answer:
    policy, tokenizer = ask.policy, codec.tokenizer
    try:
        if ask.said:
            before, new = ask.messages[: ask.said - 1], ask.messages[ask.said :]
            added = template.appended(tokenizer, before, new, None, ask.so_far)
        else:
            text = template.rendered(tokenizer, ask.messages, None, generation_prompt=True)
            added = tokenizer.encode(text, add_special_tokens=False)
    except InputError as error:
        return Answer(ask.tag, fault=("api_bad_request", f"messages: {error.message}"))
    first = ask.first if ask.said else len(added)
    if not ask.said and first > min(policy.max_prompt, codec.max_model_len - 1):
        return Answer(ask.tag, cut=True, fault=_full(f"the messages have {first} tokens, and there is room for fewer"))
    prompt = [*ask.so_far, *added]
    room = min(policy.max_tokens, codec.max_model_len - first) - (len(prompt) - first)
    if room < 1:
        return Answer(ask.tag, cut=True, fault=_full("the conversation leaves no room for another answer"))
    most = min(room, ask.max_tokens or room)
    sampling = Sampling(
        temperature=policy.temperature, max_tokens=most, seeds=(ask.seed,), stop=tuple(ask.stop),
        stop_ids=tuple(policy.stop), ids=True,
    )  # fmt: skip
    choice = await draw(Request(request_id, sampling, prompt_ids=tuple(prompt), alone=True))
    ended = choice.finish_reason == "stop"
    return Answer(
        ask.tag, added, choice.ids, choice.id_logprobs, choice.text, "stop" if ended else "length",
        cut=not ended and len(choice.ids) >= room,
    )  # fmt: skip


def _full(text: str) -> tuple[str, str]:
    return "agent_context_window_exceeded", f"{text} (max_length, max_completion_length)"
