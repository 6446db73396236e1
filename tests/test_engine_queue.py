"""An engine's queue, which goes on whatever becomes of a request; a scripted model answers."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from answers import answer, ids_of, text_of  # noqa: E402
from rowstream.errors import UnavailableError  # noqa: E402
from rowstream.runtime.engine import (  # noqa: E402
    Chunk,
    EngineClosedError,
    QueueFullError,
    Request,
    SamplingParams,
)
from rowstream.runtime.generate import TransformersEngine  # noqa: E402
from rowstream.runtime.generation import Generation  # noqa: E402


class ScriptedModel:
    """Count upwards from the last token of the prompt, one step for each `go`; stands for a model.

    The next number is likeliest, by little. A prompt that starts with 9 raises.
    """

    def __init__(self) -> None:
        self.config = transformers.PretrainedConfig(vocab_size=100, max_position_embeddings=64)
        self.generation_config = transformers.GenerationConfig(eos_token_id=50, do_sample=False)
        self.device = torch.device("cpu")
        self.steps = threading.Semaphore(0)
        self.started: list[int] = []

    def go(self, steps: int = 1) -> None:
        self.steps.release(steps)

    def generate(
        self,
        *,
        input_ids: Any,
        generation_config: Any,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        **inputs: Any,
    ) -> None:
        self.started.append(int(input_ids[0, 0]))
        if input_ids[0, 0] == 9:
            raise OSError("table is gone")
        for _ in range(generation_config.max_new_tokens):
            assert self.steps.acquire(timeout=60)
            scores = -0.01 * (torch.arange(100) - input_ids[0, -1] - 1).abs()[None]
            for process in logits_processor:
                scores = process(input_ids, scores)
            input_ids = torch.cat([input_ids, scores.argmax(-1, keepdim=True)], dim=1)
            if all(bool(stop(input_ids, None).all()) for stop in stopping_criteria):
                return


class NumberTokenizer:
    chat_template = None

    def decode(self, ids: Sequence[int], **settings: Any) -> str:
        return "".join(f"{token} " for token in ids)


Made = tuple[TransformersEngine, ScriptedModel]


@pytest.fixture
def scripted() -> Iterator[Made]:
    model = ScriptedModel()
    engine = TransformersEngine(model, NumberTokenizer(), name="numbers", max_queue=2)
    yield engine, model
    model.go(10_000)
    engine.close()


def submit(engine: TransformersEngine, first: int, max_tokens: int = 3) -> Generation:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    (generation,) = engine.submit([Request((first, 10), sampling)])
    return generation


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_requests_are_answered_in_order(scripted: Made) -> None:
    engine, model = scripted
    generations = engine.submit(
        [Request((i, 10 * i), SamplingParams(max_tokens=2)) for i in (1, 2, 3)]
    )
    model.go(6)
    texts = [text_of(list(generation)) for generation in generations]
    assert texts == ["11 12 ", "21 22 ", "31 32 "]
    assert model.started == [1, 2, 3]
    until(lambda: engine.stats()["running"] == 0)
    stats = engine.stats()
    assert (stats["answered"], stats["generated_tokens"], stats["waiting"]) == (3, 6, 0)


def test_chunks_come_while_the_model_works(scripted: Made) -> None:
    engine, model = scripted
    generation = submit(engine, 1)
    for text in ("11 ", "12 "):
        model.go()
        assert next(generation).text == text
    assert engine.stats()["running"] == 1
    model.go()
    assert next(generation) == Chunk("13 ", (13,), "length")


def test_a_queue_has_an_end(scripted: Made) -> None:
    engine, model = scripted
    generations = [submit(engine, i) for i in (1, 2, 3)]
    with pytest.raises(QueueFullError, match="2"):
        submit(engine, 4)
    model.go(3)
    list(generations[0])
    until(lambda: model.started == [1, 2])
    generations.append(submit(engine, 5))
    with pytest.raises(QueueFullError):
        submit(engine, 6)
    # one that gave up makes room, and is never run
    generations[1 + 1].cancel()
    generations.append(submit(engine, 7))
    model.go(9)
    for generation in generations:
        list(generation)
    assert model.started == [1, 2, 5, 7]


def test_one_that_goes_away_frees_the_worker(scripted: Made) -> None:
    engine, model = scripted
    gone, next_one = submit(engine, 1, max_tokens=40), submit(engine, 2)
    model.go(2)
    assert next(gone).text == "11 "
    gone.cancel()
    model.go(1)  # the step under way, after which the loop looks
    until(lambda: model.started == [1, 2])
    model.go(3)
    assert text_of(list(next_one)) == "11 12 13 "


def test_an_error_reaches_its_request_alone(scripted: Made) -> None:
    engine, model = scripted
    broken, fine = submit(engine, 9), submit(engine, 1)
    with pytest.raises(OSError, match="table is gone"):
        next(broken)
    model.go(3)
    assert text_of(list(fine)) == "11 12 13 "


def test_an_end_token_of_the_script(scripted: Made) -> None:
    engine, model = scripted
    (generation,) = engine.submit([Request((47,), SamplingParams(max_tokens=10))])
    model.go(3)
    chunks = list(generation)
    assert (text_of(chunks), ids_of(chunks)) == ("48 49 ", [48, 49, 50])
    assert chunks[-1].finish_reason == "stop"


def test_without_a_limit_the_context_is_filled(scripted: Made) -> None:
    engine, model = scripted
    (generation,) = engine.submit([Request((51,) * 60)])
    model.go(4)
    chunks = list(generation)
    assert ids_of(chunks) == [52, 53, 54, 55]
    assert chunks[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("settings", "asked", "greedy"),
    [
        ({"do_sample": False}, {}, True),
        ({"do_sample": False}, {"temperature": 1.0}, False),
        ({"do_sample": None}, {}, False),
        ({"do_sample": None}, {"temperature": 0.0}, True),
        ({"do_sample": True, "top_k": 1}, {}, True),
        ({"do_sample": True, "temperature": 1e-4}, {}, True),
        ({"do_sample": True, "temperature": 1e-4}, {"temperature": 1.0}, False),
        ({"do_sample": True, "top_p": 0.001}, {}, True),
        ({"do_sample": True, "top_p": 0.001}, {"top_p": 1.0}, False),
    ],
)
def test_what_a_request_leaves_open_is_the_checkpoints(
    scripted: Made, settings: dict[str, Any], asked: dict[str, Any], greedy: bool
) -> None:
    engine, model = scripted
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    model.generation_config.eos_token_id = None
    model.go(6)
    sampling = SamplingParams(max_tokens=6, seed=4, **asked)
    found = ids_of(answer(engine, (60,), sampling))
    assert (found == [61, 62, 63, 64, 65, 66]) == greedy


def test_those_that_left_while_they_waited_are_forgotten(scripted: Made) -> None:
    engine, model = scripted
    running = submit(engine, 1)
    until(lambda: model.started == [1])
    left = []
    for i in range(50):
        generation = submit(engine, 20 + i)
        generation.cancel()
        left.append(weakref.ref(generation))
        del generation
    submit(engine, 2)
    # their prompts are freed now, not when their turn would have come
    assert sum(one() is not None for one in left) <= 1
    model.go(6)
    assert text_of(list(running)) == "11 12 13 "


def test_a_drain_ends_what_waits_and_lets_end_what_has_begun(scripted: Made) -> None:
    engine, model = scripted
    begun = engine.submit(
        [Request((i, 10 * i), SamplingParams(max_tokens=2, temperature=0.0)) for i in (1, 2)]
    )
    waiting = submit(engine, 3)
    until(lambda: model.started == [1])
    engine.drain()
    with pytest.raises(EngineClosedError):
        next(waiting)
    with pytest.raises(EngineClosedError):
        submit(engine, 4)
    stats = engine.stats()
    assert (stats["draining"], stats["closed"]) == (True, False)
    assert (stats["running"], stats["waiting"]) == (1, 1)
    model.go(4)
    assert [text_of(list(one)) for one in begun] == ["11 12 ", "21 22 "]
    assert model.started == [1, 2]


def test_close_ends_what_runs_and_what_waits(scripted: Made) -> None:
    engine, model = scripted
    running, waiting = submit(engine, 1, max_tokens=40), submit(engine, 2)
    model.go()
    next(running)
    closing = threading.Thread(target=engine.close)
    closing.start()
    for generation in (running, waiting):
        with pytest.raises(UnavailableError, match="closed"):
            next(generation)
    model.go()
    closing.join(60)
    assert not closing.is_alive()
    assert model.started == [1]
    with pytest.raises(UnavailableError, match="is closed"):
        submit(engine, 3)
    assert engine.stats()["closed"]
    engine.close()
    assert not any(thread.name == "engine numbers" for thread in threading.enumerate())
