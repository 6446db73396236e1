"""Chunks pass from one thread to another, or to an event loop, in order and to the end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rowstream.runtime.engine import Chunk, Request
from rowstream.runtime.generation import Generation

REQUEST = Request((1,))
CHUNKS = [*(Chunk(str(i), (i,)) for i in range(200)), Chunk("end", (), "stop")]


def fill(generation: Generation) -> threading.Thread:
    def put_all() -> None:
        for chunk in CHUNKS:
            generation.put(chunk)

    thread = threading.Thread(target=put_all)
    thread.start()
    return thread


async def gather(generation: Generation) -> list[Chunk]:
    return [chunk async for chunk in generation]


def test_a_thread_gets_every_chunk_in_order() -> None:
    generation = Generation(REQUEST)
    thread = fill(generation)
    assert list(generation) == CHUNKS
    thread.join()


def test_an_event_loop_gets_every_chunk_in_order() -> None:
    async def run() -> list[Chunk]:
        generation = Generation(REQUEST)
        thread = fill(generation)
        chunks = await asyncio.wait_for(gather(generation), 60)
        thread.join()
        return chunks

    assert asyncio.run(run()) == CHUNKS


def test_waiting_does_not_block_the_loop() -> None:
    async def run() -> Chunk:
        generation = Generation(REQUEST)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(generation.__anext__(), 0.02)
        # the consumer that gave up left nothing behind
        threading.Timer(0.02, generation.put, [CHUNKS[0]]).start()
        return await asyncio.wait_for(generation.__anext__(), 60)

    assert asyncio.run(run()) == CHUNKS[0]


def test_an_error_comes_after_the_chunks_before_it() -> None:
    generation = Generation(REQUEST)
    generation.put(CHUNKS[0])
    generation.fail(OSError("disk"))
    assert next(generation) == CHUNKS[0]
    with pytest.raises(OSError, match="disk"):
        next(generation)
    with pytest.raises(StopIteration):
        next(generation)


def test_nothing_comes_after_the_end() -> None:
    generation = Generation(REQUEST)
    generation.put(CHUNKS[-1])
    generation.put(CHUNKS[0])
    generation.fail(OSError())
    generation.cancel()
    assert not generation.cancelled
    assert list(generation) == CHUNKS[-1:]


@pytest.mark.parametrize("wait_first", [False, True])
def test_cancel_wakes_the_consumer(wait_first: bool) -> None:
    async def run() -> list[Chunk]:
        generation = Generation(REQUEST)
        if wait_first:
            asyncio.get_running_loop().call_later(0.02, generation.cancel)
        else:
            generation.cancel()
        chunks = await asyncio.wait_for(gather(generation), 60)
        assert generation.cancelled
        return chunks

    assert asyncio.run(run()) == []


def test_a_loop_that_was_closed_does_not_hurt_the_engine() -> None:
    generation = Generation(REQUEST)

    async def give_up() -> None:
        task = asyncio.ensure_future(generation.__anext__())
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(give_up())
    generation.put(CHUNKS[0])
    assert next(generation) == CHUNKS[0]
