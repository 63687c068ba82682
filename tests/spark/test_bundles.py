"""How links are spread over bundles, and how many bundles and replays fit the slots that there are."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bsfg.errors import InvalidArgument
from bsfg.spark.calls import NodeAccess
from bsfg.spark.replicate.driver import Layout, default_bundles, local_master, slots_for, slots_of
from bsfg.spark.replicate.plan import LinkTaskPlan, RunPlan, spread

OWN = NodeAccess("127.0.0.1:1")
NAMES = st.lists(st.integers(0, 60).map(lambda number: f"from-plant-{number}"), unique=True, max_size=40)


def link(name: str) -> LinkTaskPlan:
    """Give as much of a link's plan as its place in a bundle depends on."""
    plan: Any = SimpleNamespace(name=name)
    found: LinkTaskPlan = plan
    return found


def names(plan: RunPlan) -> list[list[str]]:
    """Give the links of each bundle."""
    return [[each.name for each in bundle.links] for bundle in plan.bundles]


@given(NAMES, st.integers(1, 8))
def test_every_link_is_in_one_bundle_and_bundles_are_even(wanted: list[str], most: int) -> None:
    """No task has more than one link more than another, and there is always one, be it for nothing."""
    plan = spread([link(name) for name in wanted], most, OWN, "us")
    sizes = [len(bundle) for bundle in names(plan)]
    assert sorted(name for bundle in names(plan) for name in bundle) == sorted(wanted)
    assert len(sizes) == max(1, min(most, len(wanted)))
    assert max(sizes) - min(sizes) <= 1


@given(NAMES, NAMES, st.integers(1, 8))
def test_a_changed_plan_leaves_links_where_they_are(before: list[str], after: list[str], most: int) -> None:
    """What is added or removed moves no other link from task to task, as far as bundles stay even."""
    old = spread([link(name) for name in before], most, OWN, "us")
    new = spread([link(name) for name in after], most, OWN, "us", old.number + 1, old.places)
    assert sorted(name for bundle in names(new) for name in bundle) == sorted(after)
    assert new.number == old.number + 1
    same = spread([link(name) for name in after], most, OWN, "us", new.number + 1, new.places)
    assert same.places == new.places
    grown = spread([link(name) for name in [*after, "one-more"]], most, OWN, "us", 9, new.places)
    if len(grown.bundles) == len(new.bundles):
        assert {name: at for name, at in grown.places.items() if name != "one-more"} == new.places


def test_slots_decide_on_bundles_and_replays() -> None:
    """Each bundle takes two slots and each replay one; what does not fit is said with the number that would."""
    assert local_master(3, 2) == "local[8,50]"
    assert default_bundles(1) == 1
    assert default_bundles(8) == 4
    assert Layout.fitting(slots_for(3, 2), 100, 3) == Layout(3, 2)
    assert Layout.fitting(7, 100) == Layout(3, 1)
    assert Layout.fitting(64, 2) == Layout(2, 2), "more bundles than links are of no use"
    assert Layout.fitting(2, 100) == Layout(1, 0), "without a slot for replays everything is moved live"
    with pytest.raises(InvalidArgument, match="2 bundles of links need 5") as refused:
        Layout.fitting(3, 100, 2)
    assert refused.value.details["needed"] == 5


@pytest.mark.parametrize(("master", "slots"), [("local", 1), ("local[3]", 3), ("local[ 4 , 9 ]", 4)])
def test_local_masters_say_how_many_tasks_they_run(master: str, slots: int) -> None:
    """Nobody needs to be asked."""
    spark: Any = None
    assert slots_of(spark, master, 1) == slots
