"""The words of a channel as a transition system.

One function for each actor yields what it may do next, one access to a word at a time. Words are
sequentially consistent here; which fences make them so is the implementation's matter. The
implementation shares no code with this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

MISUSE = -1  # of `door`
OK, READ, TIMEOUT, CLOSED = 0, 1, 2, 4  # of `header`
OPEN = 1  # of `answered`
TORN = -1  # staging that is being written


def header(epoch: int, status: int) -> int:
    return epoch << 8 | status


class Stream(NamedTuple):
    """One stream: replays of `post`, wait, reset, `verdict`, `take` in order."""

    step: int = 0
    place: str = "post"
    epoch: int = 0  # what this replay's bump gave; of a verdict, whose rows it found good
    launched: bool = True


class Loop(NamedTuple):
    """A thread that answers: the loop, the watchdog, or the host of a gated launch."""

    place: str = "look"
    epoch: int = 0
    ids: int = 0


class State(NamedTuple):
    """Every word of a channel, and where everybody is."""

    streams: tuple[Stream, ...]
    loop: Loop = Loop()
    watchdog: Loop = Loop()
    host: Loop = Loop()
    # device memory
    epoch: int = 0
    busy: bool = False
    ok: int = 0  # the epoch whose rows may be taken
    mismatch: bool = False
    # pinned, written by the GPU
    door: int = 0
    mailbox: int = 0
    # pinned, written by the host; the flag by both
    header: int = 0
    staging: int = 0
    flag: bool = False
    # of the host alone: epoch << 1 | OPEN
    answered: int = 0
    # faults that are left
    strays: int = 0
    closes: int = 0
    lost: int = 0
    wrong: bool = False


@dataclass(frozen=True)
class Rules:
    """What makes the protocol sound; each can be taken away."""

    header_checked: bool = True  # a take believes the header, not the flag
    busy_exchanged: bool = True  # a post sees that another one's rows were not taken yet
    ok_names_epoch: bool = True  # a take sees that a verdict was another ring's
    busy_until_taken: bool = True  # cleared behind the copy of the rows, not by the verdict
    epoch_atomic: bool = True  # two posts at once get two epochs
    epoch_first: bool = True  # bumped before the ids are written
    door_rechecked: bool = True  # a post that rang looks whether it hid another one's MISUSE
    watchdog: bool = True
    open_state: bool = True
    header_again: bool = True  # an open channel's header is stored again, like its flag
    epochs: bool = True  # answers carry an epoch, and only one of each is given
    gate_compares: bool = True  # a gated post compares its ids with the mailbox
    gate_waits: bool = True  # the host fills when the stream is past the last take


@dataclass(frozen=True)
class Setting:
    """Who takes part, and what may go wrong at any moment."""

    rules: Rules = field(default_factory=Rules)
    sync: str = "flag"  # or "kernel": spin on the header; or "gate": filled before the launch
    steps: tuple[int, ...] = (3,)  # replays of each stream
    alone: bool = False  # a take of one block, whose verdict is its own
    gives_up: bool = False  # "kernel": the spin's own time-out
    stuck: bool = False  # the loop may stop for ever in the middle of a serve
    strays: int = 0  # flags set by nobody
    closes: int = 0
    lost: int = 0  # launches that never come
    other_ids: bool = False  # "gate": a launch may bring ids that the host did not know

    def ids(self, stream: int, step: int) -> int:
        return 1 + stream * 10 + step


Moves = Iterator[tuple[str, State]]


def stream_moves(s: State, number: int, setting: Setting) -> Moves:
    """The GPU."""
    rules, me = setting.rules, s.streams[number]
    ids = setting.ids(number, me.step)

    def at(place: str, epoch: int = me.epoch) -> tuple[Stream, ...]:
        moved = Stream(me.step, place, epoch, me.launched)
        return (*s.streams[:number], moved, *s.streams[number + 1 :])

    if me.step == setting.steps[number] or not me.launched:
        return
    wait = {"flag": "wait", "kernel": "spin", "gate": "verdict"}[setting.sync]
    if me.place == "post":
        misuse = s.busy and rules.busy_exchanged
        place = "misuse" if misuse else "ids"
        place = f"bump, {place}" if rules.epoch_first else place
        yield "takes the channel", s._replace(busy=True, streams=at(place))
    elif me.place.startswith("bump, ") and rules.epoch_atomic:
        up = s.epoch + 1
        yield f"bumps to {up}", s._replace(epoch=up, streams=at(me.place[6:], epoch=up))
    elif me.place.startswith("bump, "):
        yield "reads the epoch", s._replace(streams=at(me.place[1:], epoch=s.epoch + 1))
    elif me.place.startswith("ump, "):
        yield "stores the epoch", s._replace(epoch=me.epoch, streams=at(me.place[5:]))
    elif me.place == "misuse":
        after = at(wait, epoch=0) if rules.epoch_first else at(f"bump, {wait}")
        yield "rings MISUSE", s._replace(door=MISUSE, streams=after)
    elif me.place == "ids" and setting.sync == "gate":
        for other in (0, 50) if setting.other_ids else (0,):
            differ = s.mailbox != ids + other and rules.gate_compares
            wrong = s.wrong or (bool(other) and not rules.gate_compares)
            yield "compares", s._replace(mismatch=differ, wrong=wrong, streams=at("ring"))
    elif me.place == "ids":
        yield "posts ids", s._replace(mailbox=ids, streams=at("ring"))
    elif me.place == "ring" and not rules.epoch_first:
        yield "rings early", s._replace(door=s.epoch + 1, streams=at("bump, recheck"))
    elif me.place == "ring":
        after = at("recheck") if rules.door_rechecked else at(wait, epoch=0)
        yield f"rings {me.epoch}", s._replace(door=me.epoch, streams=after)
    elif me.place == "recheck":
        door = s.door if s.epoch == me.epoch else MISUSE
        yield "looks again", s._replace(door=door, streams=at(wait, epoch=0))
    elif me.place == "wait" and s.flag:
        yield "passes", s._replace(streams=at("reset"))
    elif me.place == "reset":
        yield "clears the flag", s._replace(flag=False, streams=at("verdict"))
    elif me.place == "spin":
        if s.header >> 8 == s.epoch or s.header == header(0, CLOSED):
            yield "passes", s._replace(streams=at("verdict"))
        if setting.gives_up:
            yield "gives up", s._replace(ok=0, streams=at("take", epoch=0))
    elif me.place == "verdict":
        ok = s.header == header(s.epoch, OK) if rules.epochs else s.header & 0xFF == OK
        ok = (ok or not rules.header_checked) and not s.mismatch
        judged = at("take" if setting.alone else "store", epoch=s.epoch if ok else 0)
        yield f"finds {ok}", s._replace(streams=judged)
    elif me.place == "store":
        busy = s.busy and rules.busy_until_taken
        yield f"says {me.epoch}", s._replace(ok=me.epoch, busy=busy, streams=at("take", epoch=0))
    elif me.place == "take":
        place = "release" if rules.busy_until_taken else "post"
        step = me.step + (place == "post")
        on = Stream(step, place, 0, setting.sync != "gate" or place == "release")
        streams = (*s.streams[:number], on, *s.streams[number + 1 :])
        good = me.epoch if setting.alone else s.ok
        taken = good == s.epoch if rules.ok_names_epoch else good != 0
        wrong = s.wrong or (taken and s.staging != ids)
        # another stream's take may still read `ok`
        named = s.ok if len(setting.steps) > 1 else 0
        name = "takes rows" if taken else "is void"
        yield name, s._replace(wrong=wrong, ok=named, streams=streams)
    elif me.place == "release":
        on = Stream(me.step + 1, "post", 0, setting.sync != "gate")
        streams = (*s.streams[:number], on, *s.streams[number + 1 :])
        yield "releases", s._replace(busy=False, streams=streams)


def opened(s: State) -> State:
    # the epoch beside the bit no longer matters
    return s._replace(answered=OPEN)


def answer(s: State, epoch: int, rules: Rules) -> State | None:
    """Win the right to answer an epoch, or lose it."""
    if not rules.epochs:
        return s._replace(answered=max(s.answered, epoch << 1))
    return s._replace(answered=epoch << 1) if s.answered == epoch - 1 << 1 else None


def open_moves(s: State, me: Loop, rules: Rules) -> Iterator[tuple[str, State, Loop]]:
    """An open channel, on every look of either thread."""
    if rules.open_state and (s.header != header(0, CLOSED) if rules.header_again else not s.flag):
        yield "closes", s, Loop("close")
    if rules.open_state and not s.flag:
        yield "lets pass", s._replace(flag=True), me


def loop_moves(s: State, setting: Setting) -> Moves:
    """The thread that serves rings."""
    rules, me = setting.rules, s.loop
    if me.place == "look":
        if s.answered & OPEN:
            for name, after, on in open_moves(s, me, rules):
                yield name, after._replace(loop=on)
        elif s.door == (s.answered >> 1) + 1:
            yield f"sees ring {s.door}", s._replace(loop=Loop("ids", s.door))
        elif s.door != s.answered >> 1 and rules.open_state:
            yield f"opens at door {s.door}", opened(s)._replace(loop=Loop("close"))
    elif me.place == "close":
        yield "stores CLOSED", s._replace(header=header(0, CLOSED), loop=Loop())
    elif me.place == "ids":
        yield "reads ids", s._replace(loop=me._replace(place="tear", ids=s.mailbox))
    elif me.place == "tear":
        yield "begins to fill", s._replace(staging=TORN, loop=me._replace(place="fill"))
    elif me.place == "fill":
        yield "fills", s._replace(staging=me.ids, loop=me._replace(place="answer"))
        if setting.stuck:
            yield "is stuck", s._replace(loop=Loop("stuck"))
    elif me.place == "answer":
        won = answer(s, me.epoch, rules)
        yield "is late", s._replace(loop=Loop())
        if won is not None:
            yield f"answers {me.epoch}", won._replace(loop=me._replace(place="header"))
    elif me.place == "header":
        yield "stores OK", s._replace(header=header(me.epoch, OK), loop=Loop("flag"))
    elif me.place == "flag":
        yield "sets the flag", s._replace(flag=True, loop=Loop())


def watchdog_moves(s: State, setting: Setting) -> Moves:
    """The thread that answers for the loop, at any moment."""
    rules, me = setting.rules, s.watchdog
    if not rules.watchdog:
        return
    if me.place == "look":
        if s.answered & OPEN:
            for name, after, on in open_moves(s, me, rules):
                yield name, after._replace(watchdog=on)
        elif s.door == (s.answered >> 1) + 1:
            won = answer(s, s.door, rules)
            assert won is not None
            yield f"answers {s.door}", won._replace(watchdog=Loop("header", s.door))
        elif s.door != s.answered >> 1 and rules.open_state:
            yield f"opens at door {s.door}", opened(s)._replace(watchdog=Loop("close"))
    elif me.place == "close":
        yield "stores CLOSED", s._replace(header=header(0, CLOSED), watchdog=Loop())
    elif me.place == "header":
        yield "stores TIMEOUT", s._replace(header=header(me.epoch, TIMEOUT), watchdog=Loop("flag"))
    elif me.place == "flag":
        yield "sets the flag", s._replace(flag=True, watchdog=Loop())


def host_moves(s: State, setting: Setting) -> Moves:
    """The caller of a gated graph: fills, answers, then launches."""
    me, on = s.host, s.streams[0]
    ids = setting.ids(0, me.ids)  # counts its own steps
    if me.place == "look":
        idle = not on.launched or not setting.rules.gate_waits
        if me.ids < setting.steps[0] and idle and not s.answered & OPEN:
            yield "writes ids", s._replace(mailbox=ids, host=me._replace(place="tear"))
        elif not on.launched and s.answered & OPEN and on.step < setting.steps[0]:
            yield "launches", s._replace(streams=(on._replace(launched=True),))
    elif me.place == "tear":
        yield "begins to fill", s._replace(staging=TORN, host=me._replace(place="fill"))
    elif me.place == "fill":
        yield "fills", s._replace(staging=ids, host=me._replace(place="header", epoch=s.door + 1))
        yield "fails", s._replace(host=me._replace(place="header of failure", epoch=s.door + 1))
    elif me.place.startswith("header"):
        status = READ if "failure" in me.place else OK
        yield (
            "answers",
            s._replace(header=header(me.epoch, status), host=me._replace(place="launch")),
        )
    elif me.place == "launch" and not on.launched:
        after = s._replace(host=Loop("look", 0, me.ids + 1))
        yield "launches", after._replace(streams=(on._replace(launched=True),))
        if s.lost:
            yield "launch fails", s._replace(host=Loop("look", 0, me.ids), lost=s.lost - 1)


def fault_moves(s: State) -> Moves:
    """What nobody asked for."""
    if s.strays:
        yield "stray flag", s._replace(flag=True, strays=s.strays - 1)
    if s.closes:
        yield "close()", opened(s)._replace(closes=s.closes - 1)


def moves(s: State, setting: Setting) -> Moves:
    for number in range(len(setting.steps)):
        for name, after in stream_moves(s, number, setting):
            yield f"stream {number} {name}", after
    actors: dict[str, Callable[[State, Setting], Moves]] = {"watchdog": watchdog_moves}
    actors |= {"host": host_moves} if setting.sync == "gate" else {"loop": loop_moves}
    for actor, of in actors.items():
        for name, after in of(s, setting):
            yield f"{actor} {name}", after
    yield from fault_moves(s)
