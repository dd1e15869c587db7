"""Seconds of collectives on links, by hand: with a byte a second and no latency they are bytes."""

import dataclasses

import pytest

from optfn.distributed import Chip
from optfn.plan.clocks import Clocks, Transfer
from optfn.plan.communication import Collective, read_collective, read_group
from optfn.plan.hlo import Program
from optfn.plan.links import Switch, Torus, list_places

FOUR = (0, 1, 2, 3)
TORUS = Chip("torus", 1.0, 1.0, link=1.0, links=4, latency=0.0, ring_of=4)
SWITCH = Chip("switch", 1.0, 1.0, link=1.0, links=2, latency=0.0)


def on_torus(x, *lengths, chip=TORUS):
    return Torus(chip, list_places(lengths)).time(x).seconds


def test_places_are_listed_by_hosts():
    """`jax.experimental.topologies` lists "v5e:4x4" so, and "v5p:4x4x4"."""
    assert list_places((2, 3)) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    x_of_four = [y * 4 + x for x, y in list_places((4, 4))]
    assert x_of_four == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    cube = [(z * 4 + y) * 4 + x for x, y, z in list_places((4, 4, 4))]
    assert cube[:16] == x_of_four and cube[16:20] == [16, 17, 20, 21]


@pytest.mark.parametrize(
    ("kind", "sent"),
    [("all-gather", 12), ("reduce-scatter", 12), ("all-to-all", 12), ("all-reduce", 24)],
)
def test_bytes_of_a_ring(kind, sent):
    assert Collective(kind, 16, FOUR).sent == sent


def test_a_ring_uses_both_directions_and_a_line_one():
    gather = Collective("all-gather", 16, FOUR)
    assert on_torus(gather, 4) == 6
    assert on_torus(gather, 4, chip=dataclasses.replace(TORUS, ring_of=16)) == 12
    assert on_torus(gather._replace(group=(0, 1, 4, 5)), 8, 2) == 12  # half of a ring is a line


def test_all_dimensions_of_a_group_work_at_once_unless_it_is_one_ring():
    group = tuple(range(16))
    gather = Collective("all-gather", 16, group)
    assert on_torus(gather, 4, 4) == pytest.approx(15 / 4)
    assert on_torus(gather._replace(is_one_ring=True), 4, 4) == 15 / 2
    row = (0, 1, 4, 5)  # places (0, 0), (1, 0), (2, 0) and (3, 0)
    assert on_torus(gather._replace(group=row), 4, 4) == 12 / 2


def test_a_collective_leaves_the_links_of_other_dimensions_free():
    """Two of the same bytes over x and over y take the time of one; two over x, of both."""
    links = Torus(TORUS, list_places((4, 4)))
    row, column = (0, 1, 4, 5), (0, 2, 8, 10)
    over_x = links.time(Collective("all-gather", 16, row))
    over_y = links.time(Collective("reduce-scatter", 16, column))
    assert over_x.seconds == over_y.seconds == 6
    assert over_x.lanes == {(0, 1), (0, -1)} and over_y.lanes == {(1, 1), (1, -1)}
    for other, together in ((over_y, 6), (over_x, 12)):
        clocks = Clocks()
        sent = [Transfer("", x.seconds, 0, x.lanes) for x in (over_x, other)]
        for transfer in sent:
            clocks.start(transfer, is_asynchronous=True)
        assert clocks.finish().seconds == together


def test_groups_that_leave_chips_out_share_links():
    chip = dataclasses.replace(TORUS, ring_of=16)
    gather = Collective("all-gather", 16, FOUR)
    assert on_torus(gather, 4, 4, chip=chip) == 12 / 2  # a square of neighbours
    every_second = gather._replace(group=(0, 4, 8, 12))  # (0, 0), (2, 0), (0, 2) and (2, 2)
    assert on_torus(every_second, 4, 4, chip=chip) == 12
    assert on_torus(every_second, 4, 4) == 12 / 2  # round both rings
    everyone = every_second._replace(kind="all-to-all")
    assert on_torus(everyone, 4, 4, chip=chip) == 16 * 2 / 4 * 2


def test_each_hop_has_its_latency():
    slow = dataclasses.replace(TORUS, latency=100.0)
    gather = Collective("all-gather", 16, FOUR)
    assert on_torus(gather, 4, chip=slow) == 200 + 6
    assert on_torus(gather, 4, chip=dataclasses.replace(slow, ring_of=16)) == 300 + 12


def test_a_group_of_one_takes_nothing():
    alone = Collective("all-reduce", 16, (2,))
    assert on_torus(alone, 4) == 0 and Switch(SWITCH).time(alone).seconds == 0


def test_all_to_all_is_bound_by_the_cut():
    """On a ring of 8, half of the chips send half of 16 bytes through two links a direction."""
    everyone = Collective("all-to-all", 16, tuple(range(8)))
    assert on_torus(everyone, 8) == 4 * 8 / 2
    assert on_torus(everyone, 8, chip=dataclasses.replace(TORUS, ring_of=16)) == 4 * 8


def permute(*pairs):
    return Collective("collective-permute", 16, tuple(sorted({x for p in pairs for x in p})), pairs)


@pytest.mark.parametrize(
    ("pairs", "ring", "seconds", "lanes"),
    [
        ([(0, 1), (1, 2), (2, 3), (3, 0)], True, 16, {(0, 1)}),
        ([(0, 1), (1, 2), (2, 3), (3, 0)], False, 16, {(0, 1), (0, -1)}),  # back through all
        ([(0, 2), (1, 3)], False, 32, {(0, 1)}),  # both pass the link from 1 to 2
        ([(1, 0)], False, 16, {(0, -1)}),
        ([(0, 3)], True, 16, {(0, -1)}),
    ],
)
def test_a_permutation_takes_the_time_of_its_busiest_link(pairs, ring, seconds, lanes):
    chip = TORUS if ring else dataclasses.replace(TORUS, ring_of=16)
    found = Torus(chip, list_places((4,))).time(permute(*pairs))
    assert (found.seconds, found.lanes) == (seconds, lanes)


def test_behind_a_switch_all_links_carry():
    assert Switch(SWITCH).time(Collective("all-gather", 16, FOUR)).seconds == 6
    slow = dataclasses.replace(SWITCH, latency=5.0)
    assert Switch(slow).time(permute((0, 1))).seconds == 5 + 8


def test_between_nodes_the_network_carries():
    chip = dataclasses.replace(SWITCH, node=2, network=0.5)
    links = Switch(chip)
    assert links.time(Collective("all-gather", 16, (0, 1))).seconds == 4  # in one node
    # Two nodes: each lacks 8 of 16 bytes, which come through two networks.
    assert links.time(Collective("all-gather", 16, FOUR)).seconds == 8 / 2 / 0.5
    assert links.time(Collective("all-gather", 16, (0, 2))).seconds == 8 / 0.5
    assert links.time(Collective("all-to-all", 16, FOUR)).seconds == 8 / 0.5
    assert links.time(permute((0, 1))).seconds == 8
    assert links.time(permute((1, 2))).seconds == 32


FORMS = {
    "{{1,3},{0,2}}": (1, 3),
    "[2,2]<=[4]": (0, 1),
    "[2,2]<=[2,2]T(1,0)": (0, 2),
    "mesh['a'=2,'b'=2] {'a'}": (0, 2),
    "mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}": (0, 2),
    "{}": (0, 1, 2, 3),
}


@pytest.mark.parametrize("form", FORMS)
def test_groups(form):
    text = f"ENTRY %e () -> f32[8] {{\n  %g = f32[8] all-gather(%x), replica_groups={form}\n}}\n"
    program = Program(text)
    x = program.computations["e"]["g"]
    found = read_collective(x, "e", num_partitions=4)
    assert found == Collective("all-gather", 32, FORMS[form])


def test_a_pair_from_a_device_to_itself_links_no_other():
    pairs = "{{0,0},{1,2},{2,1},{3,3}}"
    line = f"%g = f32[8] collective-permute(%x), source_target_pairs={pairs}"
    x = Program(f"ENTRY %e () -> f32[8] {{\n  {line}\n}}\n").computations["e"]["g"]
    assert read_group(x) == (0,)


RING = '{"phase_rings":[{"ring_type":"ICI_RING_TYPE_UNIDIR_CW"}]}'


@pytest.mark.parametrize(
    ("settings", "is_one_ring"),
    [
        ('"emitter":"1DAllGatherNonMajorDim"', True),
        ('"strategy":"StrategyND"', False),
        ('"sparse_core_config":{}', True),
        (f'"sparse_core_config":{{}},"color_strategies":[{RING},{RING}]', True),
        (f'"sparse_core_config":{{}},"color_strategies":[{RING},{RING},{RING},{RING}]', False),
    ],
)
def test_the_algorithm_of_a_tpu_says_whether_it_is_one_ring(settings, is_one_ring):
    x = Program("ENTRY %e () -> f32[8] {\n  %g = f32[8] all-gather(%x)\n}\n")
    gather = x.computations["e"]["g"]._replace(attributes="replica_groups={}")
    found = read_collective(gather, "e", 4, settings)
    assert found.is_one_ring == is_one_ring
    assert found.is_queued == settings.startswith('"sparse_core')


def test_groups_of_another_form_are_an_error():
    program = Program("ENTRY %e () -> f32[8] {\n  %g = f32[8] all-gather(%x), groups=all\n}\n")
    with pytest.raises(ValueError, match="replica groups of another form in g"):
        read_collective(program.computations["e"]["g"], "e", num_partitions=4)


def test_constants_that_cannot_be():
    with pytest.raises(ValueError, match="hbm must be positive, got 0"):
        dataclasses.replace(TORUS, hbm=0)
    with pytest.raises(ValueError, match="latency must not be negative"):
        dataclasses.replace(TORUS, latency=-1.0)
    with pytest.raises(ValueError, match="node and network together"):
        dataclasses.replace(TORUS, node=8)


def test_names_of_chips():
    assert Chip.of("v5e:4x8").torus == (4, 8) and Chip.of("H100").torus == ()
    assert Chip.of("v5p").clock == 1.75e9
    assert Chip.of("v5e:").torus == ()
    for name in ("v9", "v5e:four"):
        with pytest.raises(ValueError, match=r"must be one of v5e, v5p, v6e, h100.*got"):
            Chip.of(name)
