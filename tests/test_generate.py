"""The engine over transformers: text as `model.generate` gives it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from answers import answer, ids_of, text_of  # noqa: E402
from rowstream.runtime.detokenize import TextStream  # noqa: E402
from rowstream.runtime.engine import Message, PromptError, SamplingParams  # noqa: E402
from rowstream.runtime.generate import TransformersEngine  # noqa: E402

PROMPTS = ["The river runs through", "a", "émigré ☺ <|im_end|>\n one two three"]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)


@pytest.fixture(scope="module")
def engine(synth_model: Any, synth_tokenizer: Any) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(synth_model, synth_tokenizer, name="tiny")
    yield engine
    engine.close()


def oracle(model: Any, prompt: Sequence[int], max_tokens: int, **settings: Any) -> list[int]:
    """Continue a prompt with transformers alone."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        **settings,
    )
    return [int(token) for token in out[0, len(prompt) :]]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_that_of_generate(
    engine: TransformersEngine, synth_model: Any, synth_tokenizer: Any, prompt: str
) -> None:
    ids = engine.encode(prompt)
    assert list(ids) == synth_tokenizer(prompt)["input_ids"]
    chunks = answer(engine, ids, GREEDY)
    expected = oracle(synth_model, ids, 24)
    assert ids_of(chunks) == expected
    assert text_of(chunks) == synth_tokenizer.decode(expected, skip_special_tokens=True)
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"
    assert len(chunks) > 3  # it does stream


def test_characters_of_several_tokens_come_whole(synth_tokenizer: Any) -> None:
    text = "émigré ☺ 😀😀 日本語 " * 8
    ids = synth_tokenizer(text)["input_ids"]
    assert len(ids) > len(text)

    def decode(tokens: Sequence[int]) -> str:
        return str(synth_tokenizer.decode(list(tokens), skip_special_tokens=True))

    stream = TextStream(decode, ["never"])
    out = ""
    for token in ids:
        out += stream.push(token)
        assert text.startswith(out)
    assert out + stream.flush() == text


def test_an_end_token_stops_and_has_no_text(
    engine: TransformersEngine,
    synth_model: Any,
    synth_tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = engine.encode(PROMPTS[0])
    free = oracle(synth_model, ids, 24)
    end = free[10]
    monkeypatch.setattr(synth_model.generation_config, "eos_token_id", [5, end])
    patched = TransformersEngine(synth_model, synth_tokenizer, name="tiny")
    try:
        chunks = answer(patched, ids, GREEDY)
    finally:
        patched.close()
    at = free.index(end)
    assert ids_of(chunks) == free[: at + 1]
    assert text_of(chunks) == synth_tokenizer.decode(free[:at])
    assert chunks[-1].finish_reason == "stop"


def test_a_stop_string_ends_the_work(
    engine: TransformersEngine, synth_model: Any, synth_tokenizer: Any
) -> None:
    ids = engine.encode(PROMPTS[0])
    full = synth_tokenizer.decode(oracle(synth_model, ids, 24))
    stop = full[len(full) // 2 : len(full) // 2 + 5]
    sampling = SamplingParams(max_tokens=24, temperature=0.0, stop=("never", stop))
    chunks = answer(engine, ids, sampling)
    assert text_of(chunks) == full[: full.index(stop)]
    assert chunks[-1].finish_reason == "stop"
    assert len(ids_of(chunks)) < 24


def test_seeds_reproduce_and_differ(engine: TransformersEngine, synth_model: Any) -> None:
    ids = engine.encode(PROMPTS[0])

    def sampled(seed: int, **settings: Any) -> list[int]:
        sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=seed, **settings)
        return ids_of(answer(engine, ids, sampling))

    first = sampled(1)
    torch.manual_seed(99)  # the process's own random state has no say
    assert sampled(1) == first
    assert sampled(2) != first
    # the most likely token alone is left
    assert sampled(2, top_p=0.0) == oracle(synth_model, ids, 12)


def test_sampling_leaves_the_global_random_state_alone(engine: TransformersEngine) -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    answer(engine, engine.encode("a"), SamplingParams(max_tokens=3, temperature=1.0, seed=1))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_repetition_penalty_of_the_checkpoint_holds(
    engine: TransformersEngine, synth_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = engine.encode("one one one one")
    expected = oracle(synth_model, ids, 12, repetition_penalty=3.0)
    monkeypatch.setattr(synth_model.generation_config, "repetition_penalty", 3.0)
    found = ids_of(answer(engine, ids, SamplingParams(max_tokens=12, temperature=0.0)))
    assert found == expected


def test_a_chat_is_written_by_the_template(
    engine: TransformersEngine, synth_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [Message("system", "be brief"), Message("user", "hi <|im_end|>")]
    assert synth_tokenizer.decode(engine.encode_chat(turns)) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi <|im_end|><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    monkeypatch.setattr(synth_tokenizer, "chat_template", "{{ raise_exception('no turns') }}")
    with pytest.raises(PromptError, match="no turns"):
        engine.encode_chat(turns)
    monkeypatch.setattr(synth_tokenizer, "chat_template", None)
    with pytest.raises(PromptError, match="no chat template"):
        engine.encode_chat(turns)


def test_a_request_that_does_not_fit_fails_alone(engine: TransformersEngine) -> None:
    for prompt, max_tokens in (((), 1), ((1,) * 10, engine.context_tokens)):
        with pytest.raises(ValueError, match="do not fit a context"):
            answer(engine, prompt, SamplingParams(max_tokens=max_tokens))
    assert len(ids_of(answer(engine, (1,), SamplingParams(max_tokens=2)))) == 2
