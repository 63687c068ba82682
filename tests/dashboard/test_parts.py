"""The parts of the dashboard by themselves: tokens, sessions, the last hour, and the feed."""

import asyncio
from collections import deque
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bsfg.config import Token, TokenRole, parse
from bsfg.config.kinds import Action
from bsfg.errors import ConfigInvalid, Overloaded
from bsfg.node.authorize import Matrix, Request
from bsfg.node.dashboard import sessions as sessions_module
from bsfg.node.dashboard.feed import WAITING_MAX, BrowserFeed, SeriesHistory, event, values_of
from bsfg.node.dashboard.sessions import ALPHABET, Sessions, Tokens, cleaned, hash_of, make
from bsfg.wire.service import Caller

MINIMAL = """
[zone]
name = "plant-a"
[tls]
ca = "ca.crt"
certificate = "a.crt"
key = "a.key"
[streams.operational]
"""


@dataclass
class HandClock:
    """A clock that is moved by hand."""

    ms: int = 1_000

    def now_unix_ms(self) -> int:
        """Give the wall clock."""
        return self.ms

    def monotonic_ms(self) -> int:
        """Give the other one."""
        return self.ms


def row(name: str, token: str) -> Token:
    """Make the row of a token."""
    return Token(name=name, hash=hash_of(token), role=TokenRole.VIEWER)


def test_tokens_are_long_random_and_readable() -> None:
    """Each token is another one, has 125 bits, and avoids letters that are taken for others."""
    made = {make() for _ in range(200)}
    assert len(made) == 200
    assert {char for token in made for char in token.removeprefix("bsfg-")} <= set(ALPHABET) | {"-"}
    assert len(ALPHABET) == 32 and not set("ilou") & set(ALPHABET)
    assert all(cleaned(token) == token for token in made)


@given(st.text(max_size=80))
def test_only_what_was_made_as_a_token_can_be_one(word: str) -> None:
    """A word that somebody made up is no token, also when its hash stands in the file."""
    assert cleaned(word) is None
    assert Tokens({"weak": row("weak", word)}).name_of(word) is None


@given(st.integers(0, 4), st.integers(0, 1 << 32))
def test_a_token_is_found_as_people_type_it(which: int, seed: int) -> None:
    """Case, blanks and misread letters do not matter; another token is not found."""
    random, made = Random(seed), [make() for _ in range(5)]
    tokens = Tokens({str(number): row(str(number), token) for number, token in enumerate(made)})
    swapped = {"0": "0oO", "1": "1iIlL", "v": "vuVU"}
    typed = "".join(random.choice(swapped.get(char, char + char.upper())) for char in made[which])
    assert tokens.name_of(f"  {typed[:9]} {typed[9:]}\n") == str(which)
    assert tokens.name_of(make()) is None
    assert not Tokens({})


def test_the_configuration_refuses_tokens_that_make_no_sense() -> None:
    """A hash that is none, a role that tokens cannot have, one token for two people, and tokens without TLS."""
    good = hash_of(make())
    viewer = f'hash = "{good}"\nrole = "viewer"\n'
    assert parse(f'{MINIMAL}[tokens.a]\nhash = "{good}"\nrole = "viewer"\n').tokens["a"].role == TokenRole.VIEWER
    wrong = {
        f'[tokens.a]\nhash = "{make()}"\nrole = "viewer"\n': "bsfg token",
        f'[tokens.a]\nhash = "{good}"\nrole = "producer"\n': '"viewer", "operator"',
        f'[tokens.a]\nhash = "{good}"\n': "role is missing",
        f'[tokens.A]\nhash = "{good}"\nrole = "viewer"\n': "token name",
        f"[tokens.a]\n{viewer}[tokens.b]\n{viewer}": "a token of his own",
        f'[listen]\nhttp_enabled = false\n[tokens.a]\nhash = "{good}"\nrole = "viewer"\n': "http_enabled",
    }
    for text, says in wrong.items():
        with pytest.raises(ConfigInvalid, match=says):
            parse(MINIMAL + text)


def test_no_certificate_can_be_called_like_a_token() -> None:
    """The bearer of a token is not in the table of certificates, and the roles of a token end at operator."""
    config = parse(f'{MINIMAL}[tokens.a]\nhash = "{hash_of(make())}"\nrole = "operator"\n')
    matrix = Matrix.of(config)
    for action in Action:
        allowed = matrix.decide_token("a", Request(action, "operational"), 0).allowed
        assert allowed == (action in (Action.VIEW, Action.ACT))
        assert not matrix.decide("token:a", Request(action, "operational"), 0).allowed
        assert not matrix.decide_token("b", Request(action, "operational"), 0).allowed


def test_sessions_end_with_their_time() -> None:
    """A session is found by its cookie until its time is over, by nothing else, and not after it was ended."""
    clock = HandClock()
    sessions = Sessions(clock, 10.0, 4.0)
    cookie, session = sessions.begin(Caller(token="a"), may_act=False)
    other, _ = sessions.begin(Caller(token="a"), may_act=False)
    assert sessions.find(cookie) is session and sessions.known(session)
    assert sessions.find(cookie + "x") is None and sessions.find(None) is None and sessions.find("") is None
    sessions.end(other)
    assert sessions.find(other) is None
    clock.ms += 10_000
    assert sessions.find(cookie) is None and not sessions.known(session)


def test_a_session_that_may_act_ends_when_left_alone() -> None:
    """Nobody's hand for a while ends it, each use gives it that while again, and never more than its time."""
    clock = HandClock()
    sessions = Sessions(clock, 10.0, 4.0)
    operator, session = sessions.begin(Caller(token="a"), may_act=True)
    viewer, _ = sessions.begin(Caller(token="b"), may_act=False)
    for _ in range(3):
        clock.ms += 3_000
        assert sessions.find(operator) is session
        sessions.used(session)
    clock.ms += 999
    assert sessions.find(operator) is session and sessions.find(viewer) is not None
    clock.ms += 1
    assert sessions.find(operator) is None and sessions.find(viewer) is None
    operator, session = sessions.begin(Caller(token="a"), may_act=True)
    clock.ms += 4_000
    assert sessions.find(operator) is None and not sessions.known(session)


def test_sessions_are_bounded_and_nobody_crowds_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many sessions of one owner end his own oldest; too many in all end the oldest."""
    monkeypatch.setattr(sessions_module, "SESSIONS_OF_ONE_MAX", 3)
    monkeypatch.setattr(sessions_module, "SESSIONS_MAX", 6)
    sessions = Sessions(HandClock(), 10.0, 4.0)
    quiet, _ = sessions.begin(Caller(token="quiet"), may_act=False)
    greedy = [sessions.begin(Caller(token="greedy"), may_act=False)[0] for _ in range(10)]
    assert [sessions.find(cookie) is not None for cookie in greedy] == [False] * 7 + [True] * 3
    assert sessions.find(quiet) is not None
    for number in range(6):
        sessions.begin(Caller(token=str(number)), may_act=False)
    assert sessions.find(quiet) is None


POINTS = st.lists(
    st.dictionaries(st.sampled_from([("a",), ("b", "c"), ("d", "e", "f"), ("g",)]), st.floats(-1e9, 1e9), max_size=4),
    max_size=40,
)


@given(POINTS, st.integers(1, 9))
def test_the_history_is_the_last_points(points: list[dict[tuple[str, ...], float]], size: int) -> None:
    """What is given is what was added last, the oldest first, with nothing where nothing was known."""
    history, model = SeriesHistory(points=size), deque[tuple[int, dict[tuple[str, ...], float]]](maxlen=size)
    for number, values in enumerate(points):
        history.add(number, values)
        model.append((number, values))
    found = history.to_dict()
    assert found["times"] == [time for time, _ in model]
    series = {tuple(each["of"]): each["values"] for each in found["series"]}
    assert set(series) == {name for _, values in model for name in values}
    for name, values in series.items():
        expected = [each.get(name) for _, each in model]
        assert values == [None if value is None else pytest.approx(value, rel=1e-5) for value in expected]


def test_the_history_is_bounded() -> None:
    """More series than allowed are left out, until others have gone."""
    history = SeriesHistory(points=2, series_max=3)
    for number in range(5):
        history.add(number, {(str(number), str(each)): 1.0 for each in range(3)})
    assert len(history.to_dict()["series"]) == 3
    history.add(5, {})
    history.add(6, {("new",): 1.0})
    assert [each["of"] for each in history.to_dict()["series"]] == [["new"]]


def test_what_is_kept_of_a_status() -> None:
    """Ends, fills, frontiers, backlogs, what is left of links, and lags; nothing of retired consumers."""
    consumer = {"name": "app", "committed": 4, "backlog": 5, "retired_reason": None}
    document = {
        "buffers": [{"stream": "s", "buffer": "store", "end": 10, "fill_percent": 0.5}],
        "consumers": [consumer, {**consumer, "name": "gone", "retired_reason": "old"}],
        "links": [{"link": "from-x", "reports": [{"stream": "s", "backlog": 7}]}],
    }
    assert values_of(document, {("from-x", "s"): 0.25}) == {
        ("end", "s", "store"): 10,
        ("fill", "s", "store"): 0.5,
        ("frontier", "app"): 4,
        ("backlog", "app"): 5,
        ("left", "from-x", "s"): 7,
        ("lag", "from-x", "s"): 0.25,
    }


def test_a_feed_lets_the_slow_go_and_nobody_else() -> None:
    """Who does not read is cut off when too much waits for him; the others get every event; the number is bounded."""

    async def play() -> None:
        feed, cut, got = BrowserFeed(2), [], []

        async def send(message: dict[str, object]) -> None:
            got.append(message["body"])

        quick = feed.join(lambda: True, lambda: cut.append("quick"))
        slow = feed.join(lambda: True, lambda: cut.append("slow"))
        with pytest.raises(Overloaded):
            feed.join(lambda: True, lambda: None)
        reading = asyncio.create_task(quick.pump(send))
        sent = [event("state", str(number).encode()) for number in range(WAITING_MAX + 3)]
        for data in sent:
            feed.publish(data)
            await asyncio.sleep(0)
        assert (cut, slow.slow, len(feed)) == (["slow"], True, 1)
        feed.close()
        await reading
        assert got == [*sent, b""]
        with pytest.raises(Overloaded):
            feed.join(lambda: True, lambda: None)

    asyncio.run(play())


def test_a_watcher_who_may_no_longer_watch_is_told_so() -> None:
    """The event after a session has ended is that it has ended, and the last."""

    async def play() -> None:
        got, may = [], [True, False]

        async def send(message: dict[str, object]) -> None:
            got.append((message["body"], message["more_body"]))

        feed = BrowserFeed(1)
        watcher = feed.join(lambda: may.pop(0), lambda: None)
        for data in (b"one", b"secret"):
            feed.publish(data)
        await watcher.pump(send)
        assert got == [(b"one", True), (event("ended", b"{}"), False)]

    asyncio.run(play())
